"""Options: what they take, the sentence for everything that they refuse, and what stays secret."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from pydantic import Field, ValidationError, model_validator

from vestige.errors import ConfigError
from vestige.privacy.options import (
    Accountant,
    Count,
    Delta,
    File,
    NotNegative,
    OneOf,
    Options,
    Positive,
    SampleRate,
    rule,
)


class Everything(Options):
    """One field of each kind."""

    count: Count | None = None
    positive: Positive = 1.0
    noise: NotNegative = 0.0
    several: Positive | tuple[Positive, ...] = 1.0
    delta: Delta = 1e-5
    rate: SampleRate = 0.5
    accountant: Accountant = "pld"
    choice: Annotated[str, OneOf(("a", "b"))] | None = None
    secret: int | None = Field(default=None, repr=False)
    seed: int = Field(default=0, ge=0, lt=8)
    file: File | None = None
    flag: bool = False
    settings: Mapping[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _fits(self) -> Everything:
        if self.count == 13:
            raise ConfigError("count 13 brings bad luck: give another.")
        return self


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count=0 must be a whole number of at least 1."),
        ({"count": 2.5}, "count=2.5 must be a whole number of at least 1."),
        ({"count": True}, "count=True must be a whole number of at least 1."),
        ({"count": 13}, "count 13 brings bad luck: give another."),
        ({"positive": 0.0}, "positive 0.0 is out of range: give a finite number above 0."),
        ({"positive": math.nan}, "positive nan is out of range: give a finite number above 0."),
        ({"positive": math.inf}, "positive inf is out of range: give a finite number above 0."),
        ({"positive": True}, "positive True is out of range: give a finite number above 0."),
        ({"positive": "1"}, "positive '1' is out of range: give a finite number above 0."),
        ({"noise": -1}, "noise -1 is out of range: give a finite number of at least 0."),
        ({"several": (1.0, -1.0)}, "several -1.0 is out of range: give a finite number above 0."),
        ({"delta": 1.0}, "delta 1.0 is out of range: give a number strictly between 0 and 1."),
        ({"rate": 2.0}, "rate 2.0 is out of range: give a number above 0 and at most 1."),
        ({"accountant": "gdp"}, "accountant 'gdp' is unknown: choose one of pld, rdp"),
        ({"choice": "c"}, "choice 'c' is unknown: choose one of a, b."),
        ({"choice": 3}, "choice 3 is unknown: choose one of a, b."),
        ({"seed": 8}, "seed=8 must be a whole number from 0 to 2^3 - 1."),
        ({"file": 3}, "file 3 is out of range: give a path."),
        ({"flag": 1}, "flag 1 is out of range: give True or False."),
        ({"sede": 1}, "sede is unknown: did you mean seed?"),
        ({"unheard": 1}, "unheard is unknown: choose from count, positive"),
    ],
)
def test_a_bad_value_is_named_with_its_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Everything(**values)
    assert str(caught.value).startswith(message)


def test_a_missing_field_is_named() -> None:
    class Needy(Options):
        epsilon: Positive

    with pytest.raises(ConfigError, match=r"^epsilon is missing: give a finite number above 0\.$"):
        Needy()  # type: ignore[call-arg]


def test_a_secret_is_in_no_representation_and_in_no_refusal() -> None:
    assert "987654" not in repr(Everything(secret=987654))
    with pytest.raises(ConfigError) as caught:
        Everything(secret=987654.5)  # type: ignore[arg-type]
    assert str(caught.value) == "secret must be a whole number."


def test_numbers_of_numpy_and_torch_and_lists_become_pythons_own() -> None:
    made = Everything(
        count=np.int64(3),  # type: ignore[arg-type]
        positive=np.float32(0.5),  # type: ignore[arg-type]
        several=[1.0, torch.tensor(2.0)],  # type: ignore[arg-type]
        file="a/b",  # type: ignore[arg-type]
        settings={"interval": [2, 6]},
    )
    assert (made.count, made.positive, made.several) == (3, 0.5, (1.0, 2.0))
    assert type(made.count) is int
    assert made.file == Path("a/b")
    assert made.settings == {"interval": (2, 6)}


def test_options_are_frozen_and_a_change_is_checked_again() -> None:
    made = Everything()
    with pytest.raises(ValidationError, match="frozen"):
        made.seed = 3  # type: ignore[misc]
    assert made.changed(seed=3).seed == 3
    with pytest.raises(ConfigError, match="seed=9"):
        made.changed(seed=9)


def test_a_rule_is_said_in_words() -> None:
    fields = Everything.model_fields
    assert rule(fields["count"]) == "a whole number of at least 1"
    assert rule(fields["choice"]) == "one of a, b"
    assert rule(fields["delta"]) == "a number strictly between 0 and 1"
