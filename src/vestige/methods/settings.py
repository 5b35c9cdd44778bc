"""What the settings of methods may be: each field's type says it, and is checked by it.

    alpha: Share = 0.8        a number in (0, 1]; `alpha=2` is refused with that sentence

A setting whose default is None may be None.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from vestige.checks import check_count, check_share, is_number
from vestige.errors import ConfigError
from vestige.plan import Schedule

Check = Callable[[str, Any], object]


def must_be(words: str, holds: Callable[[Any], bool]) -> Check:
    """Refuses a value that does not hold; `words` end the sentence "name=value must be ..."."""

    def check(name: str, value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"{name}={value!r} must be {words}.")

    return check


def check_beta(name: str, beta: Schedule) -> None:
    """A number in (0, 1] or a schedule of them; a function is checked when it is tabulated."""
    if callable(beta):
        return
    if beta == ():
        raise ConfigError(f"{name} is empty: give a number, or one for each step.")
    for value in beta if isinstance(beta, tuple) else (beta,):
        check_share(name, value)


_POSITIVE = must_be("a finite number above 0", lambda v: is_number(v) and v > 0)
_AT_LEAST_0 = must_be("a finite number of at least 0", lambda v: is_number(v) and v >= 0)

Beta = Annotated[Schedule, check_beta]
Share = Annotated[float, check_share]
Inside = Annotated[float, must_be("strictly between 0 and 1", lambda v: is_number(v) and 0 < v < 1)]
Decay = Annotated[float, must_be("at least 0 and below 1", lambda v: is_number(v) and 0 <= v < 1)]
Positive = Annotated[float, _POSITIVE]
NonNegative = Annotated[float, _AT_LEAST_0]
Count = Annotated[int, check_count]
Switch = Annotated[bool, must_be("True or False", lambda v: type(v) is bool)]


def check_fields(made: Any) -> None:
    """Hold every field of a method to what its type declares."""
    for name, checks, optional in _declared(made.__class__):
        value = getattr(made, name)
        for check in () if optional and value is None else checks:
            check(name, value)


@cache
def _declared(kind: Any) -> list[tuple[str, list[Check], bool]]:
    hints = ChainMap(*(get_annotations(base, eval_str=True) for base in kind.__mro__))
    return [(f.name, _checks(hints[f.name]), f.default is None) for f in fields(kind)]


def _checks(hint: Any) -> list[Check]:
    """Those of the type, or of the members of a union."""
    members = (hint, *(get_args(hint) if get_origin(hint) in (Union, UnionType) else ()))
    return [check for member in members for check in getattr(member, "__metadata__", ())]
