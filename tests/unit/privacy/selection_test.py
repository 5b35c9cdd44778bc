"""Private selection: its law, its bound, and its place on a ledger."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, dp_event
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy.stats import chisquare, geom, logser, nbinom

from vestige.errors import ConfigError
from vestige.privacy import accounting, ledger_file
from vestige.privacy.composition import prepared, renyi_orders
from vestige.privacy.events import Event, merge
from vestige.privacy.ledger_file import LedgerFile
from vestige.privacy.selection import Law, Selection
from vestige.statement import curves

ETAS = (-0.5, 0.0, 0.5, 1.0, 3.0)
GRID = [1 + k / 10 for k in range(1, 100)] + [float(k) for k in range(11, 200)]


def closed_form(law: Law, k: int) -> float:
    """P(K = k) as the paper has it."""
    if law.eta == 0:
        return (1 - law.gamma) ** k / (k * math.log(1 / law.gamma))
    product = math.prod((i + law.eta) / (i + 1) for i in range(k))
    return (1 - law.gamma) ** k / (law.gamma**-law.eta - 1) * product


def uniforms(seed: int) -> Any:
    generator = np.random.default_rng(seed)
    return lambda _: 1 - generator.random()


@pytest.mark.parametrize("eta", ETAS)
def test_the_chances_are_the_closed_form_and_have_the_mean(eta: float) -> None:
    law = Law.with_mean(7.5, eta)
    assert law.mean == pytest.approx(7.5, rel=1e-9)
    assert law.chances.sum() == pytest.approx(1, abs=1e-12)
    k = np.arange(1, len(law.chances) + 1)
    assert (k * law.chances).sum() == pytest.approx(7.5, rel=1e-9)
    for few in (1, 2, 3, 10, 40):
        assert law.chances[few - 1] == pytest.approx(closed_form(law, few), rel=1e-9)


def test_the_laws_that_scipy_knows() -> None:
    k = np.arange(1, 60)
    for eta, known in (
        (1.0, lambda law: geom.pmf(k, law.gamma)),
        (0.0, lambda law: logser.pmf(k, 1 - law.gamma)),
        (2.5, lambda law: nbinom.pmf(k, 2.5, law.gamma) / nbinom.sf(0, 2.5, law.gamma)),
    ):
        law = Law.with_mean(10, eta)
        assert law.chances[:59] == pytest.approx(known(law), rel=1e-9)


@pytest.mark.parametrize("eta", ETAS)
def test_numbers_of_trials_are_drawn_from_the_law(eta: float) -> None:
    law, draws = Law.with_mean(4, eta), 4000
    check_drawn(law, [law.draw(uniforms(seed)) for seed in range(draws)])


def check_drawn(law: Law, drawn: list[int]) -> None:
    counted = np.bincount(drawn, minlength=9)
    assert counted[0] == 0  # at least one trial, always
    expected = np.append(law.chances[:7], law.chances[7:].sum()) * len(drawn)
    seen = np.append(counted[1:8], counted[8:].sum())
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


def test_a_fixed_number_of_trials_is_not_the_law() -> None:
    """The mutant of the draw: the test of the distribution sees it."""
    law = Law.with_mean(4, 0)
    with pytest.raises(AssertionError):
        check_drawn(law, [4] * 4000)


def test_small_chances_come_out_as_they_are() -> None:
    """A number far out needs many small draws, not one that a grid cuts off."""
    law = Law.with_mean(4, 1)
    assert law.draw(lambda _: 1.0) == len(law.chances)
    assert law.chances[-1] < 1e-30
    assert law.draw(lambda _: 2.0**-53) == 1
    assert law.most(0.99) == geom.ppf(0.99, law.gamma)


def reference(rate: float, noise: float, steps: int, law: Law, delta: float) -> float:
    """Epsilon of a search: the curve of dp-accounting, theorem 2 written out, and no more."""
    accountant = RdpAccountant(GRID)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    curve = dict(zip(GRID, accountant._rdp, strict=True))
    total = [
        e
        + (1 + law.eta)
        * min((1 - 1 / b) * f + math.log(1 / law.gamma) / b for b, f in curve.items())
        + math.log(law.mean) / (a - 1)
        for a, e in curve.items()
    ]
    return float(compute_epsilon(GRID, total, delta)[0])


def search(rate: float, noise: float, steps: int, law: Law) -> Event:
    return Event.of(Selection(law, (((rate, noise, steps),),)))


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.05, 1.2, 600), (1.0, 8.0, 3)])
def test_epsilon_of_a_search_is_the_papers(
    eta: float, rate: float, noise: float, steps: int
) -> None:
    law, delta = Law.with_mean(10, eta), 1e-5
    ours = accounting.epsilon([search(rate, noise, steps, law)], delta, "rdp")
    assert ours == pytest.approx(reference(rate, noise, steps, law, delta), rel=5e-3)
    one = accounting.epsilon([Event(rate, noise, steps)], delta, "rdp")
    assert one < ours < (3 + 2 * eta) * one + 3
    if eta < 0:
        return
    theirs = RdpAccountant(list(renyi_orders()))
    trial = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    theirs.compose(dp_event.RepeatAndSelectDpEvent(trial, 10, eta))
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=5e-3)


def best_of(outcomes: dict[float, float], chances: dict[int, float]) -> dict[float, float]:
    """The law of the largest outcome, exactly: outcomes in order of what they are worth."""
    below = {score: sum(outcomes[s] for s in outcomes if s <= score) for score in outcomes}
    worst = {score: below[score] - outcomes[score] for score in outcomes}
    return {
        score: sum(c * (below[score] ** k - worst[score] ** k) for k, c in chances.items())
        for score in outcomes
    }


def divergence(p: dict[float, float], q: dict[float, float], order: float) -> float:
    logs = [order * math.log(p[s]) + (1 - order) * math.log(q[s]) for s in p]
    return float(np.logaddexp.reduce(logs)) / (order - 1)


def test_the_best_of_many_reveals_more_than_one_and_no_more_than_the_bound() -> None:
    """A leak by selection: a pure mechanism whose rarest answer scores best.

    One trial is 0.5-DP. The best of 400 trials is not, by far, so the naive count is wrong; the
    best of a random number of trials keeps to the theorem, at every order and in both directions.
    """
    eps, rare = 0.5, 0.01
    one = {0.0: 1 - rare, 1.0: rare}
    other = {0.0: 1 - rare * math.exp(eps), 1.0: rare * math.exp(eps)}

    def largest(p: dict[float, float], q: dict[float, float]) -> float:
        return max(abs(math.log(p[s] / q[s])) for s in p)

    assert largest(one, other) == pytest.approx(eps)
    for fixed, at_least in ((100, 0.6), (400, 2.5)):  # the naive count says 0.5
        assert largest(best_of(one, {fixed: 1.0}), best_of(other, {fixed: 1.0})) > at_least
    orders = np.array(GRID)
    for eta in ETAS:
        law = Law.with_mean(40, eta)
        chances = dict(enumerate(law.chances.tolist(), 1))
        p, q = best_of(one, chances), best_of(other, chances)
        curve = np.array([max(divergence(one, other, a), divergence(other, one, a)) for a in GRID])
        bound = law.renyi(orders, curve)
        got = np.array([max(divergence(p, q, a), divergence(q, p, a)) for a in GRID])
        assert (got <= bound).all()
        assert (got > curve).any()  # the trial's own curve does not hold for the best


def test_a_naive_gaussian_search_breaks_its_trials_epsilon() -> None:
    """The best of 50 Gaussian scores at epsilon 1 each: an attack beats (1, delta), not the bound.

    The score is the release itself, so the best one is shifted by as many draws as there were.
    """
    from scipy.stats import norm

    delta, trials = 1e-3, 50
    noise = accounting.calibrate(1.0, delta, 1.0, 1).noise_multiplier
    cut = np.linspace(-20, 40, 241)
    # P(best > cut) without the record and with it.
    without = -np.expm1(trials * norm.logcdf(cut / noise))
    with_it = -np.expm1(trials * norm.logcdf((cut - 1) / noise))
    assert (with_it - math.e * without).max() > delta  # (1, delta)-DP is broken
    law = Law.with_mean(trials, 0)
    k = np.arange(1, 4001)  # the rest adds less than 1e-4 of delta
    assert law.chances[4000:].sum() < 1e-4 * delta

    def above(shift: float) -> Any:
        below = norm.cdf((cut[:, None] - shift) / noise) ** k
        return 1 - (law.chances[:4000] * below).sum(1)

    epsilon = accounting.epsilon([search(1.0, noise, 1, law)], delta)
    assert (above(1.0) - math.exp(epsilon) * above(0.0)).max() <= delta
    assert epsilon > 1


def test_candidates_with_other_costs_are_charged_by_the_largest_curve() -> None:
    law, cheap, dear = Law.with_mean(5, 0), (0.02, 2.0, 100), (0.1, 1.0, 50)
    both = Event.of(Selection(law, ((cheap,), (dear,))))
    alone = [accounting.epsilon([search(*one, law)], 1e-5) for one in (cheap, dear)]
    assert accounting.epsilon([both], 1e-5) >= max(alone)
    assert accounting.epsilon([both], 1e-5) == pytest.approx(max(alone), rel=0.05)


def test_a_search_composes_with_releases_by_renyi_alone() -> None:
    law, runs = Law.with_mean(5, 0), [Event(0.05, 1.5, 200), Event(1.0, 20.0, 3)]
    event = search(0.05, 2.0, 100, law)
    alone = accounting.epsilon([event], 1e-5)
    together = accounting.epsilon([*runs, event], 1e-5, "pld")
    assert together == accounting.epsilon([event, *runs], 1e-5, "rdp")
    assert max(alone, accounting.epsilon(runs, 1e-5, "rdp")) < together
    assert together < alone + accounting.epsilon(runs, 1e-5, "rdp")
    assert accounting.epsilon([event, event], 1e-5) == accounting.epsilon([event.times(2)], 1e-5)
    assert accounting.epsilon([event.times(2)], 1e-5) > alone
    many = prepared([*(Event(0.01, 1 + k / 100) for k in range(100)), event])
    assert len(many) < 70 and event in many  # so many are rounded; the search is not
    assert curves.of_several_records([event], 1e-5, plain=True)[2] > alone
    points = [(1e-5, alone), (1e-3, accounting.epsilon([event], 1e-3))]
    assert all(0 < misses < 1 for _, misses in curves.trade_off([event], "pld", points))
    noise, reached = accounting.noise_for(
        alone + 1, 1e-5, accounting.step_charges(0.05, 1.0, 50), "pld", [event]
    )
    assert alone + 0.9 < reached <= alone + 1 and noise > 0


def test_a_search_without_noise_has_no_epsilon() -> None:
    law = Law.with_mean(5, 0)
    assert accounting.epsilon([search(0.1, 0.0, 1, law)], 1e-5) == math.inf
    assert accounting.epsilon([search(0.1, math.inf, 1, law)], 1e-5) < math.log(5) + 2


def test_who_does_not_know_of_searches_counts_no_privacy() -> None:
    event = search(0.1, 3.0, 10, Law.with_mean(5, 0))
    assert accounting.epsilon([Event(event.sample_rate, event.noise_multiplier)], 1e-5) == math.inf
    with pytest.raises(ConfigError, match="noise_multiplier 0"):
        Event(0.1, 3.0, 1, event.selection)


def test_a_search_survives_json_merging_and_a_ledger_file(tmp_path: Any) -> None:
    event = search(0.1, math.inf, 10, Law.with_mean(5, 0.5))
    row = json.loads(json.dumps(event.as_row(), allow_nan=False))
    assert Event.from_row(row) == Event.from_json(event.as_json()) == event
    other = search(0.1, 2.0, 10, Law.with_mean(6, 0.5))
    assert merge([event, Event(1, 0), other, event]).count(event.times(2)) == 1
    assert len(merge([event, Event(1, 0), other, event])) == 3
    file = LedgerFile(tmp_path / "ledger.jsonl")
    file.account("search", {"data": "d"}, block=1).cover(event)
    written = (tmp_path / "ledger.jsonl").read_bytes()
    file.close()
    assert (tmp_path / "ledger.jsonl").read_bytes() == written  # nothing is given back
    assert ledger_file.read(tmp_path / "ledger.jsonl").events == (event,)


@pytest.mark.parametrize(
    "selection",
    [
        None,
        {},
        {"eta": 0.0, "gamma": 0.5, "trials": []},
        {"eta": 0.0, "gamma": 0.5, "trials": [[]]},
        {"eta": 0.0, "gamma": 0.5, "trials": [[[0.1, 1.0]]]},
        {"eta": 0.0, "gamma": 0.5, "trials": [[[2.0, 1.0, 1]]]},
        {"eta": 0.0, "gamma": 1.5, "trials": [[[0.1, 1.0, 1]]]},
        {"eta": -2, "gamma": 0.5, "trials": [[[0.1, 1.0, 1]]]},
    ],
)
def test_a_bad_selection_is_refused(selection: Any) -> None:
    with pytest.raises(ConfigError):
        Event.from_row([1.0, 0.0, 1, selection])


@pytest.mark.parametrize(
    ("mean", "eta", "message"),
    [
        (1, 0, "trials 1"),
        (2000, 0, "at most"),
        (math.inf, 1, "trials inf"),
        (5, -1, "eta -1"),
        (5, 11, "eta 11"),
    ],
)
def test_bad_laws_are_refused(mean: float, eta: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Law.with_mean(mean, eta)
