"""Public schedules: beta, noise and sampling rate as functions of the step alone.

A schedule is a number, a sequence with one number per step, or a function of the step. It becomes a
table before the first lot is drawn, so it cannot depend on data or on releases: that is what lets
the accountant compose the steps one by one (FO-DP-SGD equation 41, SMA-DP-SGD theorem 3). Beyond
its last entry a table holds its last value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vestige.errors import ConfigError

Schedule = float | Sequence[float] | Callable[[int], float]
Table = float | tuple[float, ...]
_T = TypeVar("_T")


def constant(values: Sequence[_T]) -> _T | tuple[_T, ...]:
    """The value that all of them have, or the values."""
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def tabulate(
    name: str, schedule: Schedule, steps: int | None, check: Callable[[Any], None]
) -> Table:
    """The schedule as a number, if it is constant, or as one number per step."""
    schedule = plain(schedule)
    if callable(schedule):
        values = [plain(schedule(step)) for step in range(needs_steps(name, steps))]
    elif isinstance(schedule, tuple):
        values = list(schedule)
        if not values or (steps is not None and len(values) != steps):
            raise ConfigError(
                f"{name} has {len(values)} values for {steps or 'an unknown number of'} steps: "
                "give one value per step, a number, or a function of the step."
            )
    else:
        values = [schedule]
    for value in values:
        check(value)
    return constant([float(value) for value in values])


def needs_steps(name: str, steps: int | None) -> int:
    """The number of steps, which a function of the step cannot be tabulated without."""
    if steps is None:
        raise ConfigError(
            f"{name} is a function of the step, which is tabulated before the run: pass steps=..., "
            "the number of lots of the whole run."
        )
    return steps


def at(table: Table, step: int) -> float:
    """The value at `step`."""
    return table[min(step, len(table) - 1)] if isinstance(table, tuple) else table


def check_share(name: str, value: Any) -> None:
    """A number in (0, 1], such as beta or a sampling rate."""
    if not is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r} must be in (0, 1].")


def is_number(value: Any) -> bool:
    """A finite int or float, and no bool."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's own numbers and tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value
