"""Algorithm 1 of the SMA-DP-SGD paper (arXiv 2605.20450), its ablations, and what it leaves open.

Where the paper is silent (norm layers, modules with several matrices, the refresh period, the
length of the warm-up) the tests hold what ALGORITHMS section 3 settles on.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.memory_helpers import (
    LOT,
    N,
    assert_close,
    hill,
    lot_of,
    normalised,
    simulate,
    sma_memory,
    train,
)
from vestige.methods import SMA, SMAFixed, SMAShuffled

BETA, BOUNDS, SIGMAS = 0.8, (0.05, 0.12), (0.9, 2.0)
FULL = SMA(beta=BETA, window=5, interval=(1.0, 1.5), tempering=0.4, ema=0.4, warmup=3.0)
OPTIONS = {"max_grad_norm": BOUNDS, "group_noise_multipliers": SIGMAS}
PARTS = (slice(0, 48), slice(48, 75))  # of the MLP: 5 x 8 + 8 and 8 x 3 + 3 numbers


def exponents(weights):
    """rho of the MLP's two layers, from its flat weights."""
    return hill(weights[:40].view(8, 5)), hill(weights[48:72].view(3, 8))


def branch_of(method, rho_of, past, weights):
    if not past:
        return torch.zeros_like(weights)
    pairs = zip(PARTS, rho_of(weights), strict=True)
    states = [sma_memory([r[part] for r in past], rho, method).state for part, rho in pairs]
    return (1 - BETA) * torch.cat(states)


CASES = {
    "sma": (FULL, exponents),
    "one lag": (replace(FULL, window=2), exponents),
    "generous cap": (replace(FULL, norm_cap=5.0, ema=0.9), exponents),
    "no tempering": (replace(FULL, interval=(0.0, 1e6)), exponents),
    "shuffled": (SMAShuffled(**FULL.settings()), lambda weights: exponents(weights)[::-1]),
    "spectrum ignored": (SMAFixed(**FULL.settings(), fixed=0.0), lambda weights: (None, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_algorithm_1_step_by_step(name):
    """Releases and weights of 20 steps are those of Algorithm 1, written out on its own."""
    method, rho_of = CASES[name]
    tape = train(method, 20, **OPTIONS)
    releases, weights = simulate(
        lambda past, weights: branch_of(method, rho_of, past, weights),
        20,
        BETA,
        clipping="per_layer",
        bounds=BOUNDS,
        stds=[s * c for s, c in zip(SIGMAS, BOUNDS, strict=True)],
    )
    for step, expected in zip(tape, releases, strict=True):
        assert_close(step.release, expected)
    assert_close(tape.weights, weights)


def test_algorithm_1_what_is_reported_is_what_was_used():
    """Every number of engine.diagnostics() is that of the equations, for the step just taken."""
    tape = train(FULL, 10, **OPTIONS)
    for t, step in enumerate(tape):
        facts = step.facts
        assert (facts["groups"], facts["step"], facts["beta"]) == (["0", "2"], t, BETA)
        for g, part in enumerate(PARTS):
            ratio = float(step.branch[part].norm() / step.release[part].norm())
            assert facts["memory_ratio"][g] == pytest.approx(ratio, abs=1e-12)
            if t == 0:
                assert (facts["rho"][g], facts["gate"][g], facts["scale"][g]) == (None, 0, 0)
                continue
            rho = exponents(step.weights)[g]
            expected = sma_memory([r[part] for r in tape.releases[:t]], rho, FULL)
            depth = sum(j * a for j, a in enumerate(expected.weights, 1))
            found = [facts[k][g] for k in ("rho", "deviation", "tempering", "depth")]
            assert_close(found, [rho, expected.d, expected.lam, depth])
            found = [facts[k][g] for k in ("gate", "scale", "warmup")]
            assert_close(found, [expected.gamma, expected.psi, expected.omega])
            assert_close(step.kernel(min(4, t), g), expected.weights)


def test_algorithm_1_is_a_filter_after_group_wise_dp_sgd():
    """ALGORITHMS 1.1: s~ = beta y + branch(s~), y the release of DP-SGD with sigma_g/beta."""
    tape = train(FULL, 12, **OPTIONS)
    forced = train(
        "dp-sgd",
        12,
        clipping="per_layer",
        max_grad_norm=BOUNDS,
        group_noise_multipliers=[s / BETA for s in SIGMAS],
        replay=tape.releases,
    )
    past = []
    for step, filtered in zip(forced, tape, strict=True):
        past.append(BETA * step.drawn + branch_of(FULL, exponents, past, step.weights))
        assert_close(past[-1], filtered.release)
    for (_, a), (_, b) in zip(forced.events, tape.events, strict=True):
        assert a == pytest.approx(b, rel=1e-14)


@pytest.mark.parametrize("warmup", [None, 0.5, 7])
def test_algorithm_1_line_4_the_warm_up(warmup):
    """omega_t = 1 - exp(-t/tau), tau in steps; None is one epoch, N / L steps."""
    tau = N // LOT if warmup is None else warmup
    for t, step in enumerate(train(replace(FULL, warmup=warmup), 9, **OPTIONS)):
        assert_close(step.facts["warmup"], [1 - math.exp(-t / tau)] * 2)


@pytest.mark.parametrize("refresh", [1, 3])
def test_algorithm_1_line_10_exponents_are_of_the_weights_of_the_step(refresh):
    """rho is estimated at t = 1 and whenever (t-1) % refresh = 0, and kept in between."""
    tape = train(replace(FULL, refresh=refresh), 9, **OPTIONS)
    assert tape[0].facts["rho"] == [None, None]
    for t, step in enumerate(tape.steps[1:], 1):
        estimated = t - (t - 1) % refresh
        assert_close(step.facts["rho"], exponents(tape[estimated].weights))
    assert len({step.facts["rho"][0] for step in tape.steps[1:]}) == math.ceil(8 / refresh)


class Pair(nn.Module):
    """Two matrices and a vector in one module: one group."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(9, 6))
        self.outer = nn.Parameter(torch.randn(5, 9))
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.inner)), self.outer, self.shift)


def mixed():
    """Groups of all kinds: a matrix, no matrix, two matrices."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = nn.Linear(5, 6), nn.LayerNorm(6), Pair(), nn.Linear(5, 3, bias=False)
        return nn.Sequential(*layers).double()


def test_section_3_a_norm_layer_takes_part_untempered_and_counts_in_g():
    """No matrix: lambda = 0, a branch of its own, and sigma_eff = sigma / (beta sqrt G)."""
    sigmas = [1.3] * 4
    tape = train(FULL, 6, model=mixed(), max_grad_norm=[0.1] * 4, group_noise_multipliers=sigmas)
    assert tape.engine.plan.group_names == ("0", "1", "2", "3")
    assert tape.events == [(LOT / N, pytest.approx(1.3 / (BETA * 2), rel=1e-14))] * 6
    part = tape.groups.segments()[1]
    for t, step in enumerate(tape.steps[1:], 1):
        expected = sma_memory([r[part] for r in tape.releases[:t]], None, FULL)
        assert step.facts["rho"][1] is None
        assert step.facts["deviation"][1] == step.facts["tempering"][1] == 0
        assert_close(step.kernel(min(4, t), 1), expected.weights)
        assert_close(step.branch[part], (1 - BETA) * expected.state)
        assert float(step.branch[part].norm()) > 1e-4


def test_section_3_a_group_with_several_matrices_takes_the_mean_of_their_exponents():
    """rho of a module with two matrices is the mean of the two; its vectors do not count."""
    tape = train(FULL, 4, model=mixed(), noise_multiplier=1.0)
    slots = [slot for slot in tape.groups.slots if slot.group == 2]
    assert [slot.parameter.ndim for slot in slots] == [2, 2, 1]
    for step in tape.steps[1:]:
        one, two = (hill(slot.view(step.weights)) for slot in slots[:2])
        assert abs(one - two) > 1e-3
        assert step.facts["rho"][2] == pytest.approx((one + two) / 2, rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shuffled_ablation_gives_every_layer_another_layers_exponent(seed):
    """A fixed permutation of the groups that have one, without a fixed point; none stays none."""
    shuffled = SMAShuffled(**FULL.settings(), shuffle_seed=seed)
    tape = train(shuffled, 5, model=mixed(), noise_multiplier=1.0)
    sources = set()
    for step in tape.steps[1:]:
        own: list[list[float]] = [[], [], [], []]
        for slot in tape.groups.slots:
            if slot.parameter.ndim == 2:
                own[slot.group].append(hill(slot.view(step.weights)))
        rho = {g: sum(found) / len(found) for g, found in enumerate(own) if found}
        given = step.facts["rho"]
        assert given[1] is None
        assert sorted(given[g] for g in rho) == pytest.approx(sorted(rho.values()), rel=1e-9)
        nearest = {g: min(rho, key=lambda k, g=g: abs(rho[k] - given[g])) for g in rho}
        assert all(g != source for g, source in nearest.items())
        sources.add(tuple(nearest.values()))
    assert len(sources) == 1


def test_the_fixed_ablation_tempers_every_layer_alike_and_reads_no_spectrum():
    """lambda is the given constant in every group, norm layers included, and rho is not read."""
    fixed = SMAFixed(**FULL.settings(), fixed=0.6)
    tape = train(fixed, 5, model=mixed(), noise_multiplier=1.0)
    for t, step in enumerate(tape):
        assert step.facts["tempering"] == [0.6] * 4
        assert step.facts["rho"] == [None] * 4
        lags = min(4, t)
        raw = [(j + 1) ** (FULL.alpha - 1) * math.exp(-0.6 * j) for j in range(1, lags + 1)]
        for g in range(4):
            assert_close(step.kernel(lags, g), normalised(raw))


def test_an_empty_lot_still_recalls_and_charges():
    """s_t = 0 where nobody was drawn: the release is branch and noise, at the same price."""
    tape = train(FULL, 12, **OPTIONS, sample_rate=0.02)
    empty = [t for t in range(1, 12) if not lot_of(t, 0.02)]
    assert empty
    for t in empty:
        assert not tape[t].sum.any()
        assert_close(tape[t].release, tape[t].branch + tape[t].noise)
        assert float(tape[t].branch.norm()) > 1e-4
    assert len(set(tape.events)) == 1
    assert len(tape.events) == 12
