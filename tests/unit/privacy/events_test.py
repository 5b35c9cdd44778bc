"""Events: public numbers that are checked, compared, merged and written as JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vestige.errors import ConfigError
from vestige.privacy.events import Event, counts, from_counts, merge


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, 2**53 + 1, 10**400])
def test_a_bad_count_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="count"):
        Event(0.1, 1.0, count)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    assert Event(1, 0).noise_multiplier == 0.0
    assert Event(1.0, math.inf).noise_multiplier == math.inf


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Event(0.1, 1.0).count = 2  # type: ignore[misc]


def test_merge_sorts_and_adds() -> None:
    events = [Event(0.2, 1.0, 3), Event(0.1, 2.0), Event(0.2, 1.0, 4), Event(0.1, 1.0)]
    assert merge(events) == (Event(0.1, 1.0), Event(0.1, 2.0), Event(0.2, 1.0, 7))
    assert merge([]) == ()


EVENTS = st.builds(
    Event,
    st.floats(1e-9, 1),
    st.floats(0, 1e9) | st.just(math.inf),
    st.integers(1, 10**9),
)


@given(EVENTS)
def test_an_event_survives_strict_json_as_a_mapping_and_as_a_row(event: Event) -> None:
    text = json.dumps([event.as_json(), event.as_row()], allow_nan=False)
    mapping, row = json.loads(text)
    assert Event.from_json(mapping) == Event.from_row(row) == event
    assert list(mapping.values()) == row


@given(st.lists(EVENTS, max_size=9))
def test_counts_are_those_of_the_merged_events(events: list[Event]) -> None:
    counted = counts(events)
    assert from_counts(counted) == merge(events) == merge(events[::-1])
    assert counts(merge(events)) == counted
    assert sum(event.count for event in events) == counted.total()


def test_so_often_the_same() -> None:
    assert Event(0.1, 1.5).times(4) == Event(0.1, 1.5, 4)
    assert Event(0.1, 1.5).key == Event(0.1, 1.5, 4).key


@pytest.mark.parametrize("row", [None, [0.1, 1.0], [0.1, 1.0, 1, 1], [0.1, "much", 1], "abc"])
def test_a_bad_row_is_refused(row: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Event.from_row(row)
