"""The ledger only grows, keeps order, merges what is equal and survives a round trip."""

from __future__ import annotations

import ast
import inspect
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vestige.privacy.accounting
import vestige.privacy.ledger
from vestige.errors import ConfigError, PrivacyError
from vestige.privacy.ledger import Event, Ledger

charges = st.lists(
    st.tuples(st.sampled_from([0.01, 0.5, 1.0]), st.sampled_from([0.0, 1.0, 1.5, math.inf])),
    max_size=30,
)


def charged(pairs: list[tuple[float, float]]) -> Ledger:
    ledger = Ledger()
    for sample_rate, noise_multiplier in pairs:
        ledger.charge(sample_rate, noise_multiplier)
    return ledger


def test_a_fresh_ledger_is_empty() -> None:
    assert Ledger().events == ()
    assert Ledger().merged() == ()
    assert Ledger().steps == 0


def test_runs_are_kept_in_order_and_merged_across_gaps() -> None:
    ledger = charged([(0.1, 1.0), (0.1, 1.0), (0.1, 2.0), (0.1, 1.0), (0.2, 1.0)])
    assert ledger.events == (
        Event(0.1, 1.0, 2),
        Event(0.1, 2.0, 1),
        Event(0.1, 1.0, 1),
        Event(0.2, 1.0, 1),
    )
    assert ledger.merged() == (Event(0.1, 1.0, 3), Event(0.1, 2.0, 1), Event(0.2, 1.0, 1))
    assert ledger.steps == 5


def test_equal_charges_take_constant_room() -> None:
    ledger = charged([(0.1, 1.0)] * 1000)
    assert ledger.events == (Event(0.1, 1.0, 1000),)
    assert len(ledger.state_dict()["events"]) == 1


def test_events_handed_out_earlier_do_not_change() -> None:
    ledger = charged([(0.1, 1.0)])
    before = ledger.events
    ledger.charge(0.1, 1.0)
    assert before == (Event(0.1, 1.0, 1),)


@given(charges)
@settings(deadline=None, database=None)
def test_nothing_is_lost_whatever_the_order(pairs: list[tuple[float, float]]) -> None:
    ledger = charged(pairs)
    assert ledger.steps == len(pairs)
    assert sum(event.count for event in ledger.merged()) == len(pairs)
    assert ledger.merged() == charged(pairs[::-1]).merged()
    expanded = [
        (event.sample_rate, event.noise_multiplier)
        for event in ledger.events
        for _ in range(event.count)
    ]
    assert expanded == pairs


@given(charges)
@settings(deadline=None, database=None)
def test_state_survives_strict_json(pairs: list[tuple[float, float]]) -> None:
    ledger = charged(pairs)
    text = json.dumps(ledger.state_dict(), allow_nan=False)
    restored = Ledger()
    restored.load_state_dict(json.loads(text))
    assert restored.events == ledger.events
    restored.charge(0.5, 1.0)
    assert restored.steps == ledger.steps + 1


def test_state_is_a_copy() -> None:
    ledger = charged([(0.1, 1.0)])
    ledger.state_dict()["events"].clear()
    assert ledger.steps == 1


def test_loading_never_forgets_what_was_spent() -> None:
    ledger = charged([(0.1, 1.0), (0.1, 2.0)])
    with pytest.raises(PrivacyError, match="2 releases"):
        ledger.load_state_dict(Ledger().state_dict())
    assert ledger.steps == 2


def test_loading_an_empty_state_into_an_empty_ledger_is_fine() -> None:
    ledger = Ledger()
    ledger.load_state_dict(Ledger().state_dict())
    ledger.charge(0.1, 1.0)
    assert ledger.steps == 1


GOOD_ROW = {"sample_rate": 0.1, "noise_multiplier": 1.0, "count": 1}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "version"),
        ([], "mapping"),
        ({"version": 2, "events": []}, "version 2"),
        ({"version": 1, "events": {}}, "not a list"),
        ({"version": 1, "events": [GOOD_ROW], "extra": 0}, "exactly"),
        ({"version": 1, "events": [GOOD_ROW, [0.1, 1.0, 1]]}, "mapping"),
        ({"version": 1, "events": [{"sample_rate": 0.1, "count": 1}]}, "noise_multiplier"),
        ({"version": 1, "events": [GOOD_ROW | {"count": -1}]}, "count -1"),
        ({"version": 1, "events": [GOOD_ROW, GOOD_ROW | {"count": 1.5}]}, "count 1.5"),
        ({"version": 1, "events": [GOOD_ROW | {"sample_rate": 2}]}, "sample_rate 2"),
        ({"version": 1, "events": [GOOD_ROW | {"noise_multiplier": "much"}]}, "'much'"),
    ],
)
def test_a_bad_state_is_refused_and_leaves_the_ledger_empty(state: object, message: str) -> None:
    ledger = Ledger()
    with pytest.raises(ConfigError, match=message):
        ledger.load_state_dict(state)  # type: ignore[arg-type]
    assert ledger.events == ()


@pytest.mark.parametrize("sample_rate", [0.0, -0.1, 1.0000001, math.nan, math.inf, "0.1", None])
def test_a_bad_sample_rate_is_refused_and_not_charged(sample_rate: float) -> None:
    ledger = Ledger()
    with pytest.raises(ConfigError, match="sample_rate"):
        ledger.charge(sample_rate, 1.0)
    assert ledger.steps == 0


@pytest.mark.parametrize("noise_multiplier", [-1e-9, -math.inf, math.nan, "1", None, True])
def test_a_bad_noise_multiplier_is_refused_and_not_charged(noise_multiplier: float) -> None:
    ledger = Ledger()
    with pytest.raises(ConfigError, match="noise_multiplier"):
        ledger.charge(0.1, noise_multiplier)
    assert ledger.steps == 0


@pytest.mark.parametrize("module", [vestige.privacy.ledger, vestige.privacy.accounting])
def test_heavy_libraries_are_not_imported_at_the_top(module: object) -> None:
    """`vestige budget` must not pay for torch, nor `vestige --help` for the accountant."""
    heavy = {"torch", "numpy", "scipy", "dp_accounting"}
    for node in ast.parse(inspect.getsource(module)).body:  # type: ignore[arg-type]
        if isinstance(node, ast.Import):
            assert not heavy & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in heavy
