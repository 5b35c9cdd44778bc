"""The arguments of make_private that few runs need, each declared once, with its default.

They are plain keywords of make_private; `Keywords` tells a type checker which there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import torch

from vestige.checks import check_count
from vestige.errors import ConfigError
from vestige.methods import Method
from vestige.plan import Schedule
from vestige.privacy.noise_scales import GroupNoise


class Keywords(TypedDict, total=False):
    """The keywords of `Options`, for type checkers."""

    group_noise_multipliers: GroupNoise | None
    sample_rate: Schedule | None
    denoiser: str | Method | None
    averaging: str | None
    batch_first: bool
    history_dtype: torch.dtype | None
    history_device: str | torch.device | None
    master_weights: bool
    self_check: bool
    compile: bool
    max_epsilon: float | None
    delta: float | None
    data_name: str | None
    seed: int | None
    noise_seed: int | None
    secure_mode: bool
    secure_noise: bool
    poisson_sampling: bool
    noise_generator: Any
    process_group: Any
    sharded: bool
    units: Any
    rows_per_unit: int | None
    views: int | None
    augment: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Budget:
    """What may be spent: no lot is drawn from that would exceed `max_epsilon` at `delta`."""

    max_epsilon: float | None = None
    delta: float | None = None
    data_name: str | None = None  # of the data on the ledger: runs on other data do not share it


@dataclass(frozen=True)
class Chance:
    """Where random numbers come from; `noise_seed` is test mode, and not private."""

    seed: int | None = None
    noise_seed: int | None = None
    secure_mode: bool = False
    secure_noise: bool = False


@dataclass(frozen=True)
class Numerics:
    """How things are kept and checked."""

    batch_first: bool = True
    history_dtype: torch.dtype | None = None
    history_device: str | torch.device | None = None  # "cpu": past releases in host memory
    master_weights: bool = False  # the optimizer moves float32 copies of half-precision weights
    self_check: bool = True
    compile: bool = False  # forward and backward pass run as compiled graphs, where they can

    def __post_init__(self) -> None:
        if self.history_dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"history_dtype={self.history_dtype} is not one that releases can be kept in: use "
                "torch.bfloat16 for half the memory, or leave it out."
            )
        if not isinstance(self.compile, bool):
            raise ConfigError(
                f"compile={self.compile!r} is neither True nor False: graphs are made in one way."
            )
        if self.history_device is not None and str(self.history_device) != "cpu":
            raise ConfigError(
                f"history_device={str(self.history_device)!r} is not where releases can be kept: "
                "use 'cpu' for host memory, or leave it out for the device of the model."
            )

    @property
    def device_of_history(self) -> torch.device | None:
        """Where past releases are kept; None for the device of the sums."""
        return None if self.history_device is None else torch.device(self.history_device)


@dataclass(frozen=True)
class Unit:
    """Whom the guarantee protects, and how many rows that is: a record with its views, or a user.

    `units` has an id for every record of the data set. Lots then draw users, of whose records at
    most `rows_per_unit` are taken; `batch_size` and `dataset_size` count users.
    """

    units: Any = field(default=None, repr=False)
    rows_per_unit: int | None = None
    views: int | None = None
    augment: Callable[[Any], Any] | None = None

    def check_unit(self) -> None:
        """Refuse one without the other."""
        check_counts(rows_per_unit=self.rows_per_unit, views=self.views)
        if self.units is None and self.rows_per_unit is not None:
            raise ConfigError(
                f"rows_per_unit={self.rows_per_unit} without units: give units=ids, with the id of "
                "a user for every record, or leave it out."
            )
        if self.augment is None and self.views is not None:
            raise ConfigError(
                f"views={self.views} without augment: give augment=f, which makes a view of one "
                "record's input, such as vestige.FlipAndCrop(4)."
            )
        if self.augment is not None and not callable(self.augment):
            raise ConfigError(
                f"augment is a {type(self.augment).__name__}: give a function of one record's "
                "input that returns one view, or all of them stacked."
            )


@dataclass(frozen=True)
class Options(Budget, Chance, Numerics, Unit):
    """All of them, and what is added to a method."""

    group_noise_multipliers: GroupNoise | None = None
    sample_rate: Schedule | None = None
    denoiser: str | Method | None = None
    averaging: str | None = None
    poisson_sampling: bool = True
    noise_generator: Any = None
    process_group: Any = None  # of torch.distributed: None for the one that is there
    sharded: bool = False  # every rank has records of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_unit()
        if not self.poisson_sampling:
            raise ConfigError(
                "poisson_sampling=False is refused: the accountants assume Poisson lots, and fixed "
                "or shuffled batches with the same epsilon would be a false claim. Leave it out."
            )
        if self.noise_generator is not None:
            raise ConfigError(
                "noise_generator is refused: noise is keyed by the engine, step by step. Use "
                "noise_seed=... for a repeatable test run or secure_mode=True."
            )

    @classmethod
    def of(cls, keywords: Mapping[str, Any], others: tuple[str, ...]) -> Options:
        """The options, or an error that names the nearest for one that does not exist."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *others], 1)
                hint = f" Did you mean {near[0]}=...?" if near else ""
                if name in ("epochs", "target_epsilon", "target_delta"):
                    hint = (
                        " The noise of a target is solved for by make_private_with_epsilon("
                        "target_epsilon=..., target_delta=..., epochs=...); a planned length is "
                        "steps=..., in releases."
                    )
                raise ConfigError(f"make_private has no argument {name!r}.{hint}")
        return cls(**keywords)


def check_counts(**counts: int | None) -> None:
    """Refuse what is neither None nor a positive whole number."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
