"""What pydantic finds wrong, in words: the place, the key, the value and the rule."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from vestige.lab.fields import (
    Model,
    Number,
    Numbers,
    Seeds,
    Span,
    Text,
    one_of,
    refusal,
    refuse,
)


class Inner(Model):
    label: Text
    span: Span = Field(default=[0, 1])


class Outer(Model):
    title: Text
    seeds: Seeds = 5
    rates: Numbers = Field(default=[])
    value: Number = 1
    kind: Annotated[str, one_of(["a", "b"])] = "a"
    parts: list[Inner] = Field(default=[], alias="part")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "top level: the key 'title' is missing: add it."),
        ({"title": " "}, "top level: title = ' ' is wrong: it must match"),
        ({"title": 1}, "top level: title = 1 is wrong: it must be a valid string."),
        ({"colour": 1}, "'colour' is unknown: it may have kind, part, rates, seeds, title, value."),
        ({"seeds": True}, "seeds = True is wrong: it must be a valid integer."),
        ({"seeds": 1001}, "seeds = 1001 is wrong: it must be less than or equal to 1000."),
        ({"rates": [0.1, 0.1]}, "it must be a list of different numbers."),
        ({"rates": [0]}, "top level: rates 1 = 0 is wrong: it must be greater than 0"),
        ({"value": "1"}, "value = '1' is wrong: it must be a number."),
        ({"kind": "c"}, "kind = 'c' is wrong: it must be one of a, b."),
        ({"part": [{"label": "x"}, {"lable": "y"}]}, "part 2: the key 'label' is missing"),
        ({"part": [{"label": "x", "y": 1}]}, "part 1: the key 'y' is unknown: it may have label"),
        (
            {"part": [{"label": "x", "span": [2, 1]}]},
            "part 1: span = [2, 1] is wrong: it must be a",
        ),
    ],
)
def test_refusals(values: dict[str, Any], words: str) -> None:
    given = values if not values or "title" in values else {"title": "t", **values}
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    said = refusal(caught.value, Outer)
    assert words in said, said


def test_numbers_stay_what_they_are() -> None:
    whole, broken = (Outer.model_validate({"title": "t", "value": v}) for v in (1, 1.0))
    assert type(whole.value) is int and type(broken.value) is float


def test_a_sentence_is_said_as_it_is() -> None:
    assert str(refuse("a {brace} of this")) == "a {brace} of this"
