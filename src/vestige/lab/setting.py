"""Everything that changes the numbers of one training run, and the hash that names it.

Two runs with the same hash would give the same numbers, whatever experiment asks for them: that is
how experiments share rows. Labels, names of experiments, hardware and time are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.methods import Method, resolve
from vestige.train.config import DATASETS, TrainConfig

Config = dict[str, Any]

# Rows leave no run folder: this one is named, because the loop's settings want one, and never made.
_NOWHERE = Path(tempfile.gettempdir()) / "vestige-rows-leave-no-folder"


def config_hash(config: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the configuration's canonical JSON."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunSetting:
    """One training run of an experiment.

    It trains on the images `train_range` of the training split. It is measured on `test_range` of
    the test split, or, for tuning, on `validation_range` of the training split; exactly one of the
    two is given. Exactly one of `noise_multiplier` (joint), `group_noise_multiplier` (the papers'
    sigma_g in every group, each of which is clipped at the whole `clip`) and `epsilon` is given.

    Benchmarks are public data and run in test mode: the seed of lots and noise is `seed` too, so
    that a row can be made again and methods meet the same lots.
    """

    dataset: str
    model: str
    method: str
    lr: float
    lot: int
    epochs: int
    train_range: tuple[int, int]
    test_range: tuple[int, int] | None = None
    validation_range: tuple[int, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    noise_multiplier: float | None = None
    group_noise_multiplier: float | None = None
    epsilon: float | None = None
    clip: float = 1.0
    clipping: str | None = None
    momentum: float = 0.0
    delta: float = 1e-5
    accountant: str = "pld"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train_range", "test_range", "validation_range"):
            span = getattr(self, name)
            object.__setattr__(self, name, None if span is None else (int(span[0]), int(span[1])))
        if self.dataset not in DATASETS:
            raise ConfigError(
                f"dataset {self.dataset!r} is unknown: choose one of {', '.join(DATASETS)}."
            )
        if (self.test_range is None) == (self.validation_range is None):
            raise ConfigError("give exactly one of test_range and validation_range.")
        forms = (self.noise_multiplier, self.group_noise_multiplier, self.epsilon)
        if sum(form is not None for form in forms) != 1:
            raise ConfigError(
                "give exactly one of noise_multiplier, group_noise_multiplier and epsilon."
            )
        held_out = self.validation_range
        if held_out and held_out[0] < self.train_range[1] and self.train_range[0] < held_out[1]:
            raise ConfigError(
                f"validation_range {list(held_out)} overlaps train_range "
                f"{list(self.train_range)}: no run may train on the images it is tuned on."
            )
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum!r} must be at least 0 and below 1.")

    def train_config(self, device: str = "cpu") -> TrainConfig:
        """The settings of the training loop, checked."""
        return TrainConfig(
            dataset=self.dataset,
            model=self.model,
            method=self.method,
            settings=self.settings,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            group_noise_multiplier=self.group_noise_multiplier,
            delta=self.delta,
            accountant=self.accountant,
            lot=self.lot,
            epochs=self.epochs,
            clip=self.clip,
            clipping=self.clipping,
            lr=self.lr,
            seed=self.seed,
            noise_seed=self.seed,
            device=device,
            out=_NOWHERE,
            train_size=self.train_range[1] - self.train_range[0],
        )

    def config(self) -> Config:
        """Every setting as plain JSON types, with the method's defaults spelled out."""
        method = resolve(self.method, self.settings)
        return {
            "dataset": self.dataset,
            "model": self.model,
            "method": self.method,
            "settings": _settings(method),
            "train_range": list(self.train_range),
            "test_range": None if self.test_range is None else list(self.test_range),
            "validation_range": (
                None if self.validation_range is None else list(self.validation_range)
            ),
            "noise_multiplier": _float(self.noise_multiplier),
            "group_noise_multiplier": _float(self.group_noise_multiplier),
            "target_epsilon": _float(self.epsilon),
            "clip": float(self.clip),
            "clipping": str(self.clipping or method.clipping),
            "lot": self.lot,
            "epochs": self.epochs,
            "lr": float(self.lr),
            "momentum": float(self.momentum),
            "delta": float(self.delta),
            "accountant": self.accountant,
            "seed": self.seed,
            "repeatable_noise": True,
        }


def _settings(method: Method) -> Config:
    """The method's settings, with 1 and 1.0 written alike where the default is a float."""
    defaults = type(method)().settings()
    return {
        name: float(value) if type(value) is int and type(defaults[name]) is float else value
        for name, value in method.settings().items()
    }


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
