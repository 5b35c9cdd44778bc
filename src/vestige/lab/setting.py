"""The numbers of one training run, and the hash that names it.

Two runs with the same hash would give the same numbers, whatever experiment asks for them: that is
how experiments share rows. Labels, names of experiments, hardware and time are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from vestige.lab.fields import RunModel, Span, refuse
from vestige.methods import resolve
from vestige.train.config import DATASETS, TrainConfig

Config = dict[str, Any]

# Rows leave no run folder: this one is named, because the loop's settings want one, and never made.
_NOWHERE = Path(tempfile.gettempdir()) / "vestige-rows-leave-no-folder"
_LATER = ("averaging", "views", "precision", "features")
_SHARED = (
    *("dataset", "model", "method", "settings", "epsilon", "noise_multiplier", "delta", "lot"),
    *("group_noise_multiplier", "accountant", "epochs", "clip", "clipping", "lr", "seed"),
    *_LATER,
)


def config_hash(config: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the configuration's canonical JSON."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RunSetting(RunModel):
    """One training run of an experiment.

    It trains on the images `train_range` of the training split. It is measured on `test_range` of
    the test split, or, for tuning, on `validation_range` of the training split; exactly one of the
    two is given. Exactly one of `noise_multiplier` (joint), `group_noise_multiplier` (the papers'
    sigma_g in every group, each of which is clipped at the whole `clip`) and `epsilon` is given.

    Benchmarks are public data and run in test mode: the seed of lots and noise is `seed` too, so
    that a row can be made again and methods meet the same lots. ConfigError for a bad value.
    """

    dataset: str
    model: str
    method: str
    lr: float
    lot: int
    epochs: int
    train_range: Span
    test_range: Span | None = None
    validation_range: Span | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    noise_multiplier: float | None = None
    group_noise_multiplier: float | None = None
    epsilon: float | None = None
    clip: float = 1.0
    clipping: str | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    delta: float = 1e-5
    accountant: str = "pld"
    seed: int = 0
    averaging: str | None = None
    views: int | None = None
    precision: str | None = None
    features: str | None = None

    @model_validator(mode="after")
    def _check(self) -> RunSetting:
        if self.dataset not in DATASETS:
            raise refuse(
                f"dataset {self.dataset!r} is unknown: choose one of {', '.join(DATASETS)}."
            )
        if (self.test_range is None) == (self.validation_range is None):
            raise refuse("give exactly one of test_range and validation_range.")
        forms = (self.noise_multiplier, self.group_noise_multiplier, self.epsilon)
        if sum(form is not None for form in forms) != 1:
            raise refuse(
                "give exactly one of noise_multiplier, group_noise_multiplier and epsilon."
            )
        held_out, train = self.validation_range, self.train_range
        if held_out and held_out[0] < train[1] and train[0] < held_out[1]:
            raise refuse(
                f"validation_range {held_out} overlaps train_range {train}: no run may train on "
                "the images it is tuned on."
            )
        return self

    def train_config(self, device: str = "cpu") -> TrainConfig:
        """The settings of the training loop, checked."""
        return TrainConfig(
            **{name: getattr(self, name) for name in _SHARED},
            noise_seed=self.seed,
            device=device,
            out=_NOWHERE,
            train_size=self.train_range[1] - self.train_range[0],
        )

    def config(self) -> Config:
        """Every setting as plain JSON types, with the method's defaults spelled out.

        1 and 1.0 are written alike where the default of a method's setting is a float.
        """
        method = resolve(self.method, self.settings)
        floats = {name for name, v in type(method)().settings().items() if type(v) is float}
        values = self.model_dump(mode="json", exclude={"epsilon"})
        for name in _LATER:  # older rows do not have these
            if values[name] is None:
                del values[name]
        return values | {
            "target_epsilon": self.epsilon,
            "clipping": str(self.clipping or method.clipping),
            "settings": {
                name: float(value) if type(value) is int and name in floats else value
                for name, value in method.settings().items()
            },
            "repeatable_noise": True,
        }
