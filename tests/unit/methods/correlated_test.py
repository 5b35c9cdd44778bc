"""Correlated noise through the engine: fractional noise, DP-FTRL and the banded inverse.

What a release has beside its sum is compared with the rows of a dense matrix, or of a tree that is
written out, from the same draws: 20 steps in float64, to 1e-9. correlated_test.py has the noise
itself. The one statistical test states its false-alarm rate.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import toeplitz
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.dense_noise import dense, node_index, tree_matrix
from tests.support.small_runs import LOT, SIGMA, STEPS, N, closure_of, flat, private, run
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
from vestige.methods import DPFTRL, BandedInverse, FractionalNoise, planning
from vestige.methods.method import planned_charges
from vestige.plan import ADJACENCY
from vestige.updates.adam import AdamBC

C, LR = 1.5, 0.3
FORMS = [(0.8, 3), (0.5, 4), (0.3, 2), (0.9, 1)]
TREES = [DPFTRL(), DPFTRL(False), DPFTRL(True, 3), DPFTRL(False, 3), DPFTRL(True, 2)]

INVERSES = [BandedInverse(), BandedInverse(3, 0.9), BandedInverse(4, 0.5, 3), BandedInverse(1)]


@pytest.fixture
def seen(monkeypatch):
    return watch(monkeypatch)


def white(rows, seed=SEED):
    return np.stack([normals(t, seed=seed).numpy() for t in range(rows)])


def banded_rows(order, bands, rows, seed=SEED):
    """|c| C^-1 z, with C dense."""
    matrix = dense(order, bands, rows)
    length = np.linalg.norm(dense(order, bands, 40)[:, 0])
    return torch.from_numpy(length * np.linalg.solve(matrix, white(rows, seed)))


def tree_prefixes(method, length, rows, seed=SEED):
    """N_1, N_2, ...: the noise of the tree's estimates of all prefix sums, node by node."""

    def node(start, height, position):
        """(noise, variance) of the best estimate of a node."""
        if position << height >= length:
            return torch.zeros(75, dtype=torch.float64), 0.0  # no lots: known to be zero
        z = normals(node_index(start, length, height, position), seed=seed)
        if height == 0 or not method.honaker:
            return z, 1.0
        (a, v), (b, w) = (node(start, height - 1, 2 * position + side) for side in (0, 1))
        # Two estimates of one sum, weighted by their precisions.
        return (z + (a + b) / (v + w)) / (1 + 1 / (v + w)), 1 / (1 + 1 / (v + w))

    found, done = [], torch.zeros(75, dtype=torch.float64)
    for row in range(rows):
        start, count = row // length * length, row % length + 1
        total, covered = done.clone(), 0
        for height in reversed(range(count.bit_length())):
            if count >> height & 1:
                total += node(start, height, covered >> height)[0]
                covered += 1 << height
        found.append(total)
        if count == length:
            done = done + node(start, (length - 1).bit_length(), 0)[0]
    return torch.stack(found)


def tree_length(method):
    return STEPS if method.restart is None else method.restart * N // LOT


# -- fractional noise -----------------------------------------------------------------------


@pytest.mark.parametrize(("order", "bands"), FORMS)
def test_releases_carry_the_rows_of_the_dense_matrix(order, bands, seen):
    engine, model, optimizer, loader = private(
        FractionalNoise(order, bands), sgd(LR), max_grad_norm=C
    )
    theta, noise = flat(model.parameters()), banded_rows(order, bands, STEPS)
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        assert close(seen.sums[t], clipped_sum(gradients(theta, *rows), [C], SEGMENTS["flat"]))
        assert close(seen.values[t] - seen.sums[t], SIGMA * C * noise[t])
        theta = theta - LR * seen.values[t] / LOT
        assert close(flat(model.parameters()), theta)
    (event,) = engine.ledger.events
    assert (event.noise_multiplier, event.count) == (SIGMA, -(-STEPS // bands))
    assert event.sample_rate == pytest.approx(bands * LOT / N)
    assert engine.plan.adjacency == ADJACENCY == "add or remove one record"


def test_groups_have_noise_of_their_own_scale(seen):
    """sigma_g C_g in group g, with bounds and multipliers that are all different."""
    bounds, sigmas = (0.5, 2.0), (1.0, 3.0)
    for method, noise in (
        (FractionalNoise(0.8, 3), banded_rows(0.8, 3, 8)),
        (DPFTRL(restart=3), tree_prefixes(DPFTRL(), 12, 8).diff(dim=0, prepend=zeros())),
    ):
        made = private(
            method,
            sgd(LR),
            clipping="per_layer",
            max_grad_norm=bounds,
            noise_multiplier=None,
            group_noise_multipliers=sigmas,
        )
        run(*made, 8)
        for t in range(8):
            for at, bound, sigma in zip(SEGMENTS["per_layer"], bounds, sigmas, strict=True):
                found = (seen.values[t] - seen.sums[t])[at]
                assert close(found, sigma * bound * noise[t][at])
        # 12 lots of a tree, a record in 3: in 3 leaves, pairs and fours, in the eights twice and
        # once, in the root three times.
        weight = 1.0 if method.name == "fractional-noise" else math.sqrt(3 + 3 + 3 + 5 + 9)
        (event,) = made[0].ledger.events
        assert event.noise_multiplier == pytest.approx((1 + 1 / 9) ** -0.5 / weight)
        seen.sums.clear()
        seen.values.clear()


def zeros():
    return torch.zeros(1, 75, dtype=torch.float64)


def test_one_band_is_dp_sgd_bit_for_bit():
    ours, theirs = private(FractionalNoise(0.7, 1), sgd(LR)), private("dp-sgd", sgd(LR))
    run(*ours)
    run(*theirs)
    assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))
    assert ours[0].ledger.events == theirs[0].ledger.events


@pytest.mark.parametrize("bands", [2, 3, 4])
def test_lots_of_one_record_are_the_bands_apart(bands):
    engine, model, optimizer, loader = private(FractionalNoise(0.5, bands), sgd(LR))
    data, last, gaps = loader.dataset.tensors[0], {}, []
    for t, (x, y, rows) in enumerate(lots(engine, loader, 60)):
        optimizer.step(closure_of(model, optimizer, x, y))
        for row in rows[0]:
            (record,) = torch.nonzero((data == row).all(1))[0].tolist()
            gaps += [t - last[record]] if record in last else []
            last[record] = t
    assert min(gaps) == bands
    assert len(last) == N
    assert {gap % bands for gap in gaps} == {0}


@pytest.mark.parametrize("physical", [None, 2])
def test_abandoned_lots_leave_the_others_their_noise(physical, seen):
    """The noise goes by the lot's number; a cycle whose first lots were abandoned is charged."""
    order, bands, given_up = 0.8, 3, {1, 6, 7, 8, 12}
    engine, model, optimizer, loader = private(
        FractionalNoise(order, bands), sgd(LR), max_grad_norm=C, max_physical_batch_size=physical
    )
    noise, kept, charged = banded_rows(order, bands, STEPS), [], []
    last = -1
    while last < STEPS - 1:
        for x, y in loader:
            last = engine._run.capture.batch.lot
            if last in given_up:
                engine.abandon_lot()
            else:
                optimizer.step(closure_of(model, optimizer, x, y))
                kept += [last] if engine.released > len(kept) else []
            charged.append((last, engine.ledger.steps))
            if last == STEPS - 1 and not engine._run.in_lot:
                break
    assert kept == [t for t in range(STEPS) if t not in given_up]
    for lot, total, released in zip(kept, seen.sums, seen.values, strict=True):
        assert close(released - total, SIGMA * C * noise[lot])
    # Charged with the first lot of a cycle, whatever became of it.
    assert dict(charged) == {t: t // bands + 1 for t in range(STEPS)}


def resumed(method, steps, seed, secret, **options):
    """A run that was saved after `steps` and goes on under the key of `seed`."""
    engine, model, optimizer, loader = private(method, sgd(LR), steps=STEPS, **options)
    run(engine, model, optimizer, loader, steps)
    buffer = io.BytesIO()
    torch.save([engine.state_dict(), model.state_dict()], buffer)
    buffer.seek(0)
    state, weights = torch.load(buffer, weights_only=True)
    if secret:
        state["repeatable_noise"] = False  # what a run without a seed would have written
    made = private(method, sgd(LR), steps=STEPS, noise_seed=seed, **options)
    made[0].load_state_dict(state)
    made[1].load_state_dict(weights)
    return made


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_under_another_key_a_new_cycle_begins_and_is_charged(steps, seen):
    order, bands, other = 0.8, 3, 9
    made = resumed(FractionalNoise(order, bands), steps, other, True, max_grad_norm=C)
    run(*made, STEPS - steps)
    noise = torch.cat(
        [
            banded_rows(order, bands, steps),
            banded_rows(order, bands, STEPS - steps, seed=other),
        ]
    )
    for total, released, row in zip(seen.sums, seen.values, noise, strict=True):
        assert close(released - total, SIGMA * C * row)
    cycles = -(-steps // bands) + -(-(STEPS - steps) // bands)
    assert made[0].ledger.steps == cycles


@pytest.mark.parametrize("restart", [None, 3])
def test_under_another_key_a_new_tree_begins_and_is_charged(restart, seen):
    method, steps, other = DPFTRL(restart=restart), 7, 9
    length = tree_length(method)
    made = resumed(method, steps, other, True, max_grad_norm=C)
    run(*made, STEPS - steps)
    noise = torch.cat(
        [
            tree_prefixes(method, length, steps).diff(dim=0, prepend=zeros()),
            tree_prefixes(method, length, STEPS - steps, other).diff(dim=0, prepend=zeros()),
        ]
    )
    for total, released, row in zip(seen.sums, seen.values, noise, strict=True):
        assert close(released - total, SIGMA * C * row)
    assert made[0].ledger.steps == 1 + -(-(STEPS - steps) // length)


@pytest.mark.parametrize("method", [FractionalNoise(0.8, 3), *TREES[:3], *INVERSES[1:3]], ids=str)
@pytest.mark.parametrize("steps", [6, 7])
def test_in_test_mode_a_resumed_run_is_the_uninterrupted_one(method, steps):
    whole = private(method, sgd(LR), steps=STEPS)
    run(*whole)
    made = resumed(method, steps, SEED, False)
    run(*made, STEPS - steps)
    assert torch.equal(flat(made[1].parameters()), flat(whole[1].parameters()))
    # But a cycle or tree that was cut is charged again: whether the key is the same is not known.
    every = method.bands if method.name == "fractional-noise" else tree_length(method)
    assert made[0].ledger.steps == whole[0].ledger.steps + (steps % every > 0)
    (event,) = made[0].ledger.events
    assert event.noise_multiplier == whole[0].ledger.events[0].noise_multiplier


def tensors_in(value):
    """All tensors and lists of numbers of a state, flat."""
    if isinstance(value, torch.Tensor):
        yield value.double().flatten()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        if len(value) > 20 and all(isinstance(v, int | float) for v in value):
            yield torch.tensor(value, dtype=torch.float64)
        for item in value:
            yield from tensors_in(item)


@pytest.mark.parametrize("denoiser", [None, "doppler", "kalman"])
@pytest.mark.parametrize("method", [FractionalNoise(0.8, 3), DPFTRL(), BandedInverse(3)], ids=str)
def test_the_noise_is_in_no_saved_state(method, denoiser, seen):
    """Neither a row, nor a draw, nor a prefix sum, at whatever scale: what is saved are releases,
    and at least 0.1 % of them is left when their part along a noise vector is taken off."""
    engine, *rest = private(
        method,
        sgd(LR),
        steps=STEPS,
        denoiser=denoiser,
        averaging="ema",
        noise_multiplier=0.3,
        max_grad_norm=3.0,
    )
    run(engine, *rest, 7)
    saved = [v for v in tensors_in(engine.state_dict()) if len(v) == 75]
    assert len(saved) == (0 if denoiser is None else {"doppler": 1, "kalman": 2}[denoiser])
    rows = torch.stack(seen.values) - torch.stack(seen.sums)
    secret = torch.cat([rows, rows.cumsum(0), torch.from_numpy(white(7))])
    for vector in saved:
        for noise in secret:
            along = vector @ noise / noise.norm()
            assert float(along**2 / vector.square().sum()) < 0.999


def test_less_noise_accumulates_as_planned():
    """Root mean square of the weights' noise over 64 steps, at one sigma, in 2040 coordinates.

    A random walk's mean square has a relative variance of 4/3 in one coordinate: 1.3 % of the root
    mean square here. 7 % is off in one run in 10^7.
    """
    steps, found = 64, {}
    for name, method in (("plain", "dp-sgd"), ("fractional", FractionalNoise(0.8, 8))):
        model = nn.Linear(50, 40).double()
        engine = PrivacyEngine("rdp")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(torch.zeros(64, 50).double()), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=1e-12,  # empty lots: the weights carry the noise alone
            method=method,
        )
        start, squares = flat(model.parameters()), []
        while engine.released < steps:
            for (x,) in loader:
                optimizer.zero_grad()
                engine.backward(model(x).sum(1))
                optimizer.step()
                squares.append(float((flat(model.parameters()) - start).mul(8).square().mean()))
        found[name] = math.sqrt(np.mean(squares))
    planned = planning.fractional(0.8, 8).noise(steps)[0], planning.dp_sgd().noise(steps)[0]
    assert found["fractional"] == pytest.approx(planned[0], rel=0.07)
    assert found["plain"] == pytest.approx(planned[1], rel=0.07)
    assert planned[0] / planned[1] < 0.6  # much less than what 7 % could hide
    assert found["fractional"] / found["plain"] == pytest.approx(planned[0] / planned[1], rel=0.1)


# -- DP-FTRL --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", TREES, ids=str)
def test_the_weights_follow_prefix_sums_with_the_noise_of_a_tree(method, seen):
    """theta_t = theta_0 - lr / L (G_t + sigma C N_t), the data in one order that stays."""
    engine, model, optimizer, loader = private(method, sgd(LR), steps=STEPS, max_grad_norm=C)
    first = theta = flat(model.parameters())
    length = tree_length(method)
    noise, prefix, order = tree_prefixes(method, length, STEPS), zeros()[0], []
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        order.append(x)
        optimizer.step(closure_of(model, optimizer, x, y))
        prefix = prefix + clipped_sum(gradients(theta, *rows), [C], SEGMENTS["flat"])
        theta = first - LR / LOT * (prefix + SIGMA * C * noise[t])
        assert close(flat(model.parameters()), theta)
    for t in range(N // LOT, STEPS):
        assert torch.equal(order[t], order[t - N // LOT])
    everyone = torch.cat(order[: N // LOT])
    assert len(everyone) == len({tuple(row.tolist()) for row in everyone}) == N
    (event,) = engine.ledger.events
    assert (event.sample_rate, event.count) == (1.0, -(-STEPS // length))
    assert event.noise_multiplier == pytest.approx(SIGMA / math.sqrt(sensitivity(length)))
    assert engine.plan.adjacency.startswith("zero out one record")


def sensitivity(length, period=N // LOT):
    """max over phases of sum over nodes of (the record's lots in the node)^2."""
    sizes = [2**h for h in range((length - 1).bit_length() + 1)]
    return max(
        sum(
            len([t for t in range(phase, length, period) if t // size == place]) ** 2
            for size in sizes
            for place in range(-(-length // size))
        )
        for phase in range(period)
    )


def test_a_momentum_optimizer_sees_the_noise_of_the_tree(seen):
    """The release of a step has N_(t+1) - N_t, so that any optimizer may follow."""
    engine, *rest = private(DPFTRL(), sgd(LR, 0.9), steps=STEPS, max_grad_norm=C)
    run(engine, *rest)
    rows = tree_prefixes(DPFTRL(), STEPS, STEPS).diff(dim=0, prepend=zeros())
    for t in range(STEPS):
        assert close(seen.values[t] - seen.sums[t], SIGMA * C * rows[t])


@pytest.mark.parametrize("method", [FractionalNoise(0.8, 3), DPFTRL(), DPFTRL(False, 3)], ids=str)
def test_the_corrected_adam_is_told_the_noise_of_a_single_release(method):
    """The standard deviation of one row of the noise, which differs from row to row."""
    if method.name == "dp-ftrl":
        weights, _ = tree_matrix(tree_length(method), method.honaker, STEPS)
    else:
        length = np.linalg.norm(dense(method.order, method.bands, 40)[:, 0])
        weights = length * np.linalg.inv(dense(method.order, method.bands, STEPS))
    marginal = np.linalg.norm(weights, axis=1)
    engine, model, optimizer, loader = private(
        method,
        lambda p: AdamBC(p, lr=0.001),
        steps=STEPS,
        clipping="per_layer",
        max_grad_norm=(0.5, 2.0),
        noise_multiplier=None,
        group_noise_multipliers=(1.0, 3.0),
    )
    for t, (x, y, _) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        for parameter, std in ((model[0].weight, 0.5), (model[2].bias, 6.0)):
            expected = (std * marginal[t] / LOT) ** 2
            assert optimizer.noise_variances[id(parameter)] == pytest.approx(expected, rel=1e-9)
    assert marginal.std() > 0.05


# -- banded inverse -------------------------------------------------------------------------


def inverse_rows(method, length, rows, seed=SEED):
    """D z by its definition, and the norm of the summed columns of C = D^-1, both of a block."""
    d = np.array([1.0])
    for root in (1.0, method.momentum):  # sqrt(1 - root z), by the binomial series
        series = [math.prod((j - 0.5) / (j + 1) for j in range(k)) * root**k for k in range(60)]
        d = np.convolve(d, series)
    column = np.zeros(length)
    kept = min(length, method.bands)
    column[:kept] = d[:kept]
    block = toeplitz(column, np.zeros(length))
    summed = np.linalg.inv(block)[:, :: N // LOT].sum(1)
    whole = np.kron(np.eye(-(-rows // length)), block)[:rows, :rows]
    return torch.from_numpy(whole @ white(rows, seed)), np.linalg.norm(summed)


@pytest.mark.parametrize("sigma", [0.0, SIGMA])
@pytest.mark.parametrize("method", INVERSES, ids=str)
def test_releases_carry_the_banded_sum_of_draws(method, sigma, seen):
    """And without noise they are those of plain SGD on clipped sums."""
    engine, model, optimizer, loader = private(
        method, sgd(LR), steps=STEPS, max_grad_norm=C, noise_multiplier=sigma
    )
    length = STEPS if method.restart is None else method.restart * N // LOT
    noise, sensitivity = inverse_rows(method, length, STEPS)
    theta = flat(model.parameters())
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        total = clipped_sum(gradients(theta, *rows), [C], SEGMENTS["flat"])
        theta = theta - LR * (total + sigma * C * noise[t]) / LOT
        assert close(flat(model.parameters()), theta)
    (event,) = engine.ledger.events
    assert (event.sample_rate, event.count) == (1.0, -(-STEPS // length))
    assert event.noise_multiplier == pytest.approx(sigma / sensitivity, rel=1e-12)
    assert engine.plan.adjacency == ADJACENCY


def test_a_record_comes_every_time_that_its_group_does():
    """Groups are drawn for each record: whole turns apart, all records, lots of many sizes."""
    engine, model, optimizer, loader = private(BandedInverse(), sgd(LR), steps=STEPS)
    data, places = loader.dataset.tensors[0], {}
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        for row in rows[0]:
            (record,) = torch.nonzero((data == row).all(1))[0].tolist()
            places.setdefault(record, []).append(t)
    turns = N // LOT
    assert len(places) == N
    assert all(lots == list(range(lots[0], STEPS, turns)) for lots in places.values())
    assert len({sum(lots[0] == first for lots in places.values()) for first in range(turns)}) > 1


def test_a_rate_that_divides_nothing_is_kept_and_charged_as_the_whole_groups():
    """Three groups, of which a lot takes each record with probability 0.9."""
    method, other = BandedInverse(bands=2), BandedInverse(bands=2)
    charged = [
        planned_charges(m, "flat", 1, 1000, lot, rate, 30)
        for m, lot, rate in ((method, 300, 0.3), (other, 333, 1 / 3))
    ]
    assert charged[0] == charged[1]
    engine, *_ = private(method, sgd(LR), steps=STEPS, sample_rate=0.3)
    drawing = engine._run.lots._drawing
    assert (drawing.bands, drawing.rate) == (3, pytest.approx(0.9))


@pytest.mark.parametrize("restart", [None, 3])
def test_under_another_key_a_new_block_begins_and_is_charged(restart, seen):
    method, steps, other = BandedInverse(3, 0.9, restart), 7, 9
    length = STEPS if restart is None else 12
    made = resumed(method, steps, other, True, max_grad_norm=C)
    run(*made, STEPS - steps)
    noise = torch.cat(
        [
            inverse_rows(method, length, steps)[0],
            inverse_rows(method, length, STEPS - steps, other)[0],
        ]
    )
    for total, released, row in zip(seen.sums, seen.values, noise, strict=True):
        assert close(released - total, SIGMA * C * row)
    assert made[0].ledger.steps == 1 + -(-(STEPS - steps) // length)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FractionalNoise(0.8, 3), DPFTRL(), BandedInverse(3)], ids=str)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": lambda t: 1.0 + t}, "one noise multiplier for the whole run"),
        ({"noise_multiplier": [1.0] * 3 + [2.0] * 17}, "one noise multiplier for the whole run"),
        ({"sample_rate": lambda t: 0.1 + t / 1000}, "no schedule of the sampling rate"),
        ({"clipping": "quantile"}, "a fixed clip bound"),
        ({"clipping": "quantile_per_layer"}, "a fixed clip bound"),
        ({"clipping": "auto"}, "a fixed clip bound"),
        (
            {"noise_multiplier": None, "group_noise_multipliers": lambda t: [1.0 + t]},
            "one noise multiplier for the whole run",
        ),
    ],
)
def test_what_would_change_the_sensitivity_is_refused(method, options, message):
    with pytest.raises(ConfigError, match=f"method '{method.name}' takes {message}"):
        private(method, steps=STEPS, **options)


def test_bad_settings_and_places_are_refused():
    for bad in ({"order": 0.0}, {"order": 1.0}, {"order": math.nan}, {"bands": 0}, {"bands": 2.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
            FractionalNoise(**bad)
    for bad in ({"bands": 0}, {"momentum": 1.0}, {"momentum": -0.1}, {"restart": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
            BandedInverse(**bad)
    for bad in ({"honaker": 1}, {"restart": 0}, {"restart": 1.5}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
            DPFTRL(**bad)
    with pytest.raises(ConfigError, match=r"bands=5 .* above 1.*at most 4"):
        private(FractionalNoise(bands=5))
    with pytest.raises(ConfigError, match=r"pass steps="):
        private(DPFTRL())
    with pytest.raises(ConfigError, match=r"pass steps="):
        private(BandedInverse())
    with pytest.raises(ConfigError, match=r"sample_rate=0.1 does nothing"):
        private(DPFTRL(restart=1), sample_rate=0.1)
    with pytest.raises(ConfigError, match=r"dataset_size=30 is not the number of records, 24"):
        private(DPFTRL(restart=1), dataset_size=30)


def test_the_corrected_adam_is_refused_where_it_could_not_know_the_noise():
    for method in (FractionalNoise(0.8, 3), DPFTRL(restart=1)):
        with pytest.raises(ConfigError, match="AdamBC cannot know"):
            private(method, lambda p: AdamBC(p, lr=0.1), denoiser="doppler")


def test_a_lot_of_correlated_noise_is_charged_before_it_is_drawn(monkeypatch):
    engine, model, optimizer, loader = private(FractionalNoise(0.8, 3), sgd(LR))
    process = engine._run.door.correlation._process

    def fails(_):
        assert engine.ledger.steps == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_fresh", fails)
    for x, y in loader:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure_of(model, optimizer, x, y))
        break
    assert (engine.ledger.steps, engine.released) == (1, 0)
    assert all(p.grad is None for p in model.parameters())
    monkeypatch.undo()
    for x, y in loader:
        optimizer.step(closure_of(model, optimizer, x, y))
        break
    assert engine.ledger.steps == 1  # the second lot of the cycle that is paid for
    assert F.cross_entropy(model(x), y).isfinite()
