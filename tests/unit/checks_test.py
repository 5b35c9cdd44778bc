"""Numbers, counts, shares, plain types, rounding and saved states."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vestige.checks import (
    Shown,
    as_json,
    check_count,
    check_share,
    check_state,
    digits_up,
    finite,
    is_number,
    is_whole,
    plain,
    round_down,
    round_up,
)
from vestige.errors import ConfigError

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
PLACES = st.integers(0, 8)


def test_what_is_a_number() -> None:
    assert all(map(is_number, (0, -1, 2.5, 10**300)))
    assert not any(map(is_number, (True, "1", None, math.inf, math.nan, 10**400, [1])))
    assert is_whole(3) and not is_whole(True) and not is_whole(3.0)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "3"])
def test_a_count_is_at_least_one(value: object) -> None:
    with pytest.raises(ConfigError, match=r"steps=.* must be a whole number of at least 1"):
        check_count("steps", value)
    assert check_count("steps", 1) == 1


@pytest.mark.parametrize("value", [0, 1.01, -0.1, math.nan, True, "0.5"])
def test_a_share_is_above_zero_and_at_most_one(value: object) -> None:
    with pytest.raises(ConfigError, match=r"beta=.* must be in \(0, 1\]"):
        check_share("beta", value)
    check_share("beta", 1)


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (1.1, 2, "1.10"),
        (1.1001, 2, "1.11"),
        (0.1 + 0.2, 2, "0.31"),
        (3, 2, "3.00"),
        (0.0, 2, "0.00"),
        (-0.001, 2, "0.00"),
        (1e300, 0, str(Fraction(10**300))),
        (np.float64(2.675), 2, "2.68"),
        (1234, -2, "1300"),
        (math.inf, 2, "inf"),
        (None, 2, "no guarantee"),
    ],
)
def test_an_epsilon_is_rounded_up(value: float | None, places: int, text: str) -> None:
    assert round_up(value, places) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.1, "1.10"), (1.1099, "1.10"), (0.0, "0.00"), (-0.0, "0.00")]
)
def test_a_lower_bound_is_rounded_down(value: float, text: str) -> None:
    assert round_down(value) == text
    assert round_down(None) == "none"
    assert round_down(None, none="") == round_up(None, none="") == ""


@given(NUMBERS, PLACES)
def test_rounding_never_claims_more_and_stays_within_one_unit(value: float, places: int) -> None:
    high, low = round_up(value, places), round_down(value, places)
    unit = Fraction(1, 10**places)
    exact = Fraction(repr(value))
    assert Fraction(low) <= exact <= Fraction(high)
    assert Fraction(high) - exact < unit and exact - Fraction(low) < unit
    if type(value) is float:
        assert float(low) <= value <= float(high)
    assert all(len(text.partition(".")[2]) == places for text in (high, low))


@given(st.floats(1e-300, 1e300), st.integers(1, 12))
def test_significant_digits_are_rounded_up(value: float, digits: int) -> None:
    rounded = digits_up(value, digits)
    assert value <= rounded <= value * (1 + 1.001 * 10 ** (1 - digits))
    assert float(f"{rounded:.{digits}g}") == rounded
    assert digits_up(0.0, digits) == 0 and digits_up(math.inf, digits) == math.inf


def test_plain_values_are_immutable_and_pythons_own() -> None:
    found = plain({"a": [np.float64(1.5), torch.tensor([1, 2])], "b": (np.arange(2), [3])})
    assert found == {"a": (1.5, (1, 2)), "b": ((0, 1), (3,))}
    assert type(found["a"][0]) is float


def test_json_types_are_strict() -> None:
    value = {"a": (1, np.float32(0.5)), 2: [torch.ones(2)], "p": Path("x/y"), "i": math.inf}
    found = as_json(value)
    assert found == {"a": [1, 0.5], "2": [[1.0, 1.0]], "p": str(Path("x/y")), "i": "inf"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert as_json({"o": object()}, lambda other: type(other).__name__) == {"o": "object"}
    assert finite(math.nan) is None and finite(1.5) == 1.5


STATE = {
    "count": 3,
    "on": True,
    "rate": 0.5,
    "rows": [[1.0, 2.0]],
    "name": "x",
    "none": None,
    "inner": {"mean": torch.zeros(2)},
}


def test_a_state_like_ours_is_let_through() -> None:
    check_state("filter", {**STATE, "count": 0, "inner": {"mean": torch.ones(2)}}, STATE)
    check_state("filter", {**STATE, "inner": {"mean": torch.full((2,), math.nan)}}, STATE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": -1}, "'count': it should be a count"),
        ({"count": 3.0}, "'count': it should be a count"),
        ({"on": 1}, "'on': it should be a bool"),
        ({"rate": math.nan}, "'rate': it should be a float"),
        ({"rate": True}, "'rate': it should be a float"),
        ({"rows": [[1.0]]}, "'rows': entry 0: it should be a list of 2"),
        ({"rows": [[1.0, None]]}, "'rows': entry 0: entry 1: it should be a float"),
        ({"name": 1}, "'name': it should be a str"),
        ({"none": 1}, "'none': it should be a NoneType"),
        ({"inner": {}}, "'inner': it should hold 'mean'"),
        ({"inner": {"mean": torch.zeros(3)}}, r"torch.float32 of shape \(2,\)"),
        ({"inner": {"mean": torch.zeros(2, dtype=torch.int32)}}, r"torch.float32 of shape \(2,\)"),
        ({"inner": {"mean": [0.0, 0.0]}}, r"torch.float32 of shape \(2,\)"),
        ({"inner": {"mean": torch.full((2,), math.inf)}}, "and finite"),
        ({"more": 1}, "it should hold 'count', 'on'"),
    ],
)
def test_any_other_state_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"the saved filter does not fit: .*{words}"):
        check_state("filter", {**STATE, **change}, STATE, finite_entries=True)


@pytest.mark.parametrize("state", [None, [], 3, {"count": 3}])
def test_what_is_no_state_at_all_is_refused(state: object) -> None:
    with pytest.raises(ConfigError, match="the saved filter does not fit"):
        check_state("filter", state, STATE)


class Thing(Shown):
    def _shown(self, whole: bool) -> dict[str, object]:
        return {"a <b>": "<script>x</script>\nsecond\x1b[31m"} | ({"slow": 1} if whole else {})


def test_facts_stay_on_their_line_and_are_text() -> None:
    assert repr(Thing()) == "Thing: a <b> <script>x</script> second[31m."
    page = Thing()._repr_html_()
    assert "<caption>Thing</caption>" in page
    assert "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;x&lt;/script&gt; second[31m" in page and "slow" in page
