"""`vestige plan`: its matrices against dense ones, its epsilons, its choice, its three outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vestige import methods
from vestige.cli import plan
from vestige.errors import ConfigError
from vestige.methods import planning
from vestige.methods.planning import Comparison, Request, Row
from vestige.privacy import accounting
from vestige.privacy.ledger import Event


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.glob(".*.partial"))


@cache
def small(**changes: Any) -> Comparison:
    given: dict[str, Any] = {"dataset_size": 1000, "lot": 50, "epochs": 3, "epsilon": 4.0}
    return planning.compare(Request(**given | {"accountant": "rdp"} | changes))


# -- the comparison -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "published", "measured"), [(13.0, 0.85, 0.8366), (5.0, 0.97, 0.9693)]
)
def test_the_reference_training_with_pld(
    epsilon: float, published: float, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "ORDERS", (0.8,))
    monkeypatch.setattr(planning, "BANDS", (8,))
    comparison = planning.compare(Request(dataset_size=5000, lot=200, epochs=100, epsilon=epsilon))
    (row,) = comparison.fractional
    assert comparison.request.steps == 2500
    assert (row.sample_rate, row.events, row.memory) == (0.32, 313, 7)
    assert row.ratio == pytest.approx(published, abs=0.02)
    assert row.ratio == pytest.approx(measured, abs=5e-4)
    assert all(0.99 < each.ratio < 1 for each in comparison.filters)


def test_few_epochs_gain_far_more() -> None:
    few = small(dataset_size=5000, lot=200, epochs=1, epsilon=5.0).best
    many = small(dataset_size=5000, lot=200, epochs=100, epsilon=5.0).best
    assert few is not None and many is not None
    assert 1 - few.ratio > 5 * (1 - many.ratio) > 0.1


def test_every_row_is_calibrated_to_the_same_epsilon() -> None:
    comparison = small(epsilon=3.0, delta=1e-6)
    assert len(comparison.rows) == 4 + 5 * 4 + 5 + 1
    for row in comparison.rows:
        unsampled = row.method in ("banded-inverse", "dp-ftrl")
        assert row.sample_rate == (1.0 if unsampled else row.bands * 0.05)
        assert row.events == (1 if unsampled else -(-60 // row.bands))
        assert row.amplified is not unsampled
        assert row.adjacency.startswith("zero out" if row.method == "dp-ftrl" else "add or remove")
        event = Event(row.sample_rate, row.noise_multiplier, row.events)
        assert accounting.epsilon([event], 1e-6, "rdp") == row.epsilon
        assert 2.99 < row.epsilon <= 3.0


def test_dp_sgd_comes_first_and_ratios_are_to_it() -> None:
    comparison = small()
    first = comparison.rows[0]
    assert (first.method, first.ratio, first.memory, first.bands) == ("dp-sgd", 1.0, 0, 1)
    sigma = accounting.calibrate(4.0, 1e-5, 0.05, 60, "rdp").noise_multiplier
    assert first.prefix_error == pytest.approx(sigma * math.sqrt(61 / 2))
    for row in comparison.rows:
        assert row.ratio == row.prefix_error / first.prefix_error
    memories = {row.method: row.memory for row in comparison.filters}
    assert memories == {"momentum": 1, "fo": 9, "sma": 5}
    assert all(row.memory == row.bands - 1 for row in comparison.fractional)


def test_more_epsilon_means_less_noise_in_every_row() -> None:
    tight, loose = small(lot=250, epsilon=2.0), small(lot=250, epsilon=8.0)
    for low, high in zip(tight.rows, loose.rows, strict=True):
        assert (low.method, low.settings) == (high.method, high.settings)
        assert high.prefix_error < low.prefix_error
        assert high.step_noise < low.step_noise


@pytest.mark.parametrize(
    ("size", "lot", "epochs", "bands"),
    [
        (1000, 50, 3, {2, 4, 8, 16}),
        (100, 25, 1, {2, 4}),
        (100, 26, 9, {2}),
        (100, 51, 9, set()),
        (100, 100, 1, set()),
        (64 * 2, 2, 1, {2, 4, 8, 16, 32, 64}),
    ],
)
def test_bands_stop_at_rate_one(size: int, lot: int, epochs: int, bands: set[int]) -> None:
    comparison = small(dataset_size=size, lot=lot, epochs=epochs)
    assert {row.bands for row in comparison.fractional} == bands
    steps = comparison.request.steps
    inverses = [row.bands for row in comparison.of("banded-inverse")]
    assert inverses == [bands for bands in planning.BANDS if bands <= steps]
    assert all(row.sample_rate <= 1 for row in comparison.rows)
    assert all(row.bands <= comparison.request.steps for row in comparison.rows)


def test_no_filter_is_recommended_though_its_delay_hides_noise() -> None:
    comparison = small(dataset_size=100, lot=60, epochs=2)
    assert min(comparison.rows, key=lambda row: row.ratio).method == "momentum"
    assert comparison.recommended not in (*comparison.filters, *comparison.of("dp-ftrl"))


def test_the_choice_keeps_within_the_memory() -> None:
    ratios = []
    for limit in (0, 1, 2, 3, 7, 15, None):
        comparison = small(max_memory=limit)
        row = comparison.recommended
        assert limit is None or row.memory <= limit
        candidates = comparison.of("fractional-noise", "banded-inverse")
        allowed = [each for each in candidates if comparison.request.fits(each.memory)]
        assert row.ratio == min([1.0, *(each.ratio for each in allowed)])
        ratios.append(row.ratio)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[2] == ratios[1] > ratios[3]


def _with_gain(gain: float) -> Comparison:
    sample = small()
    row, *_ = sample.fractional
    return Comparison(sample.request, (sample.baseline, Row(**vars(row) | {"ratio": 1 - gain})))


def test_a_gain_below_two_per_cent_is_not_worth_it() -> None:
    assert _with_gain(0.0201).recommended.method == "fractional-noise"
    assert _with_gain(0.0199).recommended.method == "dp-sgd"
    assert _with_gain(-0.3).recommended.method == "dp-sgd"


# -- text, JSON and plot --------------------------------------------------------------------


def words(comparison: Comparison) -> str:
    return " ".join(plan.words(comparison))


def test_the_text_names_the_choice_its_gain_and_its_memory() -> None:
    comparison = small()
    row = comparison.recommended
    text = words(comparison)
    assert f"Use fractional noise, order {row.order:g}, bands {row.bands}" in text
    assert f"{row.ratio:.3f} of DP-SGD's ({1 - row.ratio:.1%} less)" in text
    assert f"It keeps {row.memory} vectors" in text
    assert "they do not lower accumulated noise" in text
    smoothed = comparison.filters[0].step_noise / comparison.baseline.step_noise
    assert f"momentum: one step {smoothed:.3f}" in text


def test_the_text_says_why_dp_sgd() -> None:
    assert "0.981 of its accumulated noise" in words(_with_gain(0.019))
    assert "a gain below the 2%" in words(_with_gain(0.019))
    assert "a single step has no earlier noise" in words(small(lot=1000, epochs=1))
    inverse = words(small(max_memory=0))
    assert "Use a banded inverse, bands" in inverse and "found within 0 vectors" in inverse
    assert "It keeps no earlier noise and makes" in inverse


def test_fractional_noise_is_planned_until_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparison = small()
    monkeypatch.delitem(methods.METHODS, "fractional-noise", raising=False)
    assert "Fractional noise is planned" in words(comparison)
    assert comparison.as_dict()["recommendation"]["available"] is False
    monkeypatch.setitem(methods.METHODS, "fractional-noise", methods.METHODS["dp-sgd"])
    assert "planned" not in words(comparison)
    assert comparison.as_dict()["recommendation"]["available"] is True


# -- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["dataset_size", "lot", "epochs", "epsilon", "max_memory"])
@pytest.mark.parametrize("value", ["7", True, 7.5j])
def test_the_request_refuses_what_is_no_number(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Request(**{"dataset_size": 9, "lot": 9, "epochs": 1, "epsilon": 1.0, field: value})
