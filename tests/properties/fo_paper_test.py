"""The claims of the FO-DP-SGD paper (arXiv 2605.09890), each as a test of the real code.

Lemmas B.1-B.2, theorems B.1-B.3 and propositions B.1-B.16, in the paper's order; Algorithm 1 itself
is in fo_algorithm_test.py. "Given the transcript" means that a second run is forced through the
releases of the first.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_helpers import (
    BOUND,
    LOT,
    RATE,
    ROUNDED,
    N,
    assert_close,
    clipped_sum,
    fo_kernel,
    fo_memory,
    fo_scores,
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
    train,
    transcripts,
    vectors,
)
from vestige.methods import FO, CurrentOnly, Exponential, Uniform
from vestige.privacy.ledger import Event

BETA, SIGMA, DELTA = 0.7, 1.3, 1e-5
FULL = FO(beta=BETA, window=5, tempering=0.2, inconsistency=0.4, min_scale=0.05, confidence=0.3)
MEMORIES = {
    "fo": FULL,
    "uniform": Uniform(beta=BETA, window=5),
    "exponential": Exponential(beta=BETA, window=5),
}


def raw_kernel(fo, past):
    """The rule's coefficients before they are normalised.

    With ema 1 the trend is the newest release itself: its score is 0 and its raw coefficient, by
    which the others are measured, 2^(alpha-1) e^-lambda whatever tau, nu and chi are.
    """
    assert fo.ema == 1
    weights = fo.rule(1).recall(history_of(past, fo.window, fo.ema).view()).weights[0]
    return weights / weights[0] * 2 ** (fo.alpha - 1) * math.exp(-fo.tempering)


# -- B.2: privacy -------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [RATE, 1.0])
def test_lemma_b1_one_record_moves_the_clipped_sum_by_at_most_c(rate):
    """For fixed weights and a fixed mask |s_t(D) - s_t(D')| <= C, and C is attained."""
    with_it = train("dp-sgd", 8, lr=0.0, sample_rate=rate)
    without = train("dp-sgd", 8, lr=0.0, sample_rate=rate, data=neighbour())
    moved = [float((a.sum - b.sum).norm()) for a, b in zip(with_it, without, strict=True)]
    drawn = [N - 1 in lot_of(t, rate) for t in range(8)]
    assert any(drawn)
    for distance, included in zip(moved, drawn, strict=True):
        assert distance <= BOUND * ROUNDED
        assert (distance >= 0.99 * BOUND) if included else (distance == 0)


def test_lemma_b1_below_the_bound_a_record_moves_the_sum_by_its_own_gradient():
    """Where nothing is clipped the difference is the removed record's gradient, not C."""
    with_it = train("dp-sgd", 1, max_grad_norm=100.0, sample_rate=1.0)
    without = train("dp-sgd", 1, max_grad_norm=100.0, sample_rate=1.0, data=neighbour())
    last = tuple(column[-1:] for column in records().tensors)
    own = clipped_sum(with_it[0].weights, last, with_it.groups, (100.0,))
    assert_close(with_it[0].sum - without[0].sum, own)


@pytest.mark.parametrize("name", MEMORIES)
def test_proposition_b1_given_the_transcript_only_the_scaled_sum_is_new(name):
    """Under one transcript weights and branch are the same on any data; r differs by beta s."""
    first = train(MEMORIES[name], sample_rate=1.0)
    other = train(MEMORIES[name], sample_rate=1.0, data=records(17, 5), replay=first.releases)
    for a, b in zip(first, other, strict=True):
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.branch, b.branch)
        assert not torch.equal(a.sum, b.sum)
        assert_close(a.query - b.query, BETA * (a.sum - b.sum))
    assert [s.silent for s in first] == [True] + [False] * 7


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("rate", [RATE, 1.0])
def test_theorem_b1_one_record_moves_the_query_by_at_most_beta_c(name, rate):
    """Given transcript and mask |r_t(D) - r_t(D')| <= beta C, and beta C is attained."""
    here, there = replayed_pair(MEMORIES[name], sample_rate=rate)
    moved = [float((a.query - b.query).norm()) for a, b in zip(here, there, strict=True)]
    assert max(moved) <= BETA * BOUND * ROUNDED
    for t, distance in enumerate(moved):
        included = N - 1 in lot_of(t, rate)
        assert (distance >= 0.99 * BETA * BOUND) if included else (distance == 0)


def test_proposition_b2_the_memory_is_in_the_query_and_the_noise_comes_after_it():
    """From step 1 on r_t has a part that is no function of s_t, and s~_t - r_t is fresh noise."""
    tape = train(FULL, noise_multiplier=SIGMA)
    plain = train("dp-sgd", noise_multiplier=SIGMA)
    for t, (step, other) in enumerate(zip(tape, plain, strict=True)):
        assert_close(step.noise, SIGMA * BOUND * normals(t, step.sum))
        assert_close(step.noise, other.noise)
        assert_close(other.query, other.sum)
        assert_close(step.query, BETA * step.sum + step.branch)
        assert float((step.query - BETA * step.sum).norm()) > (0.01 if t else -1)


def test_proposition_b2_qualified_it_is_a_filter_after_dp_sgd_at_sigma_over_beta():
    """ALGORITHMS 1.1: s~ = beta y + (1-beta) u(s~) with y the release of DP-SGD(sigma/beta)."""
    tape = train(FULL, 12, noise_multiplier=SIGMA)
    past = []
    forced = train("dp-sgd", 12, noise_multiplier=SIGMA / BETA, replay=tape.releases)
    for step, filtered in zip(forced, tape, strict=True):
        memory = fo_memory(past, FULL)
        past.append(BETA * step.drawn + (1 - BETA) * memory)
        assert_close(past[-1], filtered.release)
    assert forced.engine.ledger.events == tape.engine.ledger.events


@pytest.mark.parametrize("name", MEMORIES)
def test_theorem_b2_a_step_is_charged_as_one_subsampled_gaussian_at_sigma_over_beta(name):
    """The noise drawn, over the distance that a record moves the query, is what is charged."""
    sampled = train(MEMORIES[name], sample_rate=0.3, noise_multiplier=2.0)
    assert sampled.events == [(0.3, 2.0 / BETA)] * 8
    here, there = replayed_pair(MEMORIES[name], sample_rate=1.0, noise_multiplier=2.0)
    for t, (a, b) in enumerate(zip(here, there, strict=True)):
        std = float(a.noise.norm() / normals(t, a.sum).norm())
        charged = here.events[t][1]
        assert charged == 2.0 / BETA
        assert 1 / ROUNDED <= std / float((a.query - b.query).norm()) / charged < 1.01


def test_theorem_b2_epsilon_of_one_step_is_the_papers():
    """One step costs eps_SGM(order; q, sigma/beta), converted as the paper does."""
    tape = train(FULL, 1, sample_rate=0.05, noise_multiplier=1.4)
    expected = papers_epsilon([(0.05, 1.4 / BETA)], DELTA)
    assert tape.engine.get_epsilon(DELTA, "rdp_classic") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("beta", [0.4, 0.9])
def test_theorem_b3_the_steps_compose(beta):
    """T steps cost min over orders of T eps_SGM(order; q, sigma/beta) + log(1/delta)/(order-1)."""
    tape = train(FO(beta=beta), 30, sample_rate=0.1, noise_multiplier=2.0)
    assert tape.engine.ledger.events == (Event(0.1, 2.0 / beta, 30),)
    expected = papers_epsilon([(0.1, 2.0 / beta)] * 30, DELTA)
    assert tape.engine.get_epsilon(DELTA, "rdp_classic") == pytest.approx(expected, rel=1e-9)


def test_theorem_b3_steps_that_differ_are_charged_one_by_one():
    """Equation 41: sum_t eps_SGM(order; q_t, sigma_t/beta_t) for public schedules of the step."""

    def beta(t):
        return 0.9 - 0.05 * t

    def sigma(t):
        return 1.5 + 0.1 * t

    def rate(t):
        return 0.04 + 0.01 * t

    tape = train(FO(beta=beta), 12, noise_multiplier=sigma, sample_rate=rate)
    expected = [(rate(t), sigma(t) / beta(t)) for t in range(12)]
    assert tape.events == expected
    for t, step in enumerate(tape):
        lot = lot_of(t, rate(t))
        assert torch.equal(step.rows[0], records().tensors[0][lot]) or not lot
        assert_close(step.noise, sigma(t) * BOUND * normals(t, step.sum))
        assert step.gain == beta(t)
        memory = fo_memory(tape.releases[:t], FO())
        assert_close(step.branch, (1 - beta(t)) * memory)
    spent = tape.engine.get_epsilon(DELTA, "rdp_classic")
    assert spent == pytest.approx(papers_epsilon(expected, DELTA), rel=1e-9)


# -- B.3: decomposition -------------------------------------------------------------------------


def test_lemma_b2_a_release_is_signal_and_inherited_memory_and_noise():
    """r = beta s + M_rec + M_noise, s~ = r + Z, g~ = s~/L, from s and Z alone."""
    tape = train(FULL, 12, noise_multiplier=SIGMA)
    queries, noises = [], []
    for t, step in enumerate(tape):
        weights = step.kernel(min(FULL.window, t + 1) - 1)
        recursive = (1 - BETA) * mixture(weights, queries or [step.sum])
        inherited = (1 - BETA) * mixture(weights, noises or [step.sum])
        queries.append(BETA * step.sum + recursive + inherited)
        noises.append(SIGMA * BOUND * normals(t, step.sum))
        assert_close(step.query, queries[-1])
        assert_close(step.release, queries[-1] + noises[-1])
        assert_close(step.gradient, (queries[-1] + noises[-1]) / (N * LOT / N))
    assert float(inherited.norm()) > 0.01


@given(transcripts(), st.integers(2, 8), st.floats(0.01, 1.0), st.floats(0, 50), st.floats(0, 50))
@properties
def test_proposition_b3_the_weights_are_convex(past, window, ema, tempering, inconsistency):
    """a_j >= 0 and sum_j a_j = 1: the memory never leaves the hull of the releases."""
    fo = FO(window=window, ema=ema, tempering=tempering, inconsistency=inconsistency)
    history = history_of(past, window, ema)
    recall = fo.rule(1).recall(history.view())
    weights = recall.weights[0]
    assert len(weights) == min(window - 1, len(past))
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert all(np.isfinite(value).all() for value in recall.facts.values())
    assert (recall.facts["confidence"] <= 1).all()
    branch = history.mix(0.1 * recall.weights).values
    kept = torch.stack(past[-len(weights) :])
    assert (branch <= 0.1 * kept.max(0).values + 1e-12 * kept.abs().max()).all()
    assert (branch >= 0.1 * kept.min(0).values - 1e-12 * kept.abs().max()).all()
    assert float(branch.norm()) <= 0.1 * float(kept.norm(dim=1).max()) * (1 + 1e-12)
    assert 1 - 1e-12 <= recall.depth[0] <= len(weights) * (1 + 1e-12)


# -- B.4: tempering -----------------------------------------------------------------------------


@given(seeds, st.floats(0.05, 1), st.floats(0, 2), st.floats(0, 3), st.floats(0.01, 3))
@properties
def test_proposition_b4_coefficients_fall_with_tau(seed, alpha, tempering, tau, more):
    """a_j falls strictly in tau where chi nu > 0 and stays where nu = 0."""
    past = vectors(seed, 6)
    past[2] = past[-1]  # lag 4 equals the trend: nu = 0
    low, high = (
        FO(window=7, alpha=alpha, tempering=tempering, inconsistency=t, ema=1.0)
        for t in (tau, tau + more)
    )
    before, after = raw_kernel(low, past), raw_kernel(high, past)
    for lag in (2, 3, 5, 6):
        assert after[lag - 1] < before[lag - 1]
    # A score of 0 is a difference of inner products: it comes out as up to about 1e-8.
    assert after[3] == pytest.approx(before[3], rel=1e-6)
    assert before == pytest.approx(fo_kernel(past, low), rel=1e-6)


@given(seeds, st.floats(0.1, 5), st.floats(0.01, 5), st.floats(0, 3), st.integers(2, 5))
@properties
def test_proposition_b5_coefficients_fall_with_the_inconsistency(seed, far, more, tau, lag):
    """a_j falls strictly in nu_j where chi tau > 0, stays where tau = 0, no other a_k moves."""
    past, direction = vectors(seed, 5), vectors(seed + 1, 1)[0]
    fo = FO(window=6, ema=1.0, inconsistency=tau)
    found = []
    for distance in (far, far + more):
        past[-lag] = past[-1] + distance * direction
        found.append(raw_kernel(fo, past))
        assert found[-1] == pytest.approx(fo_kernel(past, fo), rel=1e-9)
    before, after = found
    assert after[lag - 1] <= before[lag - 1] * (1 + 1e-12)
    assert tau < 1e-6 or after[lag - 1] < before[lag - 1]
    others = np.arange(5) != lag - 1
    assert after[others] == pytest.approx(before[others], rel=1e-9)


@given(seeds, st.floats(1e-3, 1e3), st.floats(1.01, 1e3), st.floats(0, 3))
@properties
def test_proposition_b6_coefficients_fall_with_the_confidence(seed, zeta, ratio, tau):
    """a_j falls strictly in chi where tau nu > 0 and stays where tau = 0."""
    past = vectors(seed, 6)
    sure, unsure = (
        FO(window=7, ema=1.0, inconsistency=tau, confidence=z) for z in (zeta, zeta * ratio)
    )
    assert fo_scores(past, sure)[1] > fo_scores(past, unsure)[1]
    with_more, with_less = raw_kernel(sure, past), raw_kernel(unsure, past)
    assert (with_more <= with_less * (1 + 1e-12)).all()
    assert tau < 1e-6 or (with_more[1:] < with_less[1:]).all()
    assert with_more == pytest.approx(fo_kernel(past, sure), rel=1e-9)


def test_proposition_b7_beta_scales_sensitivity_and_signal_alike():
    """Under one transcript both |r(D) - r(D')| and the signal in r are proportional to beta."""
    past = train(FULL, sample_rate=1.0).releases
    runs = {}
    for beta in (0.2, 0.4, 0.8):
        method = FO(**(FULL.settings() | {"beta": beta}))
        data = (None, neighbour())
        runs[beta] = [train(method, sample_rate=1.0, data=d, replay=past) for d in data]
    for t in range(1, 8):
        states = []
        for beta, (here, there) in runs.items():
            moved = float((here[t].query - there[t].query).norm())
            assert 0.99 * beta * BOUND <= moved <= beta * BOUND * ROUNDED
            assert torch.equal(here[t].sum, runs[0.2][0][t].sum)
            states.append(here[t].branch / (1 - beta))
            assert_close(here[t].query - (1 - beta) * states[0], beta * here[t].sum)


# -- B.5: special cases and limits ----------------------------------------------------------------


def assert_kernel(fo, raw):
    """Every step of a run of `fo` has the weights raw(lag, facts), normalised."""
    for t, step in enumerate(train(fo, 10)):
        lags = min(fo.window, t + 1) - 1
        expected = normalised([raw(j, step.facts) for j in range(1, lags + 1)])
        assert step.kernel(lags) == pytest.approx(expected, rel=1e-12, abs=0)


def test_proposition_b8_tau_zero_is_the_tempered_power_law():
    """tau = 0: a_j = (j+1)^(alpha-1) e^(-lambda j)."""
    fo = FO(window=6, alpha=0.4, tempering=0.3, inconsistency=0.0)
    assert_kernel(fo, lambda j, _: (j + 1) ** -0.6 * math.exp(-0.3 * j))


def test_proposition_b9_lambda_and_tau_zero_is_the_raw_power_law():
    """lambda = tau = 0: a_j = (j+1)^(alpha-1)."""
    fo = FO(window=6, alpha=0.4, tempering=0.0, inconsistency=0.0)
    assert_kernel(fo, lambda j, _: (j + 1) ** -0.6)


@pytest.mark.parametrize(
    "method",
    [FO(beta=1.0), FO(beta=[1.0] * 8), Uniform(beta=1.0), Exponential(beta=1), CurrentOnly()],
    ids=["fo", "fo by schedule", "uniform", "exponential", "current-only"],
)
def test_proposition_b10_beta_one_is_dp_sgd(method):
    """beta = 1: r = s, and releases, gradients, weights and ledger are DP-SGD's, bit for bit."""
    tape, plain = train(method, noise_multiplier=SIGMA), train("dp-sgd", noise_multiplier=SIGMA)
    for t, (a, b) in enumerate(zip(tape, plain, strict=True)):
        assert a.silent
        assert a.gain == 1
        assert torch.equal(a.release, b.release)
        assert torch.equal(a.gradient, b.gradient)
        assert_close(a.gradient, (a.sum + SIGMA * BOUND * normals(t, a.sum)) / LOT)
    assert torch.equal(tape.weights, plain.weights)
    assert tape.engine.ledger.events == plain.engine.ledger.events == (Event(LOT / N, SIGMA, 8),)


def test_proposition_b11_window_one_is_a_scaled_release_without_memory():
    """K = 1: r = beta s; DP-SGD(sigma/beta) at beta times the rate; DP-SGD itself for beta = 1."""
    tape = train(FO(beta=BETA, window=1), noise_multiplier=SIGMA)
    for t, step in enumerate(tape):
        assert step.silent
        assert_close(step.release, BETA * step.sum + SIGMA * BOUND * normals(t, step.sum))
    scaled = train("dp-sgd", noise_multiplier=SIGMA / BETA, lr=0.5 * BETA)
    assert_close(tape.weights, scaled.weights)
    assert tape.engine.ledger.events == scaled.engine.ledger.events
    plain = train("dp-sgd", noise_multiplier=SIGMA)
    assert not torch.allclose(tape.weights, plain.weights)
    both = train(FO(beta=1.0, window=1), noise_multiplier=SIGMA)
    assert torch.equal(both.weights, plain.weights)


def test_proposition_b12_alpha_one_leaves_the_tempering_alone():
    """alpha = 1: a_j = exp(-(lambda + chi tau nu_j) j)."""
    fo = FO(window=6, alpha=1.0, tempering=0.1, inconsistency=0.5, confidence=0.2)

    def raw(j, facts):
        nu, chi = facts["inconsistency"][0][j - 1], facts["confidence"][0]
        return math.exp(-(0.1 + chi * 0.5 * nu) * j)

    assert_kernel(fo, raw)


def limit_errors(confidences, limit):
    """How far the weights are from their limit as the confidence parameter runs."""
    past, errors = vectors(3, 6), []
    for zeta in confidences:
        fo = FO(window=7, alpha=0.6, tempering=0.2, inconsistency=0.5, confidence=zeta)
        weights = fo.rule(1).recall(history_of(past, 7, fo.ema).view()).weights[0]
        expected = normalised([limit(j, nu) for j, nu in enumerate(fo_scores(past, fo)[0], 1)])
        errors.append(float(np.abs(weights - expected).max()))
    return errors


def test_proposition_b13_without_confidence_the_inconsistency_has_no_effect():
    """chi -> 0: a_j -> (j+1)^(alpha-1) e^(-lambda j), reached where the trend is 0."""

    def limit(j, _):
        return (j + 1) ** -0.4 * math.exp(-0.2 * j)

    errors = limit_errors([10.0**k for k in range(13)], limit)
    assert errors[0] > 0.01
    assert errors[-1] < 1e-11
    assert errors == sorted(errors, reverse=True)
    vector = vectors(3, 1)[0]
    past = [vector, -vector, torch.zeros_like(vector)]
    fo = FO(window=7, alpha=0.6, tempering=0.2, inconsistency=5.0, ema=0.5)
    recall = fo.rule(1).recall(history_of(past, 7, 0.5).view())
    assert recall.facts["confidence"][0] == 0
    assert recall.facts["inconsistency"][0].max() > 1e5
    assert_close(recall.weights[0], normalised([limit(j, None) for j in range(1, 4)]))


def test_proposition_b14_with_full_confidence_the_inconsistency_has_all_its_effect():
    """chi -> 1: a_j -> (j+1)^(alpha-1) exp(-(lambda + tau nu_j) j)."""

    def limit(j, nu):
        return (j + 1) ** -0.4 * math.exp(-(0.2 + 0.5 * nu) * j)

    errors = limit_errors([10.0**-k for k in range(13)], limit)
    assert errors[0] > 0.01
    assert errors[-1] < 1e-11
    assert errors == sorted(errors, reverse=True)


def test_proposition_b15_without_beta_the_query_is_the_memory():
    """beta -> 0 under one transcript: r_t -> u_(t-1), at a distance proportional to beta."""
    past = train(FULL, sample_rate=1.0).releases
    for beta in (1e-2, 1e-5, 1e-9):
        method = FO(**(FULL.settings() | {"beta": beta}))
        for t, step in enumerate(train(method, sample_rate=1.0, replay=past)):
            memory = fo_memory(past[:t], FULL)
            assert_close((step.query - memory) / beta, step.sum - memory, 1e-6)
            assert float((step.query - memory).norm()) <= 10 * beta


def test_proposition_b16_at_full_participation_the_sum_is_over_all_records():
    """q -> 1: s_t -> sum of all clipped gradients, and the query its counterpart at q = 1."""
    full = train(FULL, sample_rate=1.0)
    for step in full:
        whole = clipped_sum(step.weights, records().tensors, full.groups, (BOUND,))
        assert_close(step.sum, whole)
    missing = []
    for rate in (0.3, 0.9, 1 - 1e-12):
        near = train(FULL, sample_rate=rate, replay=full.releases)
        missing.append(sum(N - len(lot_of(t, rate)) for t in range(8)))
        for t, (a, b) in enumerate(zip(near, full, strict=True)):
            absent = N - len(lot_of(t, rate))
            assert float((a.query - b.query).norm()) <= BETA * BOUND * absent * ROUNDED
            assert torch.equal(a.query, b.query) == (absent == 0)
    assert missing[0] > missing[1] > missing[2] == 0
