"""The settings of a training run, refused when they are made if one of them is bad.

Nothing here imports torch: a wrong argument is answered at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vestige.checks import as_json, check_count, is_number, plain
from vestige.errors import ConfigError
from vestige.gradients.clipping import Clipping
from vestige.methods import resolve
from vestige.plan import lots_per_epoch
from vestige.privacy import accounting
from vestige.train.run_folder import check_out

# The names of train.data and train.models, which need torch; a test keeps them equal.
DATASETS = ("digits", "mnist", "cifar10", "cifar100", "svhn")
MODELS = ("linear", "mlp", "cnn", "resnet18")
CLIPPINGS = (
    "flat",
    "per_layer",
    "auto",
    "auto_per_layer",
    "quantile",
    "quantile_per_layer",
)
AVERAGES = ("ema", "uniform-tail", "fractional")  # those of vestige.updates.averaging; tested
HISTORY_DTYPES = ("float32", "bfloat16")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run. All are public but `noise_seed`, which is never written.

    What is None is chosen: the model and the lot by the dataset, the clipping and the learning rate
    by the method, the noise multiplier as 1.0 unless `epsilon` asks for the one that reaches it, 30
    epochs unless `steps` are given, and a fresh folder under runs/. `group_noise_multiplier` is the
    papers' form of the noise: that multiplier inside each clipping group, and a single `clip` is
    then every group's own, not shared among them. `max_epsilon` stops the run before it would be
    exceeded, `checkpoint_every` is in lots (by default an epoch), and `ledger` a file that several
    runs on the same data share (by default the run folder's own). Raises ConfigError for a bad
    value.
    """

    dataset: str = "digits"
    model: str | None = None
    method: str = "dp-sgd"
    settings: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    noise_multiplier: float | None = None
    group_noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: str = "pld"
    lot: int | None = None
    epochs: int | None = None
    steps: int | None = None
    clip: float | tuple[float, ...] = 1.0
    clipping: str | None = None
    history_dtype: str | None = None
    averaging: str | None = None
    lr: float | None = None
    seed: int = 0
    noise_seed: int | None = field(default=None, repr=False)
    device: str = "auto"
    data_dir: Path | None = None
    train_size: int | None = None
    test_size: int | None = None
    train_loss: bool = False
    max_epsilon: float | None = None
    checkpoint_every: int | None = None
    ledger: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_privacy()
        self._check_sizes()
        check_out(self.out if self.out is not None else Path("runs"), fresh=self.out is not None)

    def _check_names(self) -> None:
        path = Path(self.dataset)
        if self.dataset not in DATASETS and not (os.access(path, os.R_OK) and path.is_file()):
            raise ConfigError(
                f"dataset {self.dataset!r} is neither one of {', '.join(DATASETS)} nor an .npz "
                "file that can be read: check the name or the path."
            )
        _check_choice("model", self.chosen_model, MODELS)
        if any(
            callable(value) for value in resolve(self.method, self.settings).settings().values()
        ):
            raise ConfigError(
                "a setting is a function, which a run folder cannot hold: give a number, or a "
                "sequence with one number per step."
            )
        if self.clipping is not None:
            _check_choice("clipping", self.clipping, CLIPPINGS)
        if self.averaging is not None:
            _check_choice("averaging", self.averaging, AVERAGES)
        if self.history_dtype is not None:
            _check_choice("history_dtype", self.history_dtype, HISTORY_DTYPES)
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
        if self.group_noise_multiplier is not None:
            if self.epsilon is not None or self.noise_multiplier is not None:
                raise ConfigError(
                    f"group_noise_multiplier {self.group_noise_multiplier} and epsilon or "
                    "noise_multiplier are both given: give one of them."
                )
            _check_number("group_noise_multiplier", self.group_noise_multiplier, zero=True)
        for name in ("epsilon", "max_epsilon"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))
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
        for name in ("lot", "epochs", "steps", "train_size", "test_size", "checkpoint_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.train_size is not None:
            check_lot(self.chosen_lot, self.train_size)
        _check_number("lr", self.chosen_lr)
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
    def chosen_clipping(self) -> Clipping:
        """The clipping: by default the method's own."""
        return self.clipping or resolve(self.method, self.settings).clipping

    @property
    def chosen_lr(self) -> float:
        """The learning rate: by default the method's own."""
        own = resolve(self.method, self.settings).info.default_lr
        return own if self.lr is None else self.lr

    @property
    def _is_benchmark(self) -> bool:
        return self.dataset in DATASETS and self.dataset != "digits"

    def planned_steps(self, records: int) -> int:
        """The number of lots of the whole run on that many records."""
        epochs = 30 if self.epochs is None else self.epochs
        return self.steps or epochs * lots_per_epoch(records, self.chosen_lot)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds: every setting but the noise seed, as plain JSON types."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        del own["noise_seed"], own["out"]
        if self.ledger is not None:
            own["ledger"] = self.ledger.absolute()  # a resume may come from another folder
        return {k: as_json(v) for k, v in own.items()}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], noise_seed: int | None) -> TrainConfig:
        """The settings that `saved` gave."""
        values = dict(saved)
        for name in ("data_dir", "ledger"):
            values[name] = None if values[name] is None else Path(values[name])
        values["clip"], values["settings"] = plain(values["clip"]), plain(values["settings"])
        return cls(**values, noise_seed=noise_seed)

    def public(self) -> dict[str, Any]:
        """What config.json holds: every setting that may be published, as plain JSON types."""
        own = self.group_noise_multiplier
        return ({} if own is None else {"group_noise_multiplier": own}) | {
            "dataset": self.dataset,
            "model": self.chosen_model,
            "method": self.method,
            "target_epsilon": self.epsilon,
            "delta": self.delta,
            "accountant": accounting.accountant_name(self.accountant),
            "lot": self.chosen_lot,
            "clip": list(self.clip) if isinstance(self.clip, tuple) else self.clip,
            "clipping": str(self.chosen_clipping),
            "history_dtype": self.history_dtype,
            "averaging": self.averaging,
            "lr": self.chosen_lr,
            "seed": self.seed,
            "repeatable_noise": self.noise_seed is not None,
            "max_epsilon": self.max_epsilon,
            "ledger": None if self.ledger is None else str(self.ledger),
            "data_dir": None if self.data_dir is None else str(self.data_dir),
            "train_size": self.train_size,
            "test_size": self.test_size,
        }


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}.")


def _check_number(name: str, value: Any, zero: bool = False) -> None:
    number = plain(value)
    if not is_number(number) or number < 0 or (number == 0 and not zero):
        rule = "of at least 0" if zero else "above 0"
        raise ConfigError(f"{name} {value!r} is out of range: give a finite number {rule}.")


def check_lot(lot: int, records: int) -> None:
    """A lot must not be larger than the data."""
    if lot > records:
        raise ConfigError(
            f"lot {lot} is larger than the training data of {records} records: give a lot of at "
            f"most {records}."
        )
