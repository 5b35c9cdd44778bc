"""The plan: frozen public facts, and schedules that are tables before the first lot."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vestige.errors import ConfigError
from vestige.plan import (
    ADJACENCY,
    PrivacyPlan,
    at,
    common_adjacency,
    constant,
    lots_per_epoch,
    sampling_rate,
    tabulate,
)


def plan(**changes: Any) -> PrivacyPlan:
    values: dict[str, Any] = {
        "method": "dp-sgd",
        "dataset_size": 100,
        "size_declared": False,
        "batch_size": 8,
        "sample_rate": 0.08,
        "clipping": "flat",
        "group_names": ("all",),
        "bounds": (3.0, 4.0),
        "noise_multiplier": (1.0, 1.1),
        "noise_stds": ((5.0, 5.0), (5.5, 5.5)),
        "settings": {"window": 4, "interval": (1, 2)},
    }
    return PrivacyPlan(**values | changes)


def test_the_plan_survives_json_and_cannot_be_changed() -> None:
    made = plan()
    assert PrivacyPlan.restored(json.loads(json.dumps(made.as_dict(), allow_nan=False))) == made
    with pytest.raises(FrozenInstanceError):
        made.steps = 3  # type: ignore[misc]


def test_what_follows_from_the_plan() -> None:
    made = plan(beta=(1.0, 0.5))
    assert (made.lots_per_epoch, made.sensitivity, made.scheduled) == (13, 5.0, True)
    assert [made.beta_of(step) for step in range(3)] == [1.0, 0.5, 0.5]
    assert made.rate_of(7) == 0.08
    assert not plan(noise_multiplier=1.0).scheduled


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_lots_of_an_epoch_hold_every_record(records: int, batch: int) -> None:
    lots = lots_per_epoch(records, batch)
    assert (lots - 1) * batch < records <= lots * batch


def test_the_sampling_rate_is_declared_or_follows_from_the_lot() -> None:
    assert sampling_rate(100, 8) == 0.08
    assert sampling_rate(100, 8, 0.5) == 0.5
    assert sampling_rate(100, 8, lambda step: (step + 1) / 10, 3) == (0.1, 0.2, 0.3)
    with pytest.raises(ConfigError, match="larger than the data of 100 records"):
        sampling_rate(100, 101)
    for rate in (0, 1.1, math.nan, "0.1"):
        with pytest.raises(ConfigError, match=r"sample_rate=.* must be in \(0, 1\]"):
            sampling_rate(100, 8, rate)  # type: ignore[arg-type]


def test_a_schedule_becomes_a_number_or_a_table() -> None:
    seen: list[float] = []
    assert tabulate("x", 2, None, seen.append) == 2.0
    assert tabulate("x", [2, 2.0], 2, seen.append) == 2.0
    assert tabulate("x", np.array([1.0, 3.0]), 2, seen.append) == (1.0, 3.0)
    assert tabulate("x", lambda step: np.float64(step), 2, seen.append) == (0.0, 1.0)
    assert all(type(value) in (int, float) for value in seen)
    for schedule, steps in (([], 2), ([1.0], 2)):
        with pytest.raises(ConfigError, match="give one value per step"):
            tabulate("x", schedule, steps, seen.append)
    with pytest.raises(ConfigError, match=r"pass steps=\.\.\."):
        tabulate("x", lambda step: 1.0, None, seen.append)


def test_a_table_holds_its_last_value() -> None:
    assert [at((1.0, 2.0), step) for step in (0, 1, 9)] == [1.0, 2.0, 2.0]
    assert at(3.0, 9) == 3.0
    assert constant([4, 4]) == 4 and constant([4, 5]) == (4, 5)


def test_the_relation_that_all_runs_are_private_for() -> None:
    assert common_adjacency([]) == common_adjacency([ADJACENCY]) == ADJACENCY
    assert common_adjacency([ADJACENCY, "zero out one"]) == "zero out one"
    assert common_adjacency(["b", "a", "b"]) == "a; and b"


def test_the_expected_lot_is_the_batch_size_unless_a_rate_was_declared() -> None:
    """Exactly, for every size: the number of physical batches follows from it."""
    for size in range(1, 200):
        for batch in range(1, size + 1, 7):
            made = plan(dataset_size=size, batch_size=batch, sample_rate=batch / size)
            assert made.expected_lot == batch
    assert plan(sample_rate=0.5).expected_lot == 50
    assert plan(sample_rate=(0.1, 0.3, 0.2)).expected_lot == 30


def test_a_plan_shows_its_public_facts_in_a_paragraph_and_in_a_table() -> None:
    shown = plan(noise_multiplier=(1.0, 2.0), settings={"rule": object(), "name": "<b>"})
    assert "noise multiplier 1 to 2;" in repr(shown) and "\n" not in repr(shown)
    page = shown._repr_html_()
    assert "dp-sgd: rule" in page and ">object<" in page  # an object may hold anything
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "(no guarantee)" in repr(plan(private=False))
