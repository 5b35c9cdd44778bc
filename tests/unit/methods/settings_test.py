"""What a setting may be stands in its type, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from vestige.errors import ConfigError
from vestige.methods.settings import (
    Beta,
    Count,
    Inside,
    NonNegative,
    Positive,
    Share,
    Switch,
    check_fields,
    must_be,
)

INFINITE = (float("inf"), float("nan"), "1", None, True, 1j)


@dataclass
class Example:
    """One field of each kind."""

    share: Share = 1.0
    inside: Inside = 0.5
    positive: Positive = 3
    least: NonNegative = 0
    count: Count = 1
    switch: Switch = False
    beta: Beta = (0.5, 1.0)
    odd: Annotated[int, must_be("odd", lambda v: v % 2 == 1)] = 7
    free: str = "anything"
    maybe: Positive | None = None


@dataclass
class Narrower(Example):
    """A field that is declared again is held to its last type alone."""

    positive: Share = 0.5


def test_defaults_and_what_is_at_the_edge_are_accepted() -> None:
    check_fields(Example())
    check_fields(Example(maybe=2.0, free="", beta=lambda t: 2.0))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("share", value) for value in (0, 1.0001, -1, *INFINITE)),
        *(("inside", value) for value in (0, 1, *INFINITE)),
        *(("positive", value) for value in (0, -1e-300, *INFINITE)),
        *(("least", value) for value in (-1e-300, *INFINITE)),
        *(("count", value) for value in (0, 1.0, *INFINITE)),
        *(("switch", value) for value in (0, 1, "True", None)),
        *(("beta", value) for value in (0, (), (0.5, 2.0), *INFINITE)),
        ("odd", 2),
        *(("maybe", value) for value in (0, "x")),
    ],
)
def test_anything_else_is_refused_with_its_name_and_value(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}(=| is empty)"):
        check_fields(Example(**{name: bad}))


def test_a_subclass_may_declare_a_field_again() -> None:
    check_fields(Narrower())
    with pytest.raises(ConfigError, match=r"positive=3 must be in \(0, 1\]"):
        check_fields(Narrower(positive=3))
