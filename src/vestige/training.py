"""The training loop behind the command line, usable as a function.

`train` runs a `TrainConfig` and leaves a folder with config.json, metrics.jsonl, model.pt and
result.json. Torch is imported inside the functions, so that `vestige budget` and `--help` are
answered at once.

Guarantee: what the folder holds is a function of the releases, of public settings and of the
held-out split. Realised lot sizes, per-example numbers and the noise seed are never written, and
the training loss only on request, under a name that says that it is outside the guarantee.
"""

from __future__ import annotations

import contextlib
import io
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import vestige
from vestige import accounting
from vestige.errors import ConfigError
from vestige.methods import planned_charges, resolve
from vestige.runfolder import RunFolder
from vestige.settings import TrainConfig, check_lot

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vestige.data import Dataset
    from vestige.engine import PrivacyEngine

DEFAULT_NOISE = 1.0
HELD_OUT = "the held-out split, whose records the guarantee does not cover"

# How many rows go through a model at once: memory must not grow with the lot.
_ROWS = {"linear": 4096, "mlp": 4096, "cnn": 1024, "resnet18": 128}


@dataclass(frozen=True)
class Progress:
    """Where a run stands: told to `train`'s callback at every stage, lot and epoch.

    `metrics` is the line of metrics.jsonl that was just written, at the end of an epoch only, and
    `folder` the one that it was written to.
    """

    stage: str
    step: int = 0
    steps: int = 0
    epochs: int = 0
    metrics: Mapping[str, Any] | None = None
    folder: Path | None = None


def train(
    config: TrainConfig,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Train as `config` says, write the run folder, and return what result.json holds.

    `optimizer` is called with the parameters and lr=...: any class of torch.optim, SGD by default.
    On the main thread the first Ctrl-C ends the run after the lot at hand, with everything written
    and "interrupted": true; a second one is a KeyboardInterrupt.

    Guarantee: the result's epsilon is the engine's, for the releases that were really made; with a
    target `epsilon` it never exceeds the target.
    """
    tell = progress or (lambda _: None)
    return prepare(config, optimizer=optimizer, progress=progress).run(tell)


def prepare(
    config: TrainConfig,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    progress: Callable[[Progress], None] | None = None,
    dataset: Dataset | None = None,
) -> Session:
    """`train` up to its first lot: `Session.run` does the rest.

    `dataset` takes the place of the one that `config` names, for callers that have it at hand.
    """
    tell = progress or (lambda _: None)
    tell(Progress(f"loading {Path(config.dataset).name}"))

    from vestige import data, models
    from vestige.clipping import taken_apart
    from vestige.groups import partition

    device = _device(config.device)
    if dataset is None:
        dataset = data.load(
            config.dataset, config.data_dir, config.train_size, config.test_size, config.seed
        )
    records = len(dataset.x_train)
    check_lot(config.chosen_lot, records)
    steps = config.planned_steps(records)
    model = models.build(config.chosen_model, dataset.input_shape, dataset.classes, config.seed).to(
        device
    )
    # Found here rather than in the engine, before seconds go into the calibration.
    parts, _ = taken_apart(config.chosen_clipping)
    groups = partition(model, parts).names
    _check_bounds(config.clip, groups)

    tell(Progress("accounting"))
    method = resolve(config.method, config.settings)
    noise = DEFAULT_NOISE if config.noise_multiplier is None else config.noise_multiplier
    if config.group_noise_multiplier is not None:
        noise = config.group_noise_multiplier / math.sqrt(len(groups))
    planned = math.inf
    if method.private or config.epsilon is not None:
        lot, rate = config.chosen_lot, config.chosen_lot / records
        charges = planned_charges(
            method, config.chosen_clipping, len(groups), records, lot, rate, steps
        )
        if config.epsilon is not None:
            noise, _ = accounting.noise_for(
                config.epsilon, config.delta, charges, config.accountant
            )
        events = accounting.events_of(charges, noise)
        planned = accounting.epsilon(events, config.delta, config.accountant)
    return Session(
        config,
        dataset,
        model,
        optimizer or method.make_optimizer,
        device,
        steps,
        noise,
        planned,
        groups,
    )


class Session:
    """One run, from the private engine to the written result."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        model: nn.Module,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        device: str,
        steps: int,
        noise: float,
        planned: float,
        groups: tuple[str, ...],
    ) -> None:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from vestige.engine import PrivacyEngine

        self.config, self.dataset, self.model = config, dataset, model
        self.device, self.steps, self.planned = device, steps, planned
        self.train_data = dataset.x_train.to(device), dataset.y_train.to(device)
        self.test_data = dataset.x_test.to(device), dataset.y_test.to(device)
        self.optimizer = make_optimizer(model.parameters(), lr=config.chosen_lr)
        self.engine: PrivacyEngine = PrivacyEngine(
            config.accountant, seed=config.seed, noise_seed=config.noise_seed
        )
        _, _, self.loader = self.engine.make_private(
            module=model,
            optimizer=self.optimizer,
            data_loader=DataLoader(TensorDataset(*self.train_data), batch_size=config.chosen_lot),
            **_noise_form(config, noise, groups),
            clipping=config.chosen_clipping,
            method=resolve(config.method, config.settings),
            max_physical_batch_size=_physical_rows(config),
            steps=steps,
            averaging=config.averaging,
            history_dtype=getattr(torch, config.history_dtype) if config.history_dtype else None,
        )
        self.lines: list[dict[str, Any]] = []
        self.noted: dict[str, Any] = {}  # diagnostics of the epoch under way, by name
        self.seconds = 0.0

    def run(
        self, tell: Callable[[Progress], None], folder: RunFolder | None = None
    ) -> dict[str, Any]:
        """Train, write every file into a fresh run folder or `folder`, and return the result."""
        repeatable = _deterministic(self.config.noise_seed is not None)
        parts = (Path(self.config.dataset).stem, self.config.chosen_model, self.config.method)
        place = RunFolder(self.config.out, "-".join(parts)) if folder is None else folder
        with _Interrupt() as interrupt, repeatable, place as folder:
            config = self.config.public() | {
                "settings": dict(self.engine.plan.settings),
                "beta": self.engine.plan.beta,
                "noise_multiplier": self.engine.plan.noise_multiplier,
                "planned_steps": self.steps,
                "planned_epsilon": _finite(self.planned),
                "optimizer": type(self.optimizer).__name__,
                "device": self.device,
                "versions": versions(),
            }
            folder.write_json("config.json", config)
            self._train(tell, interrupt, folder)
            folder.write("model.pt", self._weights())
            if self.config.averaging and self.engine.released:
                with self._averaged():
                    folder.write("model_averaged.pt", self._weights())
            result = self._result(str(folder.path), interrupted=self.engine.released < self.steps)
            folder.write_json("result.json", result)
            return result

    def _train(
        self, tell: Callable[[Progress], None], interrupt: _Interrupt, folder: RunFolder
    ) -> None:
        from torch.nn.functional import cross_entropy

        engine, started = self.engine, time.perf_counter()
        epochs = -(-self.steps // engine.plan.lots_per_epoch)
        tell(Progress("training", 0, self.steps, epochs))
        while engine.released < self.steps and not interrupt.pending:
            for x, y in self.loader:
                before = engine.released

                def closure(x: Tensor = x, y: Tensor = y) -> None:
                    self.optimizer.zero_grad()
                    engine.backward(cross_entropy(self.model(x), y, reduction="none"))

                self.optimizer.step(closure)  # type: ignore[arg-type]
                if engine.released == before:
                    continue  # the rest of this lot is still to come
                folder.keep = True
                tell(Progress("training", engine.released, self.steps, epochs))
                if engine.released > before:
                    self._note(engine.diagnostics())
                if engine.released == self.steps or interrupt.pending:
                    break
            self.seconds = time.perf_counter() - started
            self.lines.append(self._measure())
            folder.write_lines("metrics.jsonl", self.lines)
            line = self.lines[-1]
            tell(Progress("training", engine.released, self.steps, epochs, line, folder.path))

    def _measure(self) -> dict[str, Any]:
        """A line of metrics.jsonl, from the weights and the held-out split."""
        loss, accuracy = self._evaluate(*self.test_data)
        line: dict[str, Any] = {
            "step": self.engine.released,
            "epoch": -(-self.engine.released // self.engine.plan.lots_per_epoch),
            "epsilon": _finite(self._live_epsilon()),
            "test_loss": _finite(loss),
            "test_accuracy": accuracy,
            "seconds": round(self.seconds, 3),
        }
        if self.config.averaging and self.engine.released:
            with self._averaged():
                loss, accuracy = self._evaluate(*self.test_data)
            line |= {"averaged_test_loss": _finite(loss), "averaged_test_accuracy": accuracy}
        if self.noted:
            line["diagnostics"], self.noted = self.noted, {}
        if self.config.train_loss:
            line["train_loss_outside_guarantee"] = _finite(self._evaluate(*self.train_data)[0])
        return line

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Add a step's numbers about the memory to the arrays of this epoch."""
        if "groups" in facts:  # a method without memory has nothing to tell
            self.noted.setdefault("groups", facts["groups"])
            for name, value in facts.items():
                if name != "groups":
                    self.noted.setdefault(name, []).append(value)

    def _live_epsilon(self) -> float:
        # PLD takes about a second, RDP next to nothing. The whole run's epsilon bounds that of
        # every part of it, so the figure on screen never exceeds the one at the end.
        cheap = "rdp" if self.engine.accountant == "pld" else self.engine.accountant
        return min(self.engine.get_epsilon(self.config.delta, cheap), self.planned)

    def _evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy."""
        import torch
        from torch.nn.functional import cross_entropy

        rows = _ROWS[self.config.chosen_model]
        loss, right = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for part, labels in zip(x.split(rows), y.split(rows), strict=True):
                scores = self.model(part)
                loss += float(cross_entropy(scores, labels, reduction="sum"))
                right += int((scores.argmax(1) == labels).sum())
        self.model.train()
        return loss / len(y), right / len(y)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """While entered, the model has its averaged weights."""
        last = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.engine.averaged_state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(last)

    def _weights(self) -> bytes:
        import torch

        # Copies on the CPU: the file then loads on any machine and holds the weights alone.
        state = {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def _result(self, folder: str, interrupted: bool) -> dict[str, Any]:
        plan, last = self.engine.plan, self.lines[-1] if self.lines else self._measure()
        epsilon = self.engine.get_epsilon(self.config.delta)
        result = {
            "method": plan.method,
            "settings": dict(plan.settings),
            "beta": plan.beta,
            "dataset": self.config.dataset,
            "model": self.config.chosen_model,
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "measured_on": HELD_OUT,
            "epsilon": _finite(epsilon),
            "delta": self.config.delta,
            "target_epsilon": self.config.epsilon,
            "accountant": self.engine.accountant,
            "guarantee": accounting.guarantee(epsilon, plan.adjacency),
            "adjacency": plan.adjacency,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sample_rate,
            "lot": plan.batch_size,
            "records": plan.dataset_size,
            "steps": self.engine.released,
            "epochs": self.engine.released / plan.lots_per_epoch,
            "clip": self.config.public()["clip"],
            "clipping": plan.clipping,
            "optimizer": type(self.optimizer).__name__,
            "lr": self.config.chosen_lr,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": last["seconds"],
            "seed": self.config.seed,
            "repeatable_noise": self.config.noise_seed is not None,
            "interrupted": interrupted,
            "caveats": self._caveats(),
            "device": self.device,
            "folder": folder,
            "versions": versions(),
        }
        if "averaged_test_accuracy" in last:
            result["averaged_accuracy"] = last["averaged_test_accuracy"]
            result["averaged_loss"] = last["averaged_test_loss"]
        if self.config.train_loss:
            key = "train_loss_outside_guarantee"
            result[key] = last[key]
        return result

    def _caveats(self) -> list[str]:
        caveats = self.engine.caveats()
        if self.dataset.classes_inferred:
            caveats.append(
                f"the number of classes, {self.dataset.classes}, was read off the labels and is "
                "treated as public (state it by an entry classes in the .npz)"
            )
        if self.config.delta * len(self.dataset.x_train) > 1:
            caveats.append(
                f"delta {self.config.delta:g} is above 1 / records: it allows a whole record to "
                "be published; choose one well below"
            )
        if self.config.train_loss:
            caveats.append("the training loss is outside the guarantee: do not publish it")
        return caveats


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Convolutions on a GPU add in an order of their own each time, unless they are told not to."""
    import torch

    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = before or wanted
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


class _Interrupt:
    """While entered, the first Ctrl-C asks the loop to stop and the second one is an exception.

    An exception at an arbitrary place could tear a release or the ledger apart.
    """

    def __init__(self) -> None:
        self.pending = False
        self._installed = False
        self._before: Any = None

    def __enter__(self) -> _Interrupt:
        # Signals belong to the main thread; a process that ignores them keeps ignoring them.
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True


def _noise_form(config: TrainConfig, noise: float, groups: tuple[str, ...]) -> dict[str, Any]:
    """Noise and clip as the engine takes them: jointly, or the papers' sigma_g C_g by group."""
    if config.group_noise_multiplier is None:
        return {"noise_multiplier": noise, "max_grad_norm": config.clip}
    whole = config.clip if isinstance(config.clip, tuple) else (config.clip,) * len(groups)
    own = (config.group_noise_multiplier,) * len(groups)
    return {"group_noise_multipliers": own, "max_grad_norm": whole}


def _physical_rows(config: TrainConfig) -> int | None:
    """The rows that a model runs on at once; None where a method needs the lot in one piece."""
    looks = resolve(config.method, config.settings).looks
    return _ROWS[config.chosen_model] if looks == 1 else None


def _check_bounds(clip: float | tuple[float, ...], groups: tuple[str, ...]) -> None:
    if isinstance(clip, tuple) and len(clip) != len(groups):
        raise ConfigError(
            f"clip has {len(clip)} numbers for {len(groups)} clipping groups: give one number, or "
            f"one for each of {', '.join(groups)}."
        )


def _device(name: str) -> str:
    """The torch device for a name that `TrainConfig` has accepted."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if found else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= found:
        raise ConfigError(
            f"device {name!r} is not there: torch finds {found} CUDA devices; use auto or cpu."
        )
    return name


def _finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def versions() -> dict[str, str]:
    """The versions of what the numbers of a run depend on."""
    packages = ("torch", "numpy", "dp-accounting")
    return {
        "vestige": vestige.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }
