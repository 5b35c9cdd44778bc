"""A small private run with a tape at the door: what went in, what came out, what it was charged.

The run is one of the real engine, on records and a model of its own. The tape sits on the objects
of that run (the door, its random streams), so nothing outside of it changes. Played with `frozen`,
it puts the releases of an earlier recording in the place of the new ones, and the noise that is
drawn is another: who draws the noise of a release again, to take it off, has it no more.

A recording holds raw sums. The records are made up here, so that it reveals nothing.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.errors import ConfigError
from vestige.gradients.clipping import Clipping
from vestige.methods import Method
from vestige.plan import ADJACENCY
from vestige.sampling.streams import COUNTS, FIRST_LOOK, MEASURE, NOISE

INPUTS, CLASSES = 6, 3
LOUD = 50.0  # how much larger the last record is than the others: its gradient uses its bound up


@dataclass(frozen=True)
class Setting:
    """A small run: `lot` of `size` records in expectation, `steps` releases.

    With `groups`, their number, each clipping group has a noise multiplier of its own.
    """

    size: int = 48
    lot: int = 6
    steps: int = 32
    noise_multiplier: float = 0.8
    clip: float = 0.5
    clipping: Clipping | None = None
    groups: int = 0
    hidden: int = 10
    dtype: torch.dtype = torch.float64
    workers: int = 0


@dataclass(frozen=True)
class Lot:
    """A lot as it was handed out: its number and its records."""

    number: int
    records: tuple[int, ...]
    measures: bool = False


@dataclass
class Look:
    """One time that something went through the door.

    `kind` is "release", "first look" or "measurement". The sum and the counts are those before the
    noise. `charges` are the (rate, multiplier) that the ledger was charged since the last look,
    `late` of them only after the noise was drawn.
    """

    kind: str
    lot: int
    step: int
    gain: float
    bounds: tuple[float, ...]
    total: Tensor
    branch: Tensor | None
    recalled: Tensor | None  # the memory's branch when the lot was handed out
    recalled_at_release: Tensor | None
    counts: Tensor | None
    stds: tuple[float, ...] = ()
    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    noisy_counts: tuple[float, ...] | None = None
    charges: tuple[tuple[float, float], ...] = ()
    late: int = 0

    @property
    def query(self) -> Tensor:
        """gain * sum + branch: the release without its noise."""
        query = self.gain * self.total
        return query if self.branch is None else query + self.branch

    @property
    def noise(self) -> Tensor:
        """The release without the query."""
        return self.values - self.query


@dataclass
class Recording:
    """What a run showed. `told`, `weights`, `gradients` and `states` have an entry per lot."""

    lots: list[Lot] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)  # of the optimizer and the model
    segments: list[slice] = field(default_factory=list)
    group_names: tuple[str, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def sums(self) -> list[Look]:
        """The looks at a lot's sum."""
        return [look for look in self.looks if look.kind != "measurement"]

    @property
    def measurements(self) -> list[Look]:
        """The numbers of the whole data."""
        return [look for look in self.looks if look.kind == "measurement"]


class Tape:
    """Records what goes through the door of an attached engine while it is entered.

    With `frozen`, the looks of an earlier recording: their releases take the place of the new ones.
    """

    def __init__(self, engine: PrivacyEngine, frozen: Sequence[Look] | None = None) -> None:
        run = engine._run
        assert run is not None
        self.seen = Recording(group_names=engine.plan.group_names)
        self.seen.segments = list(run.door.segments)
        self._engine, self._run = engine, run
        self._frozen = None if frozen is None else iter(frozen)
        self._recalled: Tensor | None = None
        self._whole = True  # whether the batch at hand ends its lot
        self._charges = 0
        self._at_draw: int | None = None  # charges when the noise of the look at hand was drawn
        self._in_door = False
        self._noises = {NOISE, COUNTS, FIRST_LOOK, MEASURE}  # purposes of streams that are noise
        self._put_back = ExitStack()

    def __enter__(self) -> Tape:
        door, randomness = self._run.door, self._run.door.randomness
        self._charges = engine_charges(self._engine)
        self._put(door, "release", self._of_sum("release"))
        self._put(door, "first_look", self._of_sum("first look"))
        self._put(door, "measure", self._of_number)
        for name in ("normal_blocks", "normals"):
            self._put(randomness, name, self._drawing)
        if self._frozen is not None:
            self._put(randomness, "stream", self._other_noise)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self._put_back.close()

    def handed_out(self, records: Sequence[int]) -> None:
        """The loader has just given a batch to the loop: note its records and the branch."""
        batch = self._run.capture.batch
        assert batch is not None
        rows = () if batch.empty else tuple(records)
        lots = self.seen.lots
        if lots and lots[-1].number == batch.lot:  # another piece of the same lot
            lots[-1] = Lot(batch.lot, lots[-1].records + rows, batch.measures)
        else:
            lots.append(Lot(batch.lot, rows, batch.measures))
        self._recalled, self._whole = self._branch(), batch.last

    def stepped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: note everything that the end of a lot lets the loop see."""
        if not self._whole:
            return
        seen, parameters = self.seen, list(model.parameters())
        seen.told.append(self._engine.diagnostics())
        seen.weights.append(torch.cat([p.detach().flatten() for p in parameters]))
        given = [p.grad.flatten() for p in parameters if p.grad is not None]
        seen.gradients.append(torch.cat(given).clone() if given else None)
        saved = {"optimizer": optimizer.state_dict(), "model": dict(model.state_dict())}
        seen.states.append(copy.deepcopy(saved))

    def finished(self) -> Recording:
        """The recording, with what the engine would save of its memory and its parts."""
        saved = self._engine.state_dict()
        names = {"released", "next_lot", *(part.name for part in self._run.parts if part.name)}
        self.seen.state = {name: saved[name] for name in names if name in saved}
        return self.seen

    def _put(self, thing: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        """Put a wrapper of a method on the object itself, until the tape is left."""
        setattr(thing, name, wrap(getattr(thing, name)))
        self._put_back.callback(thing.__dict__.pop, name)

    def _branch(self) -> Tensor | None:
        branch = next((p.branch for p in self._run.parts if p.branch is not None), None)
        return None if branch is None else branch.values.clone()

    def _drawing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if self._at_draw is None:
                self._at_draw = engine_charges(self._engine)
            return original(*args, **kwargs)

        return draw

    def _other_noise(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Other streams for noise. Lots, and what a method draws for itself, stay as they were."""

        def cipher(purpose: bytes, step: int) -> Any:
            if self._in_door:
                self._noises.add(purpose)
            noise = purpose.removeprefix(b"tails of ") in self._noises
            return original(b"replayed " + purpose if noise else purpose, step)

        return cipher

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Something goes through the door: what is drawn meanwhile is noise."""
        self._at_draw, self._in_door = None, True
        try:
            yield
        finally:
            self._in_door = False

    def _of_sum(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            def through(*args: Any, **kwargs: Any) -> Any:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                return self._summed(kind, given.arguments, lambda: original(*args, **kwargs))

            return through

        return wrap

    def _summed(self, kind: str, given: dict[str, Any], through: Callable[[], Any]) -> Any:
        clipped, branch, counts = given["clipped"], given.get("branch"), given["clipped"]._counts
        look = Look(
            kind,
            int(given["lot"]),
            self._run.door.steps,
            float(given.get("gain", 1.0)),
            tuple(clipped.bounds),
            clipped._values.clone(),
            None if branch is None else branch.values.clone(),
            self._recalled,
            self._branch(),
            None if counts is None else counts.clone(),
        )
        with self._passing():
            release = through()
        look.values, look.noisy_counts = release.values.clone(), release.counts
        look.stds = tuple(release.stds)
        self._settle(look)
        earlier = self._next_frozen()
        if earlier is not None and earlier.values.shape == release.values.shape:
            release.values.copy_(earlier.values)
            release.counts = earlier.noisy_counts
        return release

    def _of_number(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def measure(*args: Any, **kwargs: Any) -> float:
            given = signature.bind(*args, **kwargs).arguments
            bound, multiplier = float(given["bound"]), float(given["multiplier"])
            total = torch.tensor([float(given["total"])], dtype=torch.float64)
            step, lot = self._run.door.steps, int(given["lot"])
            look = Look("measurement", lot, step, 1.0, (bound,), total, None, None, None, None)
            look.stds = (multiplier * bound,)
            with self._passing():
                noisy = float(original(*args, **kwargs))
            look.values = torch.tensor([noisy], dtype=torch.float64)
            self._settle(look)
            earlier = self._next_frozen()
            return noisy if earlier is None else float(earlier.values[0])

        return measure

    def _settle(self, look: Look) -> None:
        """Note what was charged, and keep the look."""
        now = engine_charges(self._engine)
        look.charges = flat_charges(self._engine)[self._charges :]
        look.late = 0 if self._at_draw is None else now - self._at_draw
        self._charges = now
        self.seen.looks.append(look)

    def _next_frozen(self) -> Look | None:
        return None if self._frozen is None else next(self._frozen, None)


def engine_charges(engine: PrivacyEngine) -> int:
    """How many charges are on the engine's ledger."""
    return engine.ledger.steps


def flat_charges(engine: PrivacyEngine) -> tuple[tuple[float, float], ...]:
    """The charges on the engine's ledger, one by one: (sampling rate, multiplier)."""
    return tuple(
        (event.sample_rate, event.noise_multiplier)
        for event in engine.ledger.events
        for _ in range(event.count)
    )


@dataclass
class SmallRun:
    """An engine that is attached to a small model and small data, and its loop."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any

    def go(self, tape: Tape, steps: int) -> None:
        """Train for so many more releases, by the loop that every method understands."""
        engine = self.engine
        last = engine.released + steps
        while engine.released < last:
            for x, y, silent, index in self.loader:
                tape.handed_out(index.tolist())
                closure: Any = self._closure(x, y, 1 - silent)  # torch wants a float, gets a tensor
                self.optimizer.step(closure)
                tape.stepped(self.model, self.optimizer)
                if engine.released == last:
                    break

    def _closure(self, x: Tensor, y: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            losses = weight * F.cross_entropy(self.model(x), y, reduction="none")
            self.engine.backward(losses)
            return losses.detach().mean()  # as in anybody's loop, so that who uses it is seen

        return closure


def small_run(
    method: Method, data: TensorDataset, setting: Setting, *, noise_seed: int | None = None
) -> SmallRun:
    """The real engine with `method` on `data`, nothing drawn yet."""
    engine = PrivacyEngine("rdp", noise_seed=noise_seed)
    model = small_model(setting)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=method.make_optimizer(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=setting.lot, num_workers=setting.workers),
        method=method,
        max_grad_norm=setting.clip,
        clipping=setting.clipping,
        steps=setting.steps,
        **_noise(setting) | ({} if zeroes_out(method) else {"dataset_size": setting.size}),
    )
    return SmallRun(engine, module, optimizer, loader)


def _noise(setting: Setting) -> dict[str, Any]:
    if not setting.groups:
        return {"noise_multiplier": setting.noise_multiplier}
    # Different ones, so that a group that has the noise of another is noticed.
    multipliers = [setting.noise_multiplier * (1 + 0.25 * group) for group in range(setting.groups)]
    return {"group_noise_multipliers": multipliers}


def small_model(setting: Setting) -> nn.Module:
    """Two matrices and a norm layer between them: three groups per layer, one of them no matrix."""
    hidden = setting.hidden
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(INPUTS, hidden), nn.Tanh(), nn.LayerNorm(hidden), nn.Linear(hidden, CLASSES)
        )
    return model.to(setting.dtype)


def records(setting: Setting, seed: int = 4) -> TensorDataset:
    """Made-up records (input, class, 1 where the loss is zeroed out, index); the last is loud.

    Not the loss's weight: the row of zeros that stands for an empty lot must have a loss.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(setting.size, INPUTS, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (setting.size,), generator=generator)
    x[-1] *= LOUD
    x = x.to(setting.dtype)
    return TensorDataset(x, y, x.new_zeros(setting.size), torch.arange(setting.size))


def neighbour(data: TensorDataset, method: Method) -> TensorDataset:
    """The same records without the last one, or with its loss zeroed out: as the adjacency says."""
    x, y, silent, index = data.tensors
    if not zeroes_out(method):
        return TensorDataset(x[:-1], y[:-1], silent[:-1], index[:-1])
    silent = silent.clone()
    silent[-1] = 1
    return TensorDataset(x, y, silent, index)


def zeroes_out(method: Method) -> bool:
    """Whether the method's guarantee is for zeroing out one record, not for leaving it out."""
    if method.adjacency == ADJACENCY:
        return False
    if method.adjacency.startswith("zero out"):
        return True
    raise ConfigError(
        f"method {method.name!r} has the adjacency {method.adjacency!r}, which the checks do not "
        f"know: it must be {ADJACENCY!r} or begin with 'zero out'."
    )
