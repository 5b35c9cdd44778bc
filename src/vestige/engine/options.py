"""The arguments of make_private that few runs need, each declared once, with its default.

They are plain keywords of make_private; `Keywords` tells a type checker which there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
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
    self_check: bool
    max_epsilon: float | None
    delta: float | None
    data_name: str | None
    seed: int | None
    noise_seed: int | None
    secure_mode: bool
    secure_noise: bool
    poisson_sampling: bool
    noise_generator: Any


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
    self_check: bool = True

    def __post_init__(self) -> None:
        if self.history_dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"history_dtype={self.history_dtype} is not one that releases can be kept in: use "
                "torch.bfloat16 for half the memory, or leave it out."
            )


@dataclass(frozen=True)
class Options(Budget, Chance, Numerics):
    """All of them, and what is added to a method."""

    group_noise_multipliers: GroupNoise | None = None
    sample_rate: Schedule | None = None
    denoiser: str | Method | None = None
    averaging: str | None = None
    poisson_sampling: bool = True
    noise_generator: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.poisson_sampling:
            raise ConfigError(
                "poisson_sampling=False is refused: the accountants assume Poisson lots, and fixed "
                "or shuffled batches with the same epsilon would be a false claim."
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
                raise ConfigError(f"make_private has no argument {name!r}.{hint}")
        return cls(**keywords)


def check_counts(**counts: int | None) -> None:
    """Refuse what is neither None nor a positive whole number."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
