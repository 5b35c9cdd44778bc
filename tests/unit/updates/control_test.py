"""Clip bounds that move: quantile clipping, ADP-AdamW's schedule, DP-Adam-AC and its private form.

Sums and counts are those of a loop over examples, bounds and learning rates those of a recursion of
a few lines, the noise is drawn again from its streams: 20 steps in float64, to 1e-9. Distribution
tests accept the right noise but for one run in 10^8 (see release_test.py).
"""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.noise_law import FALSE_ALARM, assert_noise
from tests.support.small_runs import LOT, SIGMA, STEPS, N, closure_of, flat, net, private, run
from tests.support.two_looks import (
    SEED,
    SEGMENTS,
    clipped_sum,
    close,
    gradients,
    lots,
    normals,
    sgd,
    watch,
)
from vestige import ConfigError, PrivacyEngine
from vestige.gradients.clipping import Quantile
from vestige.gradients.groups import partition
from vestige.methods import ADPAdamW, Disk, DPAdamAC, DPAdamACPrivate, DPSAMPerExample
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door
from vestige.sampling.streams import COUNTS, Randomness

C = 1.5


@pytest.fixture
def seen(monkeypatch):
    return watch(monkeypatch)


def count_of(rows, bounds, segments):
    """sum_i (1[|g_i| <= C] - 1/2) over g_i != 0 by group; what is not finite is not within."""
    found = [0.0] * len(bounds)
    for row in rows:
        for g, (at, bound) in enumerate(zip(segments, bounds, strict=True)):
            length = float(row[at].norm())
            if length != 0:
                found[g] += 0.5 if math.isfinite(length) and length <= bound else -0.5
    return found


def count_noise(step, groups, seed=SEED):
    return Randomness(seed).normals(COUNTS, step, groups)


def next_bounds(bounds, counts, rule, lot=LOT):
    """C exp(-rate (f - target)), f = count / L + 1/2 within [0, 1]; and the fractions."""
    fractions = [min(1.0, max(0.0, count / lot + 0.5)) for count in counts]
    moved = [
        c * math.exp(-rule.rate * (f - rule.target)) for c, f in zip(bounds, fractions, strict=True)
    ]
    return [min(max(c, rule.lowest), rule.highest) for c in moved], fractions


# -- quantile clipping ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "options", "multipliers"),
    [
        ("flat", {}, None),
        ("flat", {"target": 0.3, "rate": 0.6, "count_noise": 1.5}, None),
        ("per_layer", {}, None),
        ("per_layer", {"target": 0.8, "rate": 0.4, "count_noise": 0.7}, None),
        ("per_layer", {"rate": 0.5}, (1.1, 2.3)),
    ],
)
def test_quantile_clipping_is_its_recursion(groups, options, multipliers, seen):
    """Counts, bounds, the sum clipped at them and the noise in units of them, step by step."""
    rule, at = Quantile(groups, **options), SEGMENTS[groups]
    start = [C] if groups == "flat" else [0.3, 0.7]
    engine, model, optimizer, loader = private(
        "dp-sgd",
        sgd(),
        clipping=rule,
        max_grad_norm=start,
        noise_multiplier=None if multipliers else SIGMA,
        group_noise_multipliers=multipliers,
    )
    theta, bounds, sigma_b = flat(model.parameters()), start, rule.count_noise or LOT / 20
    assert engine.plan.count_noise == sigma_b
    mixed = 0  # lots with examples on both sides of a bound
    for t, (x, y, lot) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        rows = gradients(theta, *lot)
        assert seen.bounds[t] == pytest.approx(bounds, rel=1e-12)
        assert close(seen.sums[t], clipped_sum(rows, bounds, at))
        assert seen.counts[t] == count_of(rows, bounds, at)
        stds = [SIGMA * math.hypot(*bounds)] * len(at)
        if multipliers:
            stds = [s * c for s, c in zip(multipliers, bounds, strict=True)]
        assert seen.stds[t] == pytest.approx(stds, rel=1e-12)
        for segment, std in zip(at, stds, strict=True):
            noise = (seen.values[t] - seen.sums[t])[segment]
            assert close(noise, std * normals(t)[segment])
        noisy = seen.counts[t] + sigma_b * count_noise(t, len(at))
        assert seen.noisy_counts[t] == pytest.approx(list(noisy), abs=1e-12)
        theta = theta - 0.3 * seen.values[t] / LOT
        assert close(flat(model.parameters()), theta)
        bounds, fractions = next_bounds(bounds, noisy, rule)
        control = engine.parts["clip"]
        assert control.bounds == pytest.approx(bounds, rel=1e-12)
        assert control.fractions == pytest.approx(fractions, abs=1e-12)
        mixed += any(abs(c) < len(rows) / 2 for c in seen.counts[t])
    assert mixed > 3 and len({b for b, *_ in seen.bounds}) == STEPS
    own = sum(1 / sigma**2 for sigma in multipliers or (SIGMA,))
    (event,) = engine.ledger.events
    assert event.noise_multiplier == pytest.approx((own + len(at) / (2 * sigma_b) ** 2) ** -0.5)


@pytest.mark.parametrize("method", [DPSAMPerExample(0.4), Disk(ahead=0.5)], ids=str)
def test_methods_with_two_passes_count_what_they_clip(method, seen):
    """Every example once, by the norm of the vector that enters the sum."""
    engine, model, optimizer, loader = private(method, sgd(), clipping="quantile", max_grad_norm=C)
    home, before = flat(model.parameters()), None
    for t, (x, y, lot) in enumerate(lots(engine, loader, 6)):
        optimizer.step(closure_of(model, optimizer, x, y))
        here = gradients(home, *lot)
        if isinstance(method, DPSAMPerExample):
            moved = [
                gradients(home + 0.4 * g / g.norm(), lot[0][i : i + 1], lot[1][i : i + 1])
                for i, g in enumerate(here)
            ]
            u = torch.cat(moved) if moved else here
        else:
            d = 0.0 if before is None else home - before
            u = method.weight * gradients(home + 0.5 * d, *lot) + (1 - method.weight) * here
        assert seen.counts[t] == count_of(u, seen.bounds[t], SEGMENTS["flat"])
        assert close(seen.sums[t], clipped_sum(u, seen.bounds[t], SEGMENTS["flat"]))
        before, home = home, flat(model.parameters())


def test_two_looks_at_a_lot_count_once_uphill(seen):
    engine, model, optimizer, loader = private("dp-sam", clipping="quantile", max_grad_norm=C)
    home = flat(model.parameters())
    for x, y, lot in lots(engine, loader, 6):
        optimizer.step(closure_of(model, optimizer, x, y))
        look = seen.looks[-1][1]
        uphill = gradients(home + 0.05 * look / look.norm(), *lot)
        assert seen.counts[-1] == count_of(uphill, seen.bounds[-1], SEGMENTS["flat"])
        home = flat(model.parameters())


def test_examples_that_are_not_finite_count_as_clipped(seen):
    """They add nothing to the sum and -1/2 to the count, whatever else is in the lot."""
    engine, model, optimizer, loader = private(
        "dp-sgd", sgd(0.0), clipping="quantile_per_layer", max_grad_norm=C
    )
    broken, theta, met = loader.dataset.tensors[0], flat(model.parameters()), 0
    broken[:6] = torch.tensor([math.nan, math.inf, -math.inf, 1e200, 1.0, math.nan])[:, None]
    for t, (x, y, lot) in enumerate(lots(engine, loader, 12)):
        optimizer.step(closure_of(model, optimizer, x, y))
        rows, bounds = gradients(theta, *lot), seen.bounds[t]
        met += int((~rows.isfinite().all(1)).sum())
        assert seen.counts[t] == count_of(rows, bounds, SEGMENTS["per_layer"])
        assert close(seen.sums[t], clipped_sum(rows, bounds, SEGMENTS["per_layer"]))
        assert all(math.isfinite(c) for c in engine.parts["clip"].bounds)
    assert met > 5


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("treated", ["zeroed out", "removed"])
@pytest.mark.parametrize("norm", [0.5, 1.0, 1.5, 1e200, math.nan, math.inf])
def test_one_record_moves_the_count_by_a_half_whichever_way_it_is_treated(
    norm, treated, physical, seen
):
    """Zeroed out, as a shared ledger may claim, a record's gradient is zero and its place stays."""
    others = [0.3, 0.0, 2.0, 1e300, math.nan]
    neighbour = [*others, 0.0] if treated == "zeroed out" else others
    for norms in ([*others, norm], neighbour):
        made = known_norms(
            norms, 5, Quantile(), sample_rate=1.0, dataset_size=5, max_physical_batch_size=physical
        )
        follow(*made, 10 if physical else 1)  # the batches of one lot
    (first,), (second,) = seen.counts
    assert abs(first - second) == 0.5


@pytest.mark.parametrize("clipping", ["quantile", "quantile_per_layer"])
def test_counts_of_physical_batches_add_up(clipping, seen):
    whole = private("dp-sgd", sgd(), clipping=clipping, max_grad_norm=C)
    pieces = private("dp-sgd", sgd(), clipping=clipping, max_grad_norm=C, max_physical_batch_size=2)
    run(*whole)
    run(*pieces)
    assert seen.counts[:STEPS] == seen.counts[STEPS:]
    assert seen.noisy_counts[:STEPS] == seen.noisy_counts[STEPS:]
    assert seen.bounds[:STEPS] == seen.bounds[STEPS:]
    assert close(flat(whole[1].parameters()), flat(pieces[1].parameters()))


def test_an_empty_lot_counts_nobody_and_its_bound_follows_the_noise(seen):
    rule = Quantile(target=0.7, rate=0.5)
    engine, *rest = private("dp-sgd", clipping=rule, sample_rate=1e-12, max_grad_norm=C)
    run(engine, *rest, 10)
    bounds = [C]
    for t in range(10):
        assert seen.counts[t] == [0.0]
        assert seen.bounds[t] == pytest.approx(bounds, rel=1e-12)
        bounds, _ = next_bounds(bounds, LOT / 20 * count_noise(t, 1), rule)


def known_norms(norms, batch_size, rule, noise_seed=3, **options):
    """A run whose example i has the gradient norms[i] e_i whatever the weights, without a move."""
    size = len(norms)
    model = nn.Linear(size, 1, bias=False).double()
    x = torch.diag(torch.as_tensor(norms, dtype=torch.float64))
    engine = PrivacyEngine("rdp", noise_seed=noise_seed)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, torch.zeros(size)), batch_size=batch_size),
        clipping=rule,
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options,
    )
    return engine, *made


def follow(engine, model, optimizer, loader, steps):
    """The bound after every step."""
    found = []
    for x, _ in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        engine.backward(model(x).squeeze(1))
        optimizer.step()
        found.append(engine.parts["clip"].bounds[0])
    return found


@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.01, 30.0])
def test_the_bound_settles_at_the_target_quantile(target, start):
    """Norms from 0.1 to 10 in equal ratios: the share below the settled bound is the target.

    Within 0.04 of it. Over 40 seeds the share had a standard deviation of 0.008 and was at most
    0.01 nearer to the ends of its range, where fractions are cut off. The seed is fixed.
    """
    norms = np.geomspace(0.1, 10, 60)
    rule = Quantile(target=target, rate=0.2)
    made = known_norms(norms, 15, rule, max_grad_norm=start)
    bounds = follow(*made, 400)
    settled = math.exp(np.mean(np.log(bounds[100:])))
    share = float(np.interp(math.log(settled), np.log(norms), np.linspace(0, 1, 60)))
    assert share == pytest.approx(target, abs=0.04)


def test_the_bound_stays_within_its_range():
    up = Quantile(target=0.99, rate=3.0, lowest=0.5, highest=1.7)
    bounds = follow(*known_norms([50.0] * 12, 4, up), 12)
    assert bounds[-1] == 1.7 == max(bounds)
    down = Quantile(target=0.01, rate=3.0, lowest=0.5, highest=1.7)
    bounds = follow(*known_norms([0.001] * 12, 4, down), 12)
    assert bounds[-1] == 0.5 == min(bounds)


def test_the_bounds_are_saved_and_continue_bit_for_bit():
    made = [
        private("dp-sgd", clipping="quantile_per_layer", max_grad_norm=[0.3, 0.7]) for _ in range(3)
    ]
    run(*made[0], 13)
    run(*made[1], 6)
    buffer = io.BytesIO()
    torch.save([made[1][0].state_dict(), made[1][1].state_dict()], buffer)
    buffer.seek(0)
    state, weights = torch.load(buffer, weights_only=True)
    assert state["clip"]["bounds"] == list(made[1][0].parts["clip"].bounds)
    engine, model, *rest = made[2]
    for bad in (None, {"bounds": [1.0]}, {"bounds": [1.0, -1.0]}, {"bounds": [1.0, math.nan]}):
        with pytest.raises(ConfigError, match=r"saved clip (control does not fit|bounds)"):
            engine.load_state_dict(state | {"clip": bad})
    engine.load_state_dict(state)
    model.load_state_dict(weights)
    run(engine, model, *rest, 7)
    assert engine.parts["clip"].bounds == made[0][0].parts["clip"].bounds
    assert torch.equal(flat(model.parameters()), flat(made[0][1].parameters()))


def test_counts_have_their_own_noise_and_the_sum_keeps_its_own():
    """4000 releases under a secret key: N(0, count_noise^2) on each of two counts, and no
    correlation with each other, with the sum's noise, or with the counts of the step before."""
    groups = partition(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), "per_layer")
    sigma_b, draws = 2.5, 4000
    door = Door(groups, NoiseScale.shared(1.0), Randomness(), Ledger(), count_noise=sigma_b)
    exact = torch.tensor([3.0, -1.5], dtype=torch.float64)
    counts, sums = [], []
    for _ in range(draws):
        out = door.release(ClippedSum(groups.buffer(), (0.6, 0.8), exact), 0.1)
        counts.append(np.array(out.counts) - [3.0, -1.5])
        sums.append(out.values.double().numpy().copy())
    counts, sums = np.array(counts).T, np.array(sums).T
    for one in counts:
        assert_noise(one, sigma_b)
    for one in sums:
        assert_noise(one, 1.0)
    pairs = [(counts[0], counts[1]), *itertools.product(counts, sums)]
    pairs += [(one[1:], one[:-1]) for one in counts] + [
        (c[1:], s[:-1]) for c in counts for s in sums
    ]
    most = stats.norm.isf(FALSE_ALARM / len(pairs) / 2) / math.sqrt(draws)
    assert all(abs(np.corrcoef(a, b)[0, 1]) < most for a, b in pairs)


def test_counts_without_noise_are_charged_as_no_privacy():
    engine, *rest = private("dp-sgd", clipping=Quantile(count_noise=0.0))
    run(engine, *rest, 2)
    assert engine.get_epsilon(1e-5) == math.inf
    assert [e.noise_multiplier for e in engine.ledger.events] == [0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, r"target=0.0 must be strictly between 0 and 1"),
        ({"target": 1}, r"target=1 must be strictly"),
        ({"target": "half"}, r"target='half'"),
        ({"rate": 0.0}, r"rate=0.0 must be above 0"),
        ({"rate": 10.5}, r"rate=10.5 must be above 0 and at most 10"),
        ({"rate": math.nan}, r"rate=nan"),
        ({"count_noise": -1.0}, r"count_noise=-1.0 must be zero or a positive"),
        ({"count_noise": math.inf}, r"count_noise=inf"),
        ({"count_noise": True}, r"count_noise=True"),
        ({"lowest": 0.0}, r"lowest=0.0 and highest=1000000.0 must be positive"),
        ({"lowest": 2.0, "highest": 1.0}, r"lowest=2.0 and highest=1.0 .* in order"),
        ({"highest": math.inf}, r"highest=inf"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Quantile(**options)


def test_bounds_follow_releases_only():
    engine, *_ = private("dp-sgd", clipping="quantile")
    control = engine.parts["clip"]
    with pytest.raises(TypeError, match="releases only, not a Tensor"):
        control.released(torch.zeros(3), None)


# -- a schedule of the bound ----------------------------------------------------------------


def adamw(theta, lr_of, gradients_of, steps, decay=0.01, b1=0.9, b2=0.999):
    """torch's AdamW, by hand; yields the weights after every step."""
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for t in range(steps):
        g, lr = gradients_of(t), lr_of(t)
        theta = theta * (1 - lr * decay)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        root = (v / (1 - b2 ** (t + 1))).sqrt() + 1e-8
        theta = theta - lr * (m / (1 - b1 ** (t + 1))) / root
        yield theta


@pytest.mark.parametrize(("start", "clip_start"), [(2.0, 3.0), (1.0, 0.25), (4.0, 1.0)])
def test_adp_adamw_clips_and_noises_by_its_schedules(start, clip_start, seen):
    """C_t = C clip_start^(1 - t/(T-1)) bounds the sum and scales its noise of sigma_t C_t."""
    engine, model, optimizer, loader = private(
        ADPAdamW(start, clip_start),
        lambda p: torch.optim.AdamW(p, lr=0.02),
        steps=STEPS,
        max_grad_norm=C,
    )
    first = flat(model.parameters())
    ours = adamw(first, lambda _: 0.02, lambda t: seen.values[t] / LOT, STEPS)
    theta = first
    for t, (x, y, lot) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        left = 1 - t / (STEPS - 1)
        bound, sigma = C * clip_start**left, SIGMA * start**left
        assert seen.bounds[t] == pytest.approx([bound], rel=1e-12)
        assert close(seen.sums[t], clipped_sum(gradients(theta, *lot), [bound], SEGMENTS["flat"]))
        assert close(seen.values[t], seen.sums[t] + sigma * bound * normals(t))
        theta = next(ours)
        assert close(flat(model.parameters()), theta)
    charged = [e.noise_multiplier for e in engine.ledger.events for _ in range(e.count)]
    expected = [SIGMA * start ** (1 - t / (STEPS - 1)) for t in range(STEPS)]
    assert charged == pytest.approx(expected, rel=1e-12)
    assert seen.bounds[-1] == pytest.approx([C], rel=1e-12)


def test_the_plan_of_a_schedule_has_the_bound_and_noise_of_the_first_step():
    """As the docstring of PrivacyPlan says."""
    engine, *_ = private(ADPAdamW(2.0, 4.0), steps=3, max_grad_norm=C)
    assert engine.plan.bounds == pytest.approx([4 * C])
    assert engine.plan.noise_stds[0] == pytest.approx([2 * SIGMA * 4 * C])


def test_a_schedule_of_the_bound_holds_its_last_value_and_goes_with_no_other():
    engine, *rest = private(ADPAdamW(1.0, 4.0), steps=3, max_grad_norm=C)
    with pytest.warns(UserWarning, match="beyond the 3 steps"):
        run(engine, *rest, 5)
    assert engine.parts["clip"].bounds == (C,)
    with pytest.raises(ConfigError, match="has a schedule of its clip bound"):
        private(ADPAdamW(1.0, 4.0), steps=3, clipping="quantile")
    for bad in (0.0, -1.0, math.nan, "x"):
        with pytest.raises(ConfigError, match="clip_start="):
            ADPAdamW(clip_start=bad)


# -- DP-Adam-AC -----------------------------------------------------------------------------


def next_multiplier(multiplier, clipped, target, band):
    if clipped < target - band:
        return min(2.0, multiplier * 1.01)
    return max(0.1, multiplier * 0.995) if clipped > target + band else multiplier


def percentile(numbers, share):
    """The quantile with linear interpolation between order statistics."""
    ordered = sorted(numbers)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("window", [7, 1000])
def test_dp_adam_ac_follows_raw_norms_and_has_no_guarantee(window, seen):
    target, band, lowest, highest = 0.4, 0.15, 0.35, 3.0
    engine, model, optimizer, loader = private(
        DPAdamAC(target, band, window, lowest, highest),
        lambda p: torch.optim.AdamW(p, lr=0.02),
        max_grad_norm=C,
    )
    theta, bound, norms, rates = flat(model.parameters()), C, [], [1.0]
    ours = adamw(theta, lambda t: 0.02 * rates[t], lambda t: seen.values[t] / LOT, STEPS)
    for t, (x, y, lot) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        rows = gradients(theta, *lot)
        assert seen.bounds[t] == pytest.approx([bound], rel=1e-9)
        assert close(seen.sums[t], clipped_sum(rows, [bound], SEGMENTS["flat"]))
        assert close(seen.values[t], seen.sums[t] + SIGMA * bound * normals(t))
        theta = next(ours)
        assert close(flat(model.parameters()), theta)
        lengths = rows.norm(dim=1).tolist()
        clipped = sum(n > bound for n in lengths) / len(lengths) if lengths else 0.0
        norms = (norms + lengths)[-window:]
        if norms:
            bound = min(max(percentile(norms, 1 - target), lowest), highest)
        rates.append(next_multiplier(rates[-1], clipped, target, band))
        assert engine.parts["rate"].multiplier == pytest.approx(rates[-1], rel=1e-12)
        assert optimizer.param_groups[0]["lr"] == 0.02
    steps = [b / a for a, b in itertools.pairwise(rates)]
    assert min(steps) < 1 < max(steps)
    assert len({b for (b,) in seen.bounds}) > 10
    assert engine.get_epsilon(1e-5) == math.inf
    assert [e.noise_multiplier for e in engine.ledger.events] == [0.0]
    assert any("no guarantee" in caveat for caveat in engine.caveats())


def test_dp_adam_ac_passes_over_empty_lots_and_numbers_that_are_none(seen):
    engine, *rest = private("dp-adam-ac", sample_rate=1e-12, max_grad_norm=C)
    run(engine, *rest, 4)
    assert seen.bounds == [(C,)] * 4
    engine, model, optimizer, loader = private("dp-adam-ac", max_grad_norm=C, sample_rate=1.0)
    loader.dataset.tensors[0][:20] = math.nan
    run(engine, model, optimizer, loader, 1)
    theta = flat(net().parameters())
    lengths = gradients(theta, *(t[20:] for t in loader.dataset.tensors)).norm(dim=1).tolist()
    assert engine.parts["clip"].bounds[0] == pytest.approx(percentile(lengths, 0.8))


def test_dp_adam_ac_private_follows_noisy_counts(seen):
    """Bound and rate from the noisy fraction of the unclipped; schedulers see their own rate."""
    target, band, base = 0.3, 0.1, 0.02
    method = DPAdamACPrivate(target, band)
    rule = method.clipping
    assert (rule.target, rule.rate, rule.lowest, rule.highest) == (0.7, 0.2, 0.1, 10.0)
    engine, model, optimizer, loader = private(
        method,
        lambda p: torch.optim.AdamW(p, lr=base),
        max_grad_norm=C,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    theta, bounds, rates = flat(model.parameters()), [C], [1.0]
    ours = adamw(theta, lambda t: base * 0.9**t * rates[t], lambda t: seen.values[t] / LOT, STEPS)
    for t, (x, y, lot) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(base * 0.9**t, rel=1e-12)
        scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([base * 0.9 ** (t + 1)], rel=1e-12)
        rows = gradients(theta, *lot)
        assert seen.bounds[t] == pytest.approx(bounds, rel=1e-12)
        assert close(seen.sums[t], clipped_sum(rows, bounds, SEGMENTS["flat"]))
        assert close(seen.values[t], seen.sums[t] + SIGMA * bounds[0] * normals(t))
        theta = next(ours)
        assert close(flat(model.parameters()), theta)
        noisy = count_of(rows, bounds, SEGMENTS["flat"]) + LOT / 20 * count_noise(t, 1)
        assert seen.noisy_counts[t] == pytest.approx(list(noisy), abs=1e-12)
        bounds, (fraction,) = next_bounds(bounds, noisy, rule)
        rates.append(next_multiplier(rates[-1], 1 - fraction, target, band))
        assert engine.parts["rate"].multiplier == pytest.approx(rates[-1], rel=1e-12)
    steps = [b / a for a, b in itertools.pairwise(rates)]
    assert min(steps) < 1 < max(steps)
    (event,) = engine.ledger.events
    assert event.noise_multiplier == pytest.approx(1 / math.hypot(1 / SIGMA, 10 / LOT))
    assert (event.sample_rate, event.count) == (LOT / N, STEPS)


def test_a_step_that_fails_leaves_the_learning_rate_as_it_was():
    engine, model, optimizer, loader = private("dp-adam-ac-private")
    run(engine, model, optimizer, loader, 3)
    rate = optimizer.param_groups[0]["lr"]
    assert engine.parts["rate"].multiplier != 1

    def fails(*_):
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        run(engine, model, optimizer, loader, 1)
    hook.remove()
    engine.abandon_lot()
    assert optimizer.param_groups[0]["lr"] == rate  # a checkpoint would keep it


def test_the_multiplier_stays_within_its_range_and_is_saved():
    engine, *rest = private("dp-adam-ac-private")
    rate = engine.parts["rate"]
    for clipped, most in ((0.0, 2.0), (1.0, 0.1)):
        for _ in range(700):
            rate.learn(clipped)
        assert rate.multiplier == most
    rate.learn(0.2)  # within the band
    assert rate.multiplier == 0.1
    run(engine, *rest, 1)
    saved = engine.state_dict()
    other, *_ = private("dp-adam-ac-private")
    for bad in (None, {"multiplier": 0.0}, {"multiplier": "x"}):
        with pytest.raises(ConfigError, match="saved rate multiplier"):
            other.load_state_dict(saved | {"rate": bad})
    other.load_state_dict(saved)
    assert other.parts["rate"].multiplier == rate.multiplier


def test_dp_adam_ac_moves_its_bound_itself_and_its_private_form_needs_counts():
    with pytest.raises(ConfigError, match="moves its clip bound itself"):
        private("dp-adam-ac", clipping="quantile")
    with pytest.raises(ConfigError, match="follows the counts of quantile clipping"):
        private("dp-adam-ac-private", clipping="flat")
    for bad in ({"clipped": 0.0}, {"clipped": 1.0}, {"band": -0.1}, {"band": "x"}):
        for method in (DPAdamAC, DPAdamACPrivate):
            with pytest.raises(ConfigError, match="must be strictly between 0 and 1"):
                method(**bad)
    for bad in ({"window": 0}, {"lowest": 0.0}, {"highest": math.inf}):
        with pytest.raises(
            ConfigError, match=r"must be a (finite number above 0|whole number of at least 1)"
        ):
            DPAdamAC(**bad)
