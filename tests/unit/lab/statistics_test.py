"""Statistics against hand computations, and against the intervals that the papers print."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct, ttest_1samp
from scipy.stats import t as student

from vestige.errors import ConfigError
from vestige.lab import catalogue
from vestige.lab.statistics import (
    corrected,
    detectable,
    equivalence,
    holm,
    interval_half_width,
    paired_test,
    summarise,
    time_to_target,
)

# t_(0.975, n - 1) as printed in tables of the distribution.
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 10: 2.262, 31: 2.042}


@pytest.mark.parametrize(("count", "quantile"), T_975.items())
def test_interval_uses_students_quantile(count: int, quantile: float) -> None:
    assert interval_half_width(1.0, count) == pytest.approx(quantile / math.sqrt(count), rel=2e-4)


def test_summary_by_hand() -> None:
    # Mean 0.346333..., squares of the differences 1.111e-7 + 2 * 2.78e-8, over n - 1 = 2.
    found = summarise([0.3460, 0.3465, 0.3465])
    assert found.mean == pytest.approx(0.346333, abs=1e-6)
    assert found.std == pytest.approx(math.sqrt((1.1111e-7 + 2 * 2.7778e-8) / 2), rel=1e-3)
    half = 4.303 * found.std / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), 1e-4)
    # As printed: 0.3463 +- 0.0003, [0.3456, 0.3471].
    assert (round(found.mean, 4), round(found.std, 4)) == (0.3463, 0.0003)
    assert (round(found.low, 4), round(found.high, 4)) == (0.3456, 0.3471)


def test_one_value_has_no_interval() -> None:
    found = summarise([0.5])
    assert (found.mean, found.std, found.low, found.high) == (0.5, None, None, None)


@pytest.mark.parametrize("count", [0, 1])
def test_an_interval_needs_two_values(count: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        summarise([]) if count == 0 else interval_half_width(1.0, 1)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_summary_agrees_with_the_standard_library(values: list[float]) -> None:
    found = summarise(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.std == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert found.low is not None and found.high is not None
    assert found.low <= found.mean <= found.high


@pytest.mark.parametrize(("name", "runs"), [("fo-tab3", 5), ("sma-tab2", 3)])
def test_printed_intervals_follow_from_printed_means_and_deviations(name: str, runs: int) -> None:
    """Both tables state a Student-t interval; their numbers are rounded to four places."""
    checked = 0
    for arm in catalogue.find(name).arms:
        printed = arm.paper
        if not printed:
            continue
        half = interval_half_width(printed["std"], runs)
        slack = 1e-4 + interval_half_width(5e-5, runs)  # of mean and limit, and of the deviation
        assert printed["accuracy"] - half == pytest.approx(printed["low"], abs=slack)
        assert printed["accuracy"] + half == pytest.approx(printed["high"], abs=slack)
        checked += 1
    assert checked == 8


def test_printed_intervals_need_their_number_of_runs() -> None:
    """The check above can fail: with another n the printed limits do not come out."""
    printed = catalogue.find("fo-tab3").arms[0].paper
    for runs in (3, 4, 10):
        half = interval_half_width(printed["std"], runs)
        assert abs(printed["accuracy"] - half - printed["low"]) > 5e-4


def test_paired_test_by_hand() -> None:
    values = {0: 0.36, 1: 0.37, 2: 0.35, 3: 0.38, 9: 0.1}
    reference = {0: 0.35, 1: 0.35, 2: 0.35, 3: 0.35, 7: 0.9}
    # Differences 0.01, 0.02, 0, 0.03: mean 0.015, s 0.01291, t = 0.015 / 0.006455 = 2.3238, df 3.
    found = paired_test(values, reference)
    assert found is not None
    assert found.count == 4
    assert found.difference == pytest.approx(0.015)
    assert found.p == pytest.approx(0.1027, abs=2e-4)


@pytest.mark.parametrize("shift", [0.0, 0.004, -0.02])
def test_the_interval_of_a_paired_test_leaves_0_out_where_it_rejects(shift: float) -> None:
    steps = (0.003, -0.002, 0.0005, 0.0015, -0.001)
    found = paired_test({s: shift + v for s, v in enumerate(steps)}, dict.fromkeys(range(5), 0.0))
    assert found is not None and found.p is not None and found.low is not None
    expected = ttest_1samp([shift + v for v in steps], 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.std == pytest.approx(statistics.stdev(steps))
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def test_a_detectable_difference_by_hand() -> None:
    # n 5: t_0.975 2.776 and t_0.8 0.941 with 4 degrees of freedom; two comparisons: t_0.9875 3.495.
    assert detectable(0.01, 5, 1) == pytest.approx((2.776 + 0.941) * 0.01 / math.sqrt(5), rel=1e-3)
    assert detectable(0.01, 5, 2) == pytest.approx((3.495 + 0.941) * 0.01 / math.sqrt(5), rel=1e-3)


@pytest.mark.parametrize(("count", "comparisons"), [(5, 1), (10, 1), (10, 9), (30, 3)])
def test_a_detectable_difference_is_found_four_times_in_five(count: int, comparisons: int) -> None:
    """By the exact power of the t test, which the formula approximates."""
    size = detectable(1.0, count, comparisons) * math.sqrt(count)
    edge = student.isf(0.025 / comparisons, count - 1)
    power = nct.sf(edge, count - 1, size) + nct.cdf(-edge, count - 1, size)
    assert 0.77 < power < 0.88


def test_paired_test_without_common_seeds() -> None:
    assert paired_test({0: 0.1}, {1: 0.1}) is None
    alone = paired_test({0: 0.2}, {0: 0.1})
    assert alone is not None and (alone.p, alone.low, alone.std) == (None, None, None)


def test_equal_runs_are_no_evidence() -> None:
    same = {seed: 0.3 + seed / 100 for seed in range(5)}
    found = paired_test(same, same)
    assert found is not None and found.p == 1.0
    # One image more in every run: the test is undefined, not certain.
    shifted = paired_test({s: v + 1 / 2000 for s, v in same.items()}, same)
    assert shifted is not None and (shifted.p, shifted.low) == (None, None)
    assert corrected([shifted])[0].detectable is None


def test_holm_by_hand() -> None:
    # 4 * 0.01, 3 * 0.02, 2 * 0.03, 1 * 0.04, and never less than the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.01, None, 0.02]) == pytest.approx([0.03, None, 0.04])  # None counts
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_is_between_the_value_and_bonferroni(values: list[float]) -> None:
    found = [p for p in holm(values) if p is not None]
    order = sorted(range(len(values)), key=lambda i: values[i])
    assert all(
        p <= f <= min(1.0, len(values) * p) + 1e-12 for p, f in zip(values, found, strict=True)
    )
    assert all(found[a] <= found[b] for a, b in pairwise(order))


def test_corrected_says_how_many_comparisons() -> None:
    tests = [paired_test({0: a, 1: a + 0.01, 2: a}, {0: 0.1, 1: 0.1, 2: 0.1}) for a in (0.2, 0.3)]
    found = corrected([test for test in tests if test is not None])
    assert [test.comparisons for test in found] == [2, 2]
    assert all(test.p is not None and test.p_holm is not None for test in found)
    for test in found:
        assert test.std is not None and test.detectable == detectable(test.std, 3, 2)


def test_time_to_a_target() -> None:
    def curve(*accuracies: float) -> dict[str, list[float | None]]:
        epochs: list[float | None] = [float(i + 1) for i in range(len(accuracies))]
        return {"epoch": epochs, "accuracy": list(accuracies), "epsilon": [0.5, 1.0, 1.5]}

    found = time_to_target(
        0.3, [curve(0.1, 0.3, 0.2), curve(0.1, 0.2, 0.31), curve(0.1, 0.2, 0.29)]
    )
    assert (found.count, found.reached) == (3, 2)
    assert found.epochs == 2.5
    assert found.epsilon == 1.25
    never = time_to_target(0.9, [curve(0.1, 0.2, 0.3)])
    assert (never.reached, never.epochs, never.epsilon) == (0, None, None)


def test_time_to_a_target_without_a_guarantee() -> None:
    curve: dict[str, list[float | None]] = {"epoch": [1], "accuracy": [0.5], "epsilon": [None]}
    found = time_to_target(0.3, [curve])
    assert (found.reached, found.epochs, found.epsilon) == (1, 1.0, None)


def test_equivalence_is_two_one_sided_tests() -> None:
    differences = [0.001, -0.002, 0.0005, 0.0015, -0.001]
    found = equivalence(differences, 0.005)
    above = ttest_1samp(differences, -0.005, alternative="greater").pvalue
    below = ttest_1samp(differences, 0.005, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below))
    interval = ttest_1samp(differences, 0).confidence_interval(0.90)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("shift", [-0.01, -0.004, 0.0, 0.003, 0.02])
def test_the_interval_is_within_the_margin_where_both_tests_reject(shift: float) -> None:
    differences = [shift + step for step in (-0.002, -0.001, 0.0, 0.001, 0.002)]
    found = equivalence(differences, 0.005)
    assert (found.p <= 0.05) == (found.low >= -0.005 and found.high <= 0.005)


def test_equal_differences_are_certain() -> None:
    assert equivalence([0.001] * 3, 0.005).p == 0
    assert equivalence([0.01] * 3, 0.005).p == 1
    with pytest.raises(ConfigError, match="at least 2 pairs"):
        equivalence([0.0], 0.005)
