"""Small runs of the real engine on records and a model of their own: what the checks look at.

An observed run is saved in the middle and goes on to its end. Then another engine loads what was
saved and goes on from there on other records, as after a crash: the two share their past and
nothing else. These engines are in their ordinary mode, where each draws its own key.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige.audit.loop import Loop
from vestige.audit.tape import Look, Recording, Tape, flat_charges
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.gradients.clipping import Clipping
from vestige.methods import Method
from vestige.plan import ADJACENCY, PrivacyPlan
from vestige.sampling import streams

INPUTS, CLASSES = 6, 3
LOUD = 50.0  # how much larger the last record is than the others: its gradient uses its bound up


@dataclass(frozen=True)
class Setting:
    """A small run: `lot` of `size` records in expectation, `steps` releases.

    With `groups`, their number, each clipping group has a noise multiplier of its own; `physical`
    is for methods that look at a lot once.
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
    physical: int | None = None


# Single precision, as most runs have; enough coordinates for a variance to within half a per cent.
OBSERVED = Setting(size=60, steps=200, hidden=40, dtype=torch.float32)


class SmallRun(Loop):
    """An engine that is attached to a small model and small data, and its loop."""

    def go(self, tape: Tape, steps: int) -> None:
        """Train for so many more releases, and let the tape see what a loop sees."""
        for *_, index in self.steps(steps):
            tape.took(index.tolist())
            tape.stepped(self.model, self.optimizer)

    def saved(self) -> tuple[dict[str, Any], ...]:
        """The states of engine, model and optimizer, copied."""
        states = self.engine.state_dict(), self.model.state_dict(), self.optimizer.state_dict()
        return copy.deepcopy(states)

    def load(self, saved: tuple[dict[str, Any], ...]) -> None:
        """Go on from what was saved."""
        engine, model, optimizer = saved
        self.engine.load_state_dict(engine)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def small_run(
    method: Method, data: TensorDataset, setting: Setting, *, noise_seed: int | None = None
) -> SmallRun:
    """The real engine with `method` on `data`, nothing drawn yet."""
    engine = PrivacyEngine("rdp", noise_seed=noise_seed)
    model = small_model(setting)
    noise: dict[str, Any] = {"noise_multiplier": setting.noise_multiplier}
    if setting.groups:  # different ones, so that a group that has the noise of another is noticed
        each = [setting.noise_multiplier * (1 + 0.25 * group) for group in range(setting.groups)]
        noise = {"group_noise_multipliers": each}
    made = engine.make_private(
        module=model,
        optimizer=method.make_optimizer(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=setting.lot, num_workers=setting.workers),
        method=method,
        max_grad_norm=setting.clip,
        clipping=setting.clipping,
        max_physical_batch_size=setting.physical if method.looks == 1 else None,
        steps=setting.steps,
        **noise | ({} if zeroes_out(method) else {"dataset_size": setting.size}),
    )
    return SmallRun(engine, _losses, *made)


def _losses(model: nn.Module, batch: Any) -> Tensor:
    x, y, silent, _ = batch
    each: Tensor = (1 - silent) * F.cross_entropy(model(x), y, reduction="none")
    return each


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


@dataclass(frozen=True)
class Observation:
    """The recordings of a run and of one that was resumed from the middle of it."""

    method: Method
    setting: Setting
    plan: PrivacyPlan
    whole: Recording
    resumed: Recording
    correlated: bool  # one charge covers several lots, whose noise is correlated
    forgotten: int  # charges that were saved and not on the ledger of the engine that resumed

    @property
    def recordings(self) -> tuple[Recording, Recording]:
        """Both of them."""
        return self.whole, self.resumed


def observe(
    method: Method,
    *,
    steps: int = OBSERVED.steps,
    seed: int | None = None,
    clipping: Clipping | None = None,
    groups: int = 0,
) -> Observation:
    """Run `method` for `steps` releases, and half as many again from its middle.

    With `groups`, their number, each clipping group has a noise multiplier of its own.
    """
    setting = replace(OBSERVED, steps=steps, clipping=clipping, groups=groups)
    with entropy_from(seed):
        run = small_run(method, records(setting), setting)
        with Tape(run.engine) as tape:
            run.go(tape, steps - steps // 2)
            saved, charged = run.saved(), len(flat_charges(run.engine))
            run.go(tape, steps // 2)
        other = small_run(method, records(setting, seed=5), setting)
        other.load(saved)
        forgotten = max(0, charged - len(flat_charges(other.engine)))
        with Tape(other.engine) as again:
            other.go(again, steps // 2)
    correlated = run.engine.door.correlation is not None
    recordings = tape.finished(), again.finished()
    return Observation(method, setting, run.engine.plan, *recordings, correlated, forgotten)


@dataclass
class Stretch:
    """The looks and lots that one charge pays for: one lot, or several of correlated noise."""

    rate: float
    multiplier: float  # infinity where nothing was charged
    looks: list[Look]

    @property
    def lots(self) -> list[int]:
        """The numbers of the lots."""
        return sorted({look.lot for look in self.looks})


def stretches(recording: Recording, correlated: bool) -> list[Stretch]:
    """What each charge pays for: a lot, or with correlated noise all lots up to the next charge.

    Several charges of one lot do not add up (they would be about independent lots), so the
    strongest one counts.
    """
    paid: list[Stretch] = []
    for look in recording.looks:
        same_lot = bool(paid) and paid[-1].looks[-1].lot == look.lot
        if not paid or not (same_lot or (correlated and not look.charges)):
            paid.append(Stretch(0.0, float("inf"), []))
        paid[-1].looks.append(look)
        for rate, multiplier in look.charges:
            paid[-1].rate = max(paid[-1].rate, rate)
            paid[-1].multiplier = min(paid[-1].multiplier, multiplier)
    return paid


@contextmanager
def entropy_from(seed: int | None) -> Iterator[None]:
    """Keys from `seed` in place of the operating system's entropy, one after the other.

    Engines stay in their ordinary mode, where each has a key of its own; only that the keys can be
    had again. None leaves everything as it is.
    """
    if seed is None:
        yield
        return
    drawn = itertools.count(1)

    def token_bytes(count: int) -> bytes:
        return hashlib.shake_256(f"vestige check {seed} {next(drawn)}".encode()).digest(count)

    with mock.patch.object(streams, "secrets", wraps=secrets, token_bytes=token_bytes):
        yield
