"""The training loop behind the command line, usable as a function.

`TrainConfig` holds the public settings of a run and refuses bad ones when it is made, before
anything slow is imported; `train` runs them and leaves a folder with config.json, metrics.jsonl,
model.pt and result.json. Torch is imported inside the functions, so that a wrong argument, `vestige
budget` and `--help` are answered at once.

Guarantee: what the folder holds is a function of the releases, of public settings and of the
held-out split. Realised lot sizes, per-example numbers and the noise seed are never written, and
the training loss only on request, under a name that says that it is outside the guarantee.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import vestige
from vestige import accounting
from vestige.errors import ConfigError
from vestige.ledger import Event
from vestige.methods import resolve
from vestige.plan import ADJACENCY, check_count, lots_per_epoch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vestige.data import Dataset
    from vestige.engine import PrivacyEngine

# The names of vestige.data and vestige.models, which need torch; a test keeps them equal.
DATASETS = ("digits", "mnist", "cifar10", "cifar100", "svhn")
MODELS = ("linear", "mlp", "cnn", "resnet18")
CLIPPINGS = ("flat", "per_layer")
DEFAULT_NOISE = 1.0
HELD_OUT = "the held-out split, whose records the guarantee does not cover"

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# How many rows go through a model at once: memory must not grow with the lot.
_ROWS = {"linear": 4096, "mlp": 4096, "cnn": 1024, "resnet18": 128}


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run. All are public but `noise_seed`, which is never written.

    What is None is chosen: the model and the lot by the dataset, the clipping by the method, the
    noise multiplier as 1.0 unless `epsilon` asks for the one that reaches it, 30 epochs unless
    `steps` are given, and a fresh folder under runs/. Raises ConfigError for a bad value.
    """

    dataset: str = "digits"
    model: str | None = None
    method: str = "dp-sgd"
    settings: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: str = "pld"
    lot: int | None = None
    epochs: int | None = None
    steps: int | None = None
    clip: float | tuple[float, ...] = 1.0
    clipping: str | None = None
    lr: float = 0.5
    seed: int = 0
    noise_seed: int | None = field(default=None, repr=False)
    device: str = "auto"
    data_dir: Path | None = None
    train_size: int | None = None
    test_size: int | None = None
    train_loss: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_privacy()
        self._check_sizes()
        _check_out(self.out if self.out is not None else Path("runs"), fresh=self.out is not None)

    def _check_names(self) -> None:
        path = Path(self.dataset)
        if self.dataset not in DATASETS and not (os.access(path, os.R_OK) and path.is_file()):
            raise ConfigError(
                f"dataset {self.dataset!r} is neither one of {', '.join(DATASETS)} nor an .npz "
                "file that can be read: check the name or the path."
            )
        _check_choice("model", self.chosen_model, MODELS)
        resolve(self.method, self.settings)
        _check_choice("clipping", self.chosen_clipping, CLIPPINGS)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device {self.device!r} is unknown: choose auto, cpu, cuda or cuda:N."
            )
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise ConfigError(
                f"data_dir {str(self.data_dir)!r} is no folder that can be read: give the folder "
                "that holds NAME.npz."
            )

    def _check_privacy(self) -> None:
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ConfigError(
                f"epsilon {self.epsilon} and noise_multiplier {self.noise_multiplier} are both "
                "given: one follows from the other, so give one of them."
            )
        if self.epsilon is not None:
            _check_number("epsilon", self.epsilon)
        if self.noise_multiplier is not None:
            _check_number("noise_multiplier", self.noise_multiplier, zero=True)
        accounting.epsilon((), self.delta, self.accountant)  # refuses a bad delta or accountant
        bounds = self.clip if isinstance(self.clip, tuple) else (self.clip,)
        for bound in bounds:
            _check_number("clip", bound)

    def _check_sizes(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"epochs {self.epochs} and steps {self.steps} are both given: give one of them."
            )
        for name in ("lot", "epochs", "steps", "train_size", "test_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.train_size is not None:
            _check_lot(self.chosen_lot, self.train_size)
        _check_number("lr", self.lr)
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r} must be a whole number from 0 to 2^63 - 1.")
        if self.noise_seed is not None and type(self.noise_seed) is not int:
            raise ConfigError("noise_seed must be a whole number.")

    @property
    def chosen_model(self) -> str:
        """The model: by default mlp, for the benchmark sets of images cnn."""
        return self.model or ("cnn" if self._is_benchmark else "mlp")

    @property
    def chosen_lot(self) -> int:
        """The expected lot: by default 64, for the benchmark sets 512."""
        return self.lot or (512 if self._is_benchmark else 64)

    @property
    def chosen_clipping(self) -> str:
        """The clipping: by default the method's own."""
        return self.clipping or resolve(self.method, self.settings).clipping

    @property
    def _is_benchmark(self) -> bool:
        return self.dataset in DATASETS and self.dataset != "digits"

    def planned_steps(self, records: int) -> int:
        """The number of lots of the whole run on that many records."""
        epochs = 30 if self.epochs is None else self.epochs
        return self.steps or epochs * lots_per_epoch(records, self.chosen_lot)

    def public(self) -> dict[str, Any]:
        """What config.json holds: every setting that may be published, as plain JSON types."""
        return {
            "dataset": self.dataset,
            "model": self.chosen_model,
            "method": self.method,
            "settings": dict(self.settings),
            "target_epsilon": self.epsilon,
            "delta": self.delta,
            "accountant": accounting.accountant_name(self.accountant),
            "lot": self.chosen_lot,
            "clip": list(self.clip) if isinstance(self.clip, tuple) else self.clip,
            "clipping": self.chosen_clipping,
            "lr": self.lr,
            "seed": self.seed,
            "repeatable_noise": self.noise_seed is not None,
            "data_dir": None if self.data_dir is None else str(self.data_dir),
            "train_size": self.train_size,
            "test_size": self.test_size,
        }


@dataclass(frozen=True)
class Progress:
    """Where a run stands: told to `train`'s callback at every stage, lot and epoch.

    `metrics` is the line of metrics.jsonl that was just written, at the end of an epoch only.
    """

    stage: str
    step: int = 0
    steps: int = 0
    epochs: int = 0
    metrics: Mapping[str, Any] | None = None


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
    tell(Progress(f"loading {Path(config.dataset).name}"))
    import torch

    from vestige import data, models
    from vestige.clipping import Clip
    from vestige.groups import partition

    device = _device(config.device)
    dataset = data.load(
        config.dataset, config.data_dir, config.train_size, config.test_size, config.seed
    )
    records = len(dataset.x_train)
    _check_lot(config.chosen_lot, records)
    steps = config.planned_steps(records)
    model = models.build(config.chosen_model, dataset.input_shape, dataset.classes, config.seed).to(
        device
    )
    # A wrong number of bounds is found here, before seconds go into the calibration.
    Clip.over(config.clip, partition(model, config.chosen_clipping).names)

    tell(Progress("accounting"))
    method = resolve(config.method, config.settings)
    rate = config.chosen_lot / records
    noise = DEFAULT_NOISE if config.noise_multiplier is None else config.noise_multiplier
    if config.epsilon is not None:
        noise = accounting.calibrate(
            config.epsilon, config.delta, rate, steps, config.accountant, method.query_weight
        ).noise_multiplier
    planned = accounting.epsilon(
        [Event(rate, noise / method.query_weight, steps)], config.delta, config.accountant
    )
    session = _Session(
        config, dataset, model, optimizer or torch.optim.SGD, device, steps, noise, planned
    )
    return session.run(tell)


class _Session:
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
    ) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        from vestige.engine import PrivacyEngine

        self.config, self.dataset, self.model = config, dataset, model
        self.device, self.steps, self.planned = device, steps, planned
        self.train_data = dataset.x_train.to(device), dataset.y_train.to(device)
        self.test_data = dataset.x_test.to(device), dataset.y_test.to(device)
        self.optimizer = make_optimizer(model.parameters(), lr=config.lr)
        self.engine: PrivacyEngine = PrivacyEngine(
            config.accountant, seed=config.seed, noise_seed=config.noise_seed
        )
        _, _, self.loader = self.engine.make_private(
            module=model,
            optimizer=self.optimizer,
            data_loader=DataLoader(TensorDataset(*self.train_data), batch_size=config.chosen_lot),
            noise_multiplier=noise,
            max_grad_norm=config.clip,
            clipping=config.chosen_clipping,
            method=resolve(config.method, config.settings),
            max_physical_batch_size=_ROWS[config.chosen_model],
            steps=steps,
        )
        self.lines: list[dict[str, Any]] = []
        self.seconds = 0.0

    def run(self, tell: Callable[[Progress], None]) -> dict[str, Any]:
        """Train, write every file, and return the result."""
        with _Interrupt() as interrupt, _RunFolder(self.config) as folder:
            config = self.config.public() | {
                "noise_multiplier": self.engine.plan.noise_multiplier,
                "planned_steps": self.steps,
                "planned_epsilon": _finite(self.planned),
                "optimizer": type(self.optimizer).__name__,
                "device": self.device,
                "versions": _versions(),
            }
            folder.write_json("config.json", config)
            self._train(tell, interrupt, folder)
            folder.write("model.pt", self._weights())
            result = self._result(str(folder.path), interrupted=self.engine.released < self.steps)
            folder.write_json("result.json", result)
            return result

    def _train(
        self, tell: Callable[[Progress], None], interrupt: _Interrupt, folder: _RunFolder
    ) -> None:
        from torch.nn.functional import cross_entropy

        engine, started = self.engine, time.perf_counter()
        epochs = -(-self.steps // engine.plan.lots_per_epoch)
        tell(Progress("training", 0, self.steps, epochs))
        while engine.released < self.steps and not interrupt.pending:
            for x, y in self.loader:
                before = engine.released
                self.optimizer.zero_grad()
                engine.backward(cross_entropy(self.model(x), y, reduction="none"))
                self.optimizer.step()
                if engine.released == before:
                    continue  # the rest of this lot is still to come
                folder.keep = True
                tell(Progress("training", engine.released, self.steps, epochs))
                if engine.released == self.steps or interrupt.pending:
                    break
            self.seconds = time.perf_counter() - started
            self.lines.append(self._measure())
            folder.write_lines("metrics.jsonl", self.lines)
            tell(Progress("training", engine.released, self.steps, epochs, self.lines[-1]))

    def _measure(self) -> dict[str, Any]:
        """A line of metrics.jsonl, from the weights and the held-out split."""
        loss, accuracy = self._evaluate(*self.test_data)
        line = {
            "step": self.engine.released,
            "epoch": -(-self.engine.released // self.engine.plan.lots_per_epoch),
            "epsilon": _finite(self._live_epsilon()),
            "test_loss": _finite(loss),
            "test_accuracy": accuracy,
            "seconds": round(self.seconds, 3),
        }
        if self.config.train_loss:
            line["train_loss_outside_guarantee"] = _finite(self._evaluate(*self.train_data)[0])
        return line

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
            "settings": dict(self.config.settings),
            "dataset": self.config.dataset,
            "model": self.config.chosen_model,
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "measured_on": HELD_OUT,
            "epsilon": _finite(epsilon),
            "delta": self.config.delta,
            "target_epsilon": self.config.epsilon,
            "accountant": self.engine.accountant,
            "guarantee": accounting.GUARANTEE if math.isfinite(epsilon) else "none",
            "adjacency": ADJACENCY,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sample_rate,
            "lot": plan.batch_size,
            "records": plan.dataset_size,
            "steps": self.engine.released,
            "epochs": self.engine.released / plan.lots_per_epoch,
            "clip": self.config.public()["clip"],
            "clipping": plan.clipping,
            "optimizer": type(self.optimizer).__name__,
            "lr": self.config.lr,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": last["seconds"],
            "seed": self.config.seed,
            "repeatable_noise": self.config.noise_seed is not None,
            "interrupted": interrupted,
            "caveats": self._caveats(),
            "device": self.device,
            "folder": folder,
            "versions": _versions(),
        }
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


class _RunFolder:
    """The folder of a run. Files appear whole or not at all.

    If the run fails before `keep` was set (at the first release), the folder disappears again.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.keep = False
        self._written: list[Path] = []
        name = re.sub(r"[^\w.-]", "_", Path(config.dataset).stem)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        self._default = Path("runs") / f"{name}-{config.chosen_model}-{config.method}-{stamp}"
        self._out = config.out

    def __enter__(self) -> _RunFolder:
        self.path = self._out if self._out is not None else self._default
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            if self._out is not None:
                _check_out(self._out, fresh=True)  # it may have filled up in the meantime
                self._out.mkdir(parents=True, exist_ok=True)
            else:
                self._make_default()
        except OSError as error:
            raise ConfigError(
                f"the run folder {str(self.path)!r} cannot be made ({error.strerror}): give "
                "another one as out."
            ) from error
        return self

    def _make_default(self) -> None:
        """Runs that start in the same second get the suffixes -2, -3, ..."""
        number = 1
        while True:
            try:
                self.path.mkdir(parents=True)
                return
            except FileExistsError:
                number += 1
                self.path = self._default.with_name(f"{self._default.name}-{number}")
                self._made = [self.path]

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if kind is None or self.keep:
            return
        for file in self._written:
            file.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def write(self, name: str, content: bytes) -> None:
        """A whole file, or, if it fails, none."""
        path = self.path / name
        partial = path.with_name(f".{name}.partial")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._written.append(path)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """A JSON file for people and machines."""
        self.write(name, f"{json.dumps(value, indent=2, allow_nan=False)}\n".encode())

    def write_lines(self, name: str, values: list[dict[str, Any]]) -> None:
        """One JSON object on each line, rewritten as a whole: no line is ever half there."""
        self.write(name, "".join(f"{json.dumps(v, allow_nan=False)}\n" for v in values).encode())


def _check_out(folder: Path, fresh: bool) -> None:
    """Refuse a run folder that is in use or cannot be made; nothing is created."""
    try:
        if fresh and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"out {str(folder)!r} is in use: it is a folder with files in it; give a new or "
                "empty one."
            )
        nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    except OSError as error:
        raise ConfigError(
            f"out {str(folder)!r} cannot be used ({error.strerror}): give another folder."
        ) from error
    if not nearest.is_dir():
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {str(nearest)!r} is not a folder; give another."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {str(nearest)!r} is not writable; give another."
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}.")


def _check_number(name: str, value: Any, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        rule = "of at least 0" if zero else "above 0"
        raise ConfigError(f"{name} {value!r} is out of range: give a finite number {rule}.")


def _check_lot(lot: int, records: int) -> None:
    if lot > records:
        raise ConfigError(
            f"lot {lot} is larger than the training data of {records} records: give a lot of at "
            f"most {records}."
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


def _versions() -> dict[str, str]:
    packages = ("torch", "numpy", "dp-accounting")
    return {
        "vestige": vestige.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }
