"""Checks of the methods' settings: errors name the value, the rule and the remedy."""

from __future__ import annotations

from typing import Any

from vestige.checks import check_count, check_share, is_number
from vestige.errors import ConfigError
from vestige.plan import Schedule

__all__ = ["check_beta", "check_count", "check_non_negative", "check_positive", "check_share"]


def check_beta(beta: Schedule) -> None:
    """A number in (0, 1] or a schedule of them; a function is checked when it is tabulated."""
    if callable(beta):
        return
    if beta == ():
        raise ConfigError("beta is empty: give a number, or one for each step.")
    for value in beta if isinstance(beta, tuple) else (beta,):
        check_share("beta", value)


def check_positive(name: str, value: Any) -> None:
    """A finite number above 0."""
    if not is_number(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a finite number above 0.")


def check_non_negative(name: str, value: Any) -> None:
    """A finite number of at least 0."""
    if not is_number(value) or value < 0:
        raise ConfigError(f"{name}={value!r} must be a finite number of at least 0.")
