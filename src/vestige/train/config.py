"""The settings of a training run, refused when they are made if one of them is bad.

Each is declared once, as a field with its type, range and help: the options of `vestige train`,
config.json, the table in the docs and the error messages come from here. Nothing here imports
torch: a wrong argument is answered at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from vestige import methods
from vestige.errors import ConfigError
from vestige.methods.catalogue import METHODS
from vestige.plan import AVERAGES, lots_per_epoch
from vestige.privacy import accounting
from vestige.privacy.options import (
    Accountant,
    Count,
    Delta,
    File,
    NotNegative,
    OneOf,
    Options,
    Positive,
)
from vestige.train.checks import (
    LEAST_SQUARES,
    check_averaging,
    check_data_dir,
    check_device,
    check_features,
    check_least_squares,
    check_lot,
    check_one_of,
    check_out,
    check_records,
    check_units,
)
from vestige.train.recipes.catalogue import RECIPES, filled_in
from vestige.train.schema import TASKS, Schema, is_own, read_schema

if TYPE_CHECKING:
    from vestige.gradients.clipping import Clipping

# The names of train.data and train.models, which need torch; tests keep them equal.
DATASETS = ("digits", "mnist", "cifar10", "cifar100", "svhn")
_SCATTERING = ("scatter", "scatter-mirror", "scatter-cnn")
MODELS = ("linear", "mlp", "cnn", "resnet18", "wrn", *_SCATTERING, LEAST_SQUARES)
CLIPPINGS = ("flat", "per_layer", "auto", "auto_per_layer", "quantile", "quantile_per_layer")
HISTORY_DTYPES = PRECISIONS = ("float32", "bfloat16")
DEFAULT_NOISE, DEFAULT_EPOCHS = 1.0, 30

# The settings that config.json holds as they were given.
_PUBLIC = {
    *"dataset method delta clip history_dtype history_device averaging seed max_epsilon".split(),
    *"ledger data_dir train_size test_size target task dataset_size tuning".split(),
    *"schema_file evaluate_epsilon recipe momentum".split(),
}
_WHERE_GIVEN = (
    *"group_noise_multiplier views mix_views units rows_per_unit precision features ridge".split(),
)
# A run may be resumed elsewhere, and files of its owner's are not its to name.
_NOT_SAVED = {"noise_seed", "out", "feature_cache"}


class TrainConfig(Options):
    """The settings of a training run. All are public but `noise_seed`, which is never written.

    What is None is chosen: the model and the lot by the dataset, the clipping and the learning rate
    by the method, the noise multiplier as 1.0 unless `epsilon` asks for the one that reaches it, 30
    epochs unless `steps` are given, and a fresh folder under runs/. With `group_noise_multiplier` a
    single `clip` is every group's own, not shared among them. Raises ConfigError for a bad value.
    """

    dataset: str = Field(
        default="digits",
        description=f"{', '.join(DATASETS)}, or the path of your own: a CSV or parquet file, a "
        "folder of images (FOLDER/CLASS/NAME.png), an .npz file with x_train, y_train, x_test, "
        "y_test.",
    )
    target: tuple[str, ...] = Field(
        default=(),
        description="The column of your own table to predict; several with commas. Default: the "
        "schema's.",
    )
    schema_file: File | None = Field(
        default=None,
        description="The public schema of your own data. Default: NAME.schema.toml beside it; "
        "vestige schema drafts one.",
    )
    task: Annotated[str, OneOf(TASKS)] | None = Field(
        default=None,
        description=f"What an .npz file is for: {', '.join(TASKS)}. Default: classification.",
    )
    model: str | None = Field(
        default=None,
        description=f"{', '.join(MODELS)}, or MODULE:factory of your own, called with the shape of "
        "an input and the number of outputs. Default: mlp for digits, tables and .npz files, cnn "
        "for images.",
    )
    features: str | None = Field(
        default=None,
        description="Learn on frozen features: scatter, prior, or MODULE:factory of your own, "
        "called with the shape of an input; each record goes through it once in evaluation mode.",
    )
    weights: File | None = Field(
        default=None,
        description="What vestige prior has made: of the features prior (default: prior.pt in "
        "data_dir), or to begin the model wrn with.",
    )
    feature_cache: File | None = Field(
        default=None, description="Keep the features in this private folder. Default: in memory."
    )
    ridge: Positive | None = Field(
        default=None, description="Added to the mean of x x^T in least squares. Default: by noise."
    )
    recipe: Annotated[str, OneOf(tuple(RECIPES))] | None = Field(
        default=None,
        description="Settings that go together, for what is not given here: "
        + "; ".join(f"{name}, {recipe.about}" for name, recipe in RECIPES.items())
        + ".",
    )
    method: str = Field(
        default="dp-sgd", description=f"The private training method: {', '.join(METHODS)}."
    )
    settings: Mapping[str, Any] = Field(
        default={},
        description="A setting of the method, such as beta=0.9 or interval=2,6; repeatable.",
    )
    epsilon: Positive | None = Field(
        default=None, description="Solve for the noise that reaches this epsilon."
    )
    noise_multiplier: NotNegative | None = Field(
        default=None,
        description="Noise standard deviation over the sensitivity. Default: "
        f"{DEFAULT_NOISE}, unless --epsilon is given.",
    )
    group_noise_multiplier: NotNegative | None = Field(
        default=None, description="The papers' form of the noise: the multiplier inside each group."
    )
    delta: Delta = 1e-5
    accountant: Accountant = "pld"
    lot: Count | None = Field(
        default=None, description="Expected lot size. Default: 64, and 512 for the benchmark sets."
    )
    epochs: Count | None = Field(
        default=None, description=f"Length of the run. Default: {DEFAULT_EPOCHS}."
    )
    steps: Count | None = Field(default=None, description="Length in lots, instead of epochs.")
    clip: Positive | tuple[Positive, ...] = Field(
        default=1.0, description="Clipping norm: a number, or one per group with commas."
    )
    clipping: Annotated[str, OneOf(CLIPPINGS)] | None = Field(
        default=None, description=f"{', '.join(CLIPPINGS)}. Default: the method's own."
    )
    history_dtype: Annotated[str, OneOf(HISTORY_DTYPES)] | None = Field(
        default=None,
        description="What past releases are kept in: float32, or bfloat16 for half the memory.",
    )
    history_device: Annotated[str, OneOf(("cpu",))] | None = Field(
        default=None,
        description="Where past releases are kept: cpu for host memory. Default: the device.",
    )
    averaging: str | None = Field(
        default=None,
        description=f"Average the weights too: {', '.join(AVERAGES)}; ema:0.999 has that decay. "
        "Costs no privacy.",
    )
    lr: Positive | None = Field(
        default=None,
        description="Learning rate. Default: 0.5, and 0.01 or 0.001 for the Adam family.",
    )
    momentum: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Momentum of plain SGD. Default: none."
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of initial weights and splits; harmless to publish.",
    )
    noise_seed: int | None = Field(
        default=None,
        repr=False,
        description="Test mode: repeatable lots and noise, not private towards anyone who knows "
        "the seed. Never written down.",
    )
    precision: Annotated[str, OneOf(PRECISIONS)] | None = Field(
        default=None,
        description="What the model computes in while it learns: float32, or bfloat16 by "
        "autocast. Sums, noise and weights stay float32.",
    )
    device: str = Field(
        default="auto", description="auto (a GPU where there is one), cpu, cuda or cuda:N."
    )
    compile: bool = Field(
        default=False, description="Compile the model's forward and backward pass (torch.compile)."
    )
    data_dir: File | None = Field(
        default=None, description="Folder with NAME.npz. Default: VESTIGE_DATA, or else a download."
    )
    train_size: Count | None = Field(
        default=None, description="Use the first N training records only, of a benchmark set."
    )
    test_size: Count | None = Field(
        default=None, description="Use the first N held-out records only."
    )
    dataset_size: Count | None = Field(
        default=None,
        description="A public number of training records, where the true one is confidential.",
    )
    views: Count | None = Field(
        default=None,
        description="Augmented views of every image (moved, and mirrored where that is the same "
        "thing), clipped together.",
    )
    mix_views: bool = Field(
        default=False,
        description="Make the second half of the views mixtures of two of the first half.",
    )
    units: str | None = Field(
        default=None,
        min_length=1,
        description="The column of your own table with the ids of users: the guarantee is for one "
        "user with all rows, and lots count users. Whole users are held out.",
    )
    rows_per_unit: Count | None = Field(
        default=None, description="The most rows of a user in a lot; needed with units."
    )
    tuning: str | None = Field(
        default=None,
        min_length=1,
        description="Declare for the statement what was tried on the same data before.",
    )
    evaluate_epsilon: Positive | None = Field(
        default=None,
        description="Release the held-out accuracy with noise, at this epsilon for the held-out "
        "records, so that it may be published.",
    )
    train_loss: bool = Field(
        default=False, description="Record the training loss too: outside the guarantee."
    )
    max_epsilon: Positive | None = Field(
        default=None, description="Stop before the step that would exceed this epsilon."
    )
    checkpoint_every: Count | None = Field(
        default=None, description="Lots between two checkpoints. Default: an epoch."
    )
    ledger: File | None = Field(
        default=None,
        description="A ledger file that runs on the same data share: their spending composes. "
        "Default: the run folder's own.",
    )
    out: File | None = Field(
        default=None, description="Run folder, new or empty. Default: a new one in runs/."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_the_recipe(cls, values: dict[str, Any]) -> dict[str, Any]:
        return filled_in(values)

    @field_validator("dataset")
    @classmethod
    def _check_dataset(cls, dataset: str) -> str:
        path = Path(dataset)
        if dataset not in DATASETS and not (
            os.access(path, os.R_OK) and (path.is_file() or path.is_dir())
        ):
            raise ConfigError(
                f"dataset {dataset!r} is neither one of {', '.join(DATASETS)} nor a file or "
                "folder of your own that can be read: check the name or the path."
            )
        return dataset

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str | None) -> str | None:
        if model is not None and model not in MODELS and not re.fullmatch(r"[\w.]+:\w+", model):
            raise ConfigError(
                f"model {model!r} is unknown: choose one of {', '.join(MODELS)}, or name a "
                "MODULE:factory of your own."
            )
        return model

    _averaging = field_validator("averaging")(check_averaging)
    _device = field_validator("device")(check_device)
    _data_dir = field_validator("data_dir")(check_data_dir)

    @model_validator(mode="after")
    def _check_together(self) -> TrainConfig:
        """What no field can say alone."""
        check_one_of(self, "epsilon", "noise_multiplier", "group_noise_multiplier")
        check_one_of(self, "epochs", "steps")
        check_records(self, own=self.dataset not in DATASETS)
        if self.lot is not None and (self.train_size or self.dataset_size):
            check_lot(self.lot, self.dataset_size or self.train_size or 0)
        check_features(self)
        check_least_squares(self)
        self.schema_of_data()
        check_out(self.out if self.out is not None else Path("runs"), fresh=self.out is not None)
        method = methods.resolve(self.method, self.settings)  # loads its class, and torch
        if self.momentum and method.optimizer_class is not None:
            raise ConfigError(
                f"momentum {self.momentum} is of plain SGD, and {self.method} has an update of its "
                "own: leave it out."
            )
        if any(callable(value) for value in method.settings().values()):
            raise ConfigError(
                "a setting is a function, which a run folder cannot hold: give a number, or a "
                "sequence with one number per step."
            )
        return self

    def schema_of_data(self) -> Schema | None:
        """The public schema of a table or an image folder; None for other data."""
        path = Path(self.dataset)
        if self.dataset not in DATASETS and is_own(path):
            if self.task is not None:
                raise ConfigError(
                    f"task {self.task!r} is for .npz files: of {path.name} the schema says it."
                )
            return check_units(self, read_schema(path, self.schema_file, self.target))
        for name in ("target", "schema_file", "units"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is for tables and image folders, and {path.name} is neither: leave it "
                    "out."
                )
        return None

    @property
    def chosen_model(self) -> str:
        """The model: by default mlp, for the benchmark sets and folders of images cnn."""
        images = self._is_benchmark or Path(self.dataset).is_dir()
        return self.model or ("cnn" if images else "mlp")

    @property
    def code(self) -> str | None:
        """The MODULE:factory that the run's model is made by, if it is somebody's own."""
        return next((n for n in (self.features, self.model) if n is not None and ":" in n), None)

    @property
    def chosen_lot(self) -> int:
        """The expected lot: by default 64, for the benchmark sets 512."""
        return self.lot or (512 if self._is_benchmark else 64)

    @property
    def chosen_clipping(self) -> Clipping:
        """The clipping: by default the method's own."""
        return self.clipping or methods.resolve(self.method, self.settings).clipping

    @property
    def chosen_lr(self) -> float:
        """The learning rate: by default the method's own."""
        if self.lr is not None:
            return self.lr
        return methods.resolve(self.method, self.settings).info.default_lr

    @property
    def _is_benchmark(self) -> bool:
        return self.dataset in DATASETS and self.dataset != "digits"

    def planned_steps(self, records: int) -> int:
        """The number of lots of the whole run on that many records."""
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        return self.steps or epochs * lots_per_epoch(records, self.chosen_lot)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds: every setting but the noise seed, as plain JSON types."""
        ledger = None if self.ledger is None else str(self.ledger.absolute())
        return self.model_dump(mode="json", exclude=_NOT_SAVED) | {"ledger": ledger}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], noise_seed: int | None) -> TrainConfig:
        """The settings that `saved` gave."""
        return cls(**saved, noise_seed=noise_seed)

    def public(self) -> dict[str, Any]:
        """What config.json holds: every setting that may be published, as plain JSON types."""
        shown = self.model_dump(mode="json", include=_PUBLIC) | {
            "model": self.chosen_model,
            "target_epsilon": self.epsilon,
            "accountant": accounting.accountant_name(self.accountant),
            "lot": self.chosen_lot,
            "clipping": str(self.chosen_clipping),
            "lr": self.chosen_lr,
            "repeatable_noise": self.noise_seed is not None,
        }
        for name in _WHERE_GIVEN:
            if getattr(self, name) not in (None, False):
                shown[name] = getattr(self, name)
        return shown
