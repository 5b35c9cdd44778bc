"""The claims of the SMA-DP-SGD paper (arXiv 2605.20450), each as a test of the real code.

Lemmas 1-3, theorems 1-3 and propositions 1-14, in the paper's order; Algorithm 1 itself is in
sma_algorithm_test.py. "Given the history" means that a second run is forced through the releases of
the first.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_helpers import (
    LOT,
    RATE,
    ROUNDED,
    N,
    assert_close,
    history_of,
    lot_of,
    mixture,
    neighbour,
    normalised,
    normals,
    papers_epsilon,
    properties,
    records,
    replayed_pair,
    seeds,
    sma_memory,
    train,
    transcripts,
    vectors,
)
from vestige.memory.rules import View, power_law
from vestige.methods import SMA, SMAFixed, SMAShuffled

BETA, BOUNDS, SIGMAS, DELTA = 0.8, (0.05, 0.12), (0.9, 2.0), 1e-5
JOINT = 1 / (BETA * math.sqrt(sum(s**-2 for s in SIGMAS)))
FULL = SMA(beta=BETA, window=5, interval=(1.0, 1.5), tempering=0.4, ema=0.4, warmup=3.0)
FORMS = {
    "sma": FULL,
    "sma-shuffled": SMAShuffled(**FULL.settings()),
    "sma-fixed": SMAFixed(**FULL.settings(), fixed=0.3),
}
OPTIONS = {"max_grad_norm": BOUNDS, "group_noise_multipliers": SIGMAS}


def by_group(tape, vector):
    """The norm of each group's part."""
    return [float(vector[segment].norm()) for segment in tape.groups.segments()]


def rule(**settings):
    """The memory rule of SMA with some settings, in steps of an epoch of 10."""
    return replace(FULL, **settings).rule(10)


def view_of(past, memory, exponents=(), parts=1):
    """What `memory` sees of `past`, and the history behind it."""
    history = history_of(past, memory.window, memory.ema, parts)
    return history.view(exponents), history


# -- B.2 to B.6: privacy --------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [RATE, 1.0])
def test_lemma_1_one_record_moves_a_groups_clipped_sum_by_at_most_its_bound(rate):
    """For fixed weights and mask |s^g(D) - s^g(D')| <= C^g in every group, and C^g is attained."""
    options = OPTIONS | {"sample_rate": rate, "lr": 0.0}
    with_it, without = train(FULL, **options), train(FULL, **options, data=neighbour())
    seen = [N - 1 in lot_of(t, rate) for t in range(8)]
    assert any(seen)
    for a, b, included in zip(with_it, without, seen, strict=True):
        for moved, bound in zip(by_group(with_it, a.sum - b.sum), BOUNDS, strict=True):
            assert moved <= bound * ROUNDED
            assert (moved >= 0.99 * bound) if included else (moved == 0)


@pytest.mark.parametrize("name", FORMS)
def test_proposition_1_given_the_history_only_the_scaled_sum_is_new(name):
    """Under one history weights and branch are the same on any data; r differs by beta s."""
    options = OPTIONS | {"sample_rate": 1.0}
    first = train(FORMS[name], **options)
    other = train(FORMS[name], **options, data=records(17, 5), replay=first.releases)
    for a, b in zip(first, other, strict=True):
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.branch, b.branch)
        assert a.facts == b.facts
        assert not torch.equal(a.sum, b.sum)
        assert_close(a.query - b.query, BETA * (a.sum - b.sum))
    assert [s.silent for s in first] == [True] + [False] * 7


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rate", [RATE, 1.0])
def test_theorem_1_one_record_moves_a_groups_query_by_at_most_beta_times_its_bound(name, rate):
    """Given history and mask |r^g(D) - r^g(D')| <= beta C^g, jointly beta sqrt(sum C_g^2)."""
    here, there = replayed_pair(FORMS[name], **OPTIONS, sample_rate=rate)
    largest = BETA * math.hypot(*BOUNDS)
    for t, (a, b) in enumerate(zip(here, there, strict=True)):
        included = N - 1 in lot_of(t, rate)
        for moved, bound in zip(by_group(here, a.query - b.query), BOUNDS, strict=True):
            assert moved <= BETA * bound * ROUNDED
            assert (moved >= 0.99 * BETA * bound) if included else (moved == 0)
        together = float((a.query - b.query).norm())
        assert together <= largest * ROUNDED
        assert (together >= 0.99 * largest) if included else (together == 0)


def test_lemma_2_the_whitened_query_moves_by_at_most_the_joint_bound():
    """|Sigma^-1/2 (r(D) - r(D'))| <= beta sqrt(sum sigma_g^-2), attained; Sigma as drawn."""
    here, there = replayed_pair(FULL, **OPTIONS, sample_rate=1.0)
    for t, (a, b) in enumerate(zip(here, there, strict=True)):
        z, stds = normals(t, a.sum), []
        for segment in here.groups.segments():
            stds.append(float(a.noise[segment].norm() / z[segment].norm()))
            assert_close(a.noise[segment], stds[-1] * z[segment])
        assert_close(stds, [s * c for s, c in zip(SIGMAS, BOUNDS, strict=True)])
        white = math.hypot(*np.divide(by_group(here, a.query - b.query), stds))
        assert 0.99 / JOINT <= white <= ROUNDED / JOINT


@pytest.mark.parametrize("name", FORMS)
def test_theorem_2_a_step_is_charged_once_at_the_joint_ratio(name):
    """All groups are one SGM(q, 1 / (beta sqrt(sum sigma_g^-2))): sigma/(beta sqrt G) if equal."""
    tape = train(FORMS[name], 8, **OPTIONS)
    for rate, charged in tape.events:
        assert rate == LOT / N
        assert charged == pytest.approx(JOINT, rel=1e-14)
        assert charged < min(SIGMAS) / BETA  # the marginal ratio of equation 13 is no guarantee
    equal = {"max_grad_norm": BOUNDS, "group_noise_multipliers": [2.2, 2.2], "sample_rate": 0.05}
    tape = train(FORMS[name], 1, **equal)
    joint = 2.2 / (BETA * math.sqrt(2))
    assert tape.events == [(0.05, pytest.approx(joint, rel=1e-14))]
    spent = tape.engine.get_epsilon(DELTA, "rdp_classic")
    assert spent == pytest.approx(papers_epsilon([(0.05, joint)], DELTA), rel=1e-9)


def test_theorem_2_a_shared_multiplier_is_the_joint_one():
    """noise_multiplier = sigma puts sigma sqrt(sum C_g^2) everywhere and is charged sigma/beta."""
    here, there = replayed_pair(FULL, sample_rate=1.0, max_grad_norm=BOUNDS, noise_multiplier=2.0)
    assert here.events == [(1.0, 2.0 / BETA)] * 8
    for t, (a, b) in enumerate(zip(here, there, strict=True)):
        assert_close(a.noise, 2.0 * math.hypot(*BOUNDS) * normals(t, a.sum))
        ratio = 2.0 * math.hypot(*BOUNDS) / float((a.query - b.query).norm())
        assert 1 / ROUNDED <= ratio / (2.0 / BETA) < 1.01


def test_theorem_3_the_steps_compose():
    """T steps cost the infimum of T eps_SGM(order; q, sigma_eff) + log(1/delta)/(order - 1)."""
    sigmas = (2.0, 3.0)
    tape = train(FULL, 30, max_grad_norm=BOUNDS, group_noise_multipliers=sigmas, sample_rate=0.1)
    joint = 1 / (BETA * math.sqrt(sum(s**-2 for s in sigmas)))
    (event,) = tape.engine.ledger.events
    assert (event.sample_rate, event.count) == (0.1, 30)
    assert event.noise_multiplier == pytest.approx(joint, rel=1e-14)
    spent = tape.engine.get_epsilon(DELTA, "rdp_classic")
    assert spent == pytest.approx(papers_epsilon([(0.1, joint)] * 30, DELTA), rel=1e-9)


def test_theorem_3_steps_that_differ_are_charged_one_by_one():
    """Equation 23: sum_t eps_SGM(order; q_t, sigma_eff,t) for public schedules of the step."""

    def beta(t):
        return 0.9 - 0.05 * t

    def sigmas(t):
        return [2.0 + 0.1 * t, 3.0 - 0.1 * t]

    def rate(t):
        return 0.04 + 0.01 * t

    method = replace(FULL, beta=beta)
    tape = train(method, 12, max_grad_norm=BOUNDS, group_noise_multipliers=sigmas, sample_rate=rate)
    expected = [
        (rate(t), 1 / (beta(t) * math.hypot(*(1 / s for s in sigmas(t))))) for t in range(12)
    ]
    for found, (q, multiplier) in zip(tape.events, expected, strict=True):
        assert found == (q, pytest.approx(multiplier, rel=1e-14))
    for t, step in enumerate(tape):
        assert step.gain == beta(t)
        for g, segment in enumerate(tape.groups.segments()):
            z = normals(t, step.sum)[segment]
            assert_close(step.noise[segment], sigmas(t)[g] * BOUNDS[g] * z)
            if t:
                past = [release[segment] for release in tape.releases[:t]]
                memory = sma_memory(past, step.facts["rho"][g], method)
                assert_close(step.branch[segment], (1 - beta(t)) * memory.state)
    spent = tape.engine.get_epsilon(DELTA, "rdp_classic")
    assert spent == pytest.approx(papers_epsilon(expected, DELTA), rel=1e-9)


# -- B.7 and B.8: structure -----------------------------------------------------------------------


def test_proposition_2_the_memory_is_in_the_query_and_the_noise_comes_after_it():
    """Where b_t != 0, r_t is not the query of DP-SGD, and s~_t - r_t is the fresh noise."""
    tape = train(FULL, **OPTIONS)
    plain = train("dp-sgd", **OPTIONS, clipping="per_layer")
    for t, (step, other) in enumerate(zip(tape, plain, strict=True)):
        assert_close(step.noise, other.noise)
        assert_close(other.query, other.sum)
        assert_close(step.query, BETA * step.sum + step.branch)
        assert min(by_group(tape, step.query - BETA * step.sum)) > (1e-3 if t else -1)


def test_lemma_3_the_memory_is_inherited_queries_and_inherited_noise():
    """nu = sum a_j r_(t-j) + sum a_j Z_(t-j); so r, from sums and noise alone (equation 31)."""
    tape = train(FULL, 12, **OPTIONS)
    queries, noises = [], []
    for t, step in enumerate(tape):
        facts, query = step.facts, BETA * step.sum
        for g, segment in enumerate(tape.groups.segments() if t else []):
            weights = step.kernel(min(FULL.window - 1, t), g)
            inherited = mixture(weights, [r[segment] for r in queries])
            noise = mixture(weights, [z[segment] for z in noises])
            factor = facts["warmup"][g] * facts["gate"][g] * facts["scale"][g]
            query[segment] += (1 - BETA) * factor * (inherited + noise)
            assert float(noise.norm()) > 0.01
        queries.append(query)
        noises.append(torch.zeros_like(query))
        for g, segment in enumerate(tape.groups.segments()):
            noises[-1][segment] = SIGMAS[g] * BOUNDS[g] * normals(t, query)[segment]
        assert_close(step.query, query)
        assert_close(step.release, query + noises[-1])
        assert_close(step.gradient, (query + noises[-1]) / LOT)


# -- B.9: what the controls do --------------------------------------------------------------------


@given(
    st.floats(0, 12), st.floats(0, 6), st.floats(1e-3, 20), st.lists(st.floats(0, 40), min_size=2)
)
@properties
def test_proposition_3_a_larger_deviation_is_a_larger_tempering(low, width, rate, exponents):
    """lambda = 1 - exp(-c d) in [0, 1] never falls with d; d is the distance to the interval."""
    memory = rule(interval=(low, low + width), tempering=rate)
    parts = len(exponents)
    view = View(1, np.ones((parts, 1, 1)), np.ones((parts, 1)), np.ones(parts), tuple(exponents))
    facts = memory.recall(view).facts
    deviation, tempering = facts["deviation"], facts["tempering"]
    middle, half = low + width / 2, width / 2
    for rho, d, lam in zip(exponents, deviation, tempering, strict=True):
        assert d == max(0, low - rho, rho - (low + width))
        assert d == pytest.approx(max(0, abs(rho - middle) - half), abs=1e-12)
        assert lam == pytest.approx(1 - math.exp(-rate * d), abs=1e-15)
        assert (lam == 0) == (d == 0) or rate * d < 1e-15
    order = np.argsort(deviation)
    assert (np.diff(tempering[order]) >= 0).all()
    assert ((tempering >= 0) & (tempering <= 1)).all()


def raw(lags, alpha, tempering):
    """The kernel before it is normalised: lag 0 comes along, whose raw coefficient is 1."""
    weights = power_law(np.append(lags, 0.0), alpha, tempering)
    return weights[:-1] / weights[-1]


@given(st.integers(2, 12), st.floats(0.01, 1), st.floats(0, 3), st.floats(1e-3, 3))
@properties
def test_proposition_4_more_tempering_suppresses_older_lags(lags, alpha, tempering, more):
    """a_j falls in lambda, and a_j / a_k falls in lambda where j > k."""
    j = np.arange(1, lags + 1.0)
    before, after = raw(j, alpha, tempering), raw(j, alpha, tempering + more)
    assert (after < before).all()
    assert before == pytest.approx((j + 1) ** (alpha - 1) * np.exp(-tempering * j), rel=1e-9)
    past, weights = vectors(lags, lags), []
    for fixed in (tempering, tempering + more):
        memory = SMAFixed(window=lags + 1, alpha=alpha, fixed=fixed).rule(10)
        weights.append(memory.recall(view_of(past, memory)[0]))
    old, new = (w.weights[0] for w in weights)
    for k in range(lags - 1):
        assert (new[k + 1 :] / new[k] < old[k + 1 :] / old[k]).all()
    assert weights[1].depth[0] < weights[0].depth[0]


@given(st.integers(2, 12), st.floats(0.01, 0.99), st.floats(0, 3))
@properties
def test_proposition_5_a_smaller_order_prefers_newer_releases(lags, alpha, tempering):
    """(j+1)^(alpha-1) falls with j for alpha < 1 and is constant for alpha = 1."""
    j = np.arange(1, lags + 1.0)
    factor = raw(j, alpha, tempering) / np.exp(-tempering * j)
    assert (np.diff(factor) < 0).all()
    assert factor == pytest.approx((j + 1) ** (alpha - 1), rel=1e-9)
    assert raw(j, 1.0, tempering) == pytest.approx(np.exp(-tempering * j), rel=1e-9)


settings_of_gates = st.fixed_dictionaries(
    {
        "window": st.integers(2, 8),
        "ema": st.floats(0.01, 1),
        "norm_cap": st.sampled_from([0.1, 1.0, 10.0]),
        "eps": st.sampled_from([1e-12, 1e-3]),
        "warmup": st.floats(0.1, 100),
    }
)


@given(transcripts(), settings_of_gates, st.floats(0, 30), st.floats(0, 30))
@properties
def test_proposition_6_and_proposition_7_gate_and_scale_are_bounded(past, settings, rho, other):
    """0 <= Gamma <= 1 and 0 <= Psi <= xi_max; so no branch exceeds (1-beta) max_r |s~_r|."""
    memory = rule(**settings)
    view, history = view_of(past, memory, (rho, other), parts=2)
    recall = memory.recall(view)
    facts, lags = recall.facts, min(memory.window - 1, len(past))
    assert recall.weights.shape == (2, lags)
    assert (recall.weights >= 0).all()
    assert recall.weights.sum(1) == pytest.approx([1, 1], abs=1e-12)
    assert all(np.isfinite(facts[name]).all() for name in ("gate", "scale", "warmup", "tempering"))
    assert ((facts["gate"] >= 0) & (facts["gate"] <= 1)).all()
    assert ((facts["scale"] >= 0) & (facts["scale"] <= memory.norm_cap)).all()
    assert ((recall.depth >= 1 - 1e-12) & (recall.depth <= lags * (1 + 1e-12))).all()
    branch = history.mix(((1 - BETA) * recall.scale)[:, None] * recall.weights).values
    for part in (slice(0, 3), slice(3, 6)):
        largest = max(float(release[part].norm()) for release in past)
        assert float(branch[part].norm()) <= (1 - BETA) * largest * (1 + 1e-12)


@given(seeds, settings_of_gates, st.floats(0, 10))
@properties
def test_proposition_6_and_proposition_7_gate_and_scale_are_the_papers(seed, settings, rho):
    """Gamma = max(0, <mu, nu> / (|mu||nu| + eps)), Psi = min(xi_max, |mu| / (|nu| + eps))."""
    past, memory = vectors(seed, 6), rule(**settings)
    recall = memory.recall(view_of(past, memory, (rho,))[0])
    expected = sma_memory(past, rho, memory)
    assert_close(recall.weights[0], expected.weights)
    assert recall.facts["gate"][0] == pytest.approx(expected.gamma, abs=1e-10)
    assert recall.facts["scale"][0] == pytest.approx(expected.psi, abs=1e-10)
    assert recall.facts["warmup"][0] == pytest.approx(expected.omega, abs=1e-12)
    assert recall.scale[0] == pytest.approx(
        expected.omega * expected.gamma * expected.psi, abs=1e-9
    )


def test_proposition_8_beta_scales_sensitivity_and_signal_alike():
    """Under one history |r^g(D) - r^g(D')| and the signal in r fall with beta, the memory grows."""
    options = OPTIONS | {"sample_rate": 1.0}
    past = train(FULL, **options).releases
    runs = {}
    for beta in (0.2, 0.4, 0.8):
        method = replace(FULL, beta=beta)
        runs[beta] = [
            train(method, **options, data=data, replay=past) for data in (None, neighbour())
        ]
    for t in range(1, 8):
        state = runs[0.8][0][t].branch / 0.2
        for beta, (here, there) in runs.items():
            for moved, bound in zip(
                by_group(here, here[t].query - there[t].query), BOUNDS, strict=True
            ):
                assert 0.99 * beta * bound <= moved <= beta * bound * ROUNDED
            assert_close(here[t].branch, (1 - beta) * state)
            assert_close(here[t].query - (1 - beta) * state, beta * runs[0.2][0][t].sum)


# -- B.10: special cases --------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, [1.0] * 8], ids=["constant", "schedule"])
def test_proposition_9_beta_one_is_group_wise_dp_sgd(beta):
    """beta = 1: releases, gradients, weights and ledger are those of DP-SGD per layer, bitwise."""
    tape = train(replace(FULL, beta=beta), **OPTIONS)
    plain = train("dp-sgd", **OPTIONS, clipping="per_layer")
    for a, b in zip(tape, plain, strict=True):
        assert a.silent
        assert torch.equal(a.release, b.release)
        assert torch.equal(a.gradient, b.gradient)
    assert torch.equal(tape.weights, plain.weights)
    assert tape.engine.ledger.events == plain.engine.ledger.events
    assert tape.events[0][1] == pytest.approx(JOINT * BETA, rel=1e-14)


def test_proposition_10_window_one_has_no_memory():
    """K = 1: the branch is 0 for every group and step, the release beta s + Z, at sigma_eff."""
    tape = train(replace(FULL, window=1), **OPTIONS)
    for t, step in enumerate(tape):
        assert step.silent
        for g, segment in enumerate(tape.groups.segments()):
            noise = SIGMAS[g] * BOUNDS[g] * normals(t, step.sum)[segment]
            assert_close(step.release[segment], BETA * step.sum[segment] + noise)
    assert tape.events == [(LOT / N, pytest.approx(JOINT, rel=1e-14))] * 8


def test_proposition_11_without_warm_up_or_alignment_a_group_has_no_memory():
    """omega_t = 0 or Gamma_t^g = 0: b_t^g = 0, group by group."""
    size, first = 75, slice(0, 48)
    up = torch.ones(size, dtype=torch.float64)
    turned = up.clone()
    turned[first] = -0.1  # the first group turns against a trend that forgets slowly
    method = replace(FULL, window=3, ema=0.1)
    tape = train(method, 5, **OPTIONS, replay=[up, turned, turned, turned, up], lr=0.0)
    assert tape.groups.segments()[0] == first
    assert tape[0].silent
    assert tape[0].facts["warmup"] == [0.0, 0.0]
    for step in tape.steps[3:]:
        assert step.facts["gate"][0] == 0.0
        assert step.facts["gate"][1] > 0.99
        assert not step.branch[first].any()
        assert float(step.branch[first.stop :].norm()) > 0.1
        assert_close(step.query[first], BETA * step.sum[first])
    cold = train(replace(method, warmup=1e300), 5, **OPTIONS, replay=[up] * 5, lr=0.0)
    assert max(float(step.branch.abs().max()) for step in cold) < 1e-290
    both = train(method, 5, **OPTIONS, replay=[up, -0.1 * up, -0.1 * up, up, up], lr=0.0)
    assert both[3].silent


def assert_kernel(method, formula):
    """In every group and at every step of a run the weights are formula(lag), normalised."""
    for t, step in enumerate(train(method, 8, **OPTIONS)):
        lags = min(method.window - 1, t)
        expected = normalised([formula(j) for j in range(1, lags + 1)])
        for g in (0, 1):
            assert step.kernel(lags, g) == pytest.approx(expected, rel=1e-12, abs=0)


def test_proposition_12_without_tempering_the_kernel_is_a_power_law():
    """lambda = 0, here because every exponent is in the interval: a_j = (j+1)^(alpha-1)."""
    wide = replace(FULL, interval=(0.0, 1e6), alpha=0.3)
    assert_kernel(wide, lambda j: (j + 1) ** -0.7)
    assert_kernel(SMAFixed(window=5, alpha=0.3, fixed=0.0), lambda j: (j + 1) ** -0.7)


def test_proposition_13_at_order_one_the_kernel_is_exponential():
    """alpha = 1: a_j = exp(-lambda j)."""
    assert_kernel(SMAFixed(window=5, alpha=1.0, fixed=0.35), lambda j: math.exp(-0.35 * j))
    for t, step in enumerate(train(replace(FULL, alpha=1.0), 8, **OPTIONS)):
        lags = min(4, t)
        for g, lam in enumerate(step.facts["tempering"]):
            assert lam > 0.1 or t == 0
            expected = normalised([math.exp(-lam * j) for j in range(1, lags + 1)])
            assert_close(step.kernel(lags, g), expected)


def test_proposition_14_without_tempering_at_order_one_the_weights_are_equal():
    """lambda = 0 and alpha = 1: weights 1/M_t, effective depth (M_t + 1)/2."""
    method = replace(FULL, interval=(0.0, 1e6), alpha=1.0)
    for t, step in enumerate(train(method, 8, **OPTIONS)):
        lags = min(4, t)
        for g in (0, 1):
            assert_close(step.kernel(lags, g), [1 / lags] * lags if lags else [])
        assert_close(step.facts["depth"], [(lags + 1) / 2 if lags else 0.0] * 2)
