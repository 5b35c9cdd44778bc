"""Views of a record and users with several rows: releases, neighbours, and what must be noticed."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.small_runs import flat, private
from tests.support.small_runs import run as go
from tests.support.unit_runs import CLIP, HAS, LOT, USERS, owners, records, run, summed_by_hand
from vestige import PrivacyError
from vestige.audit.verify.replay import Pair, compare
from vestige.gradients.units import Fold
from vestige.methods import METHODS
from vestige.sampling.collate import Views
from vestige.sampling.loader import LotSampler
from vestige.sampling.units import Units

K = 3
BY_USER = {"units": owners(), "rows_per_unit": K}


def moved(x):
    """Three views that differ."""
    return torch.stack([x, x * 0.5, x + 0.3])


def drawn(x):
    """One view with random numbers of its own."""
    return x + 0.3 * torch.randn_like(x)


SETTINGS = {
    "views": ({"views": K, "augment": moved}, 2),
    "views one by one": ({"views": K, "augment": drawn}, 2),
    "users": (BY_USER, 3),
    "users and views": ({**BY_USER, "views": 2, "augment": lambda x: [x, x * 0.5]}, 3),
}


def check_sums(recording, lots, engine, by):
    """Every sum is that of a loop over units, to the last digits."""
    checked = 0
    for look in recording.sums:
        lot = lots[look.lot]
        if not lot.rows:
            assert not look.total.any()
            continue
        expected = summed_by_hand(lot, by, recording.segments, engine.plan.bounds)
        assert (look.total - expected).norm() <= 1e-12 * expected.norm()
        checked += 1
    assert checked > len(recording.sums) / 2


@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", SETTINGS)
def test_releases_equal_a_loop_over_units(name, clipping, physical):
    options, by = SETTINGS[name]
    options = {**options, "clipping": clipping, "max_physical_batch_size": physical}
    check_sums(*run(records(), max_grad_norm=5.0, **options), by)  # most units are not clipped
    check_sums(*run(records(), **options), by)


@pytest.mark.parametrize("loss", ["sum", "rows", "own"])
@pytest.mark.parametrize("name", ["views", "users"])
def test_a_sum_and_one_loss_per_row_are_turned_into_the_mean_of_a_unit(name, loss):
    options, by = SETTINGS[name]
    reduction = "sum" if loss == "sum" else "mean"
    check_sums(*run(records(), loss=loss, loss_reduction=reduction, **options), by)


def same_weights(one, other, tolerance):
    a, b = (flat(made[1].parameters()) for made in (one, other))
    assert (a - b).norm() <= tolerance * b.norm()


PRIVATE = sorted(METHODS)


@pytest.mark.parametrize("method", PRIVATE)
def test_equal_views_are_no_views_whatever_the_method(method):
    plain = private(method, steps=6)
    with_views = private(method, steps=6, views=K, augment=lambda x: torch.stack([x] * K))
    go(*plain, steps=6)
    go(*with_views, steps=6)
    same_weights(with_views, plain, 1e-9)


@pytest.mark.parametrize("method", PRIVATE)
def test_users_with_one_row_are_records_whatever_the_method(method):
    plain = private(method, steps=6)
    users = private(method, steps=6, units=torch.arange(24), rows_per_unit=K)
    go(*plain, steps=6)
    go(*users, steps=6)
    same_weights(users, plain, 1e-9)


@pytest.mark.parametrize("clipping", ["quantile", "auto", "quantile_per_layer"])
def test_counts_and_norms_go_by_unit(clipping):
    plain = private("dp-sgd", clipping=clipping)
    users = private("dp-sgd", clipping=clipping, units=torch.arange(24), rows_per_unit=K)
    go(*plain, steps=10)
    go(*users, steps=10)
    same_weights(users, plain, 1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"units": torch.arange(24), "rows_per_unit": 1},
        {"views": 1, "augment": lambda x: x},
        {"views": 1, "augment": lambda x: x[None]},
    ],
    ids=["users", "one view", "one view stacked"],
)
@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma", "dp-is", "dp-sam"])
def test_one_row_to_a_unit_is_the_ordinary_step_bit_for_bit(method, options):
    plain, other = private(method), private(method, **options)
    go(*plain)
    go(*other)
    assert torch.equal(flat(plain[1].parameters()), flat(other[1].parameters()))


# -- neighbouring data: one user less --------------------------------------------------------------


def replayed(method="dp-sgd", **options):
    """What differs between a run and its replay without the last user's rows."""
    settings = {"dataset_size": USERS, "rows_per_unit": K, **options}
    first, *_ = run(records(), method, steps=24, units=owners(), **settings)
    less = owners(USERS - 1)
    second, *_ = run(
        records(USERS - 1), method, steps=24, units=less, frozen=first.looks, **settings
    )
    return Pair(first, second)


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma", "dp-is", "dp-sam"])
def test_a_user_moves_no_query_beyond_its_bound_and_nothing_else(method):
    pair = replayed(method)
    assert compare(pair) == []
    assert max(pair.used) > 0.99  # the user is loud: the bound is used up


@pytest.mark.parametrize("options", [{"clipping": "quantile"}, {"max_physical_batch_size": 7}])
def test_counts_and_physical_batches_do_not_tell_of_a_user(options):
    assert compare(replayed(**options)) == []


# -- a canary: whoever sees the releases cannot tell a user from nobody ----------------------------


def canary_mu(**options):
    """How far a loud user moves the releases along its own gradient, in standard deviations.

    The weights stay, and every lot is drawn at rate 1, so that releases with the user and releases
    without are two samples of one normal number each: mu-Gaussian DP, with mu 1 / sigma.
    """
    sigma, releases = 1.0, 150
    options = {"noise_multiplier": sigma, "dataset_size": USERS, "lot": USERS, "lr": 0.0} | options
    samples, direction = [], None
    for users in (USERS, USERS - 1):
        recording, lots, _ = run(
            records(users),
            steps=releases,
            seed=users,
            units=owners(users),
            rows_per_unit=K,
            **options,
        )
        if direction is None:
            lots[0].rows[:] = [row for row in lots[0].rows if row[3] == USERS - 1]
            direction = summed_by_hand(lots[0], 3, recording.segments, (CLIP,))
            assert 0.99 * CLIP <= float(direction.norm()) <= CLIP * (1 + 1e-9)
        noisy = torch.stack([look.values for look in recording.sums])
        samples.append(noisy @ direction / direction.norm())
    here, away = samples
    spread = math.sqrt((float(here.var()) + float(away.var())) / 2)
    return float(here.mean() - away.mean()) / spread, 1 / sigma, 4 * math.sqrt(2 / releases)


def test_a_canary_user_is_as_hard_to_see_as_the_accountant_says():
    mu, claimed, error = canary_mu()
    assert mu <= claimed + error
    assert mu >= claimed - error


def test_the_canary_shows_a_unit_that_is_clipped_by_row(monkeypatch):
    clipped_by_row(monkeypatch)
    mu, claimed, error = canary_mu(self_check=False)
    assert mu > claimed + error


def test_a_user_is_in_a_lot_at_the_public_rate():
    _, lots, _ = run(records(), steps=200, self_check=False, **BY_USER)
    rate, steps = LOT / USERS, 200
    for user in range(USERS):
        there = sum(any(row[3] == user for row in lot.rows) for lot in lots.values())
        assert abs(there - steps * rate) <= 4 * math.sqrt(steps * rate * (1 - rate))


# -- who is who stays here -------------------------------------------------------------------------


def test_ids_are_written_nowhere(tmp_path, capfd):
    names = [f"zqx{int(user):03d}qzx" for user in owners()]
    _, _, engine = run(records(), steps=3, units=names, rows_per_unit=K)
    engine.save_checkpoint(tmp_path / "checkpoint")
    other = private(
        "dp-sgd",
        units=[f"zqx{user}qzx" for user in range(24)],
        rows_per_unit=1,
        engine_options={"ledger": tmp_path / "l"},
    )
    go(*other, steps=2)
    other[0].save_checkpoint(tmp_path / "other")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    told = [path.read_bytes() for path in files]
    told += [repr(engine).encode(), str(engine.statement(1e-5)).encode(), str(engine).encode()]
    told += [part.encode() for part in capfd.readouterr()]
    assert not any(b"zqx" in part for part in told)


# -- mutants -----------------------------------------------------------------------------------


def clipped_by_row(patch):
    """A unit's rows are clipped one by one."""
    patch.setattr(Fold, "__call__", lambda self, use: use)


def woven(patch):
    """Every unit has rows of other units."""

    def positions(self, values):
        mixed = values.unflatten(0, (self.rows, -1)).transpose(0, 1)
        return mixed.reshape(len(values) // self.rows, -1, values.shape[-1])

    patch.setattr(Fold, "_positions", positions)


def split(patch):
    """Half of a unit's rows come in one physical batch, half in the next."""
    original = LotSampler.__iter__

    def halves(self):
        for rows in original(self):
            batch = self.batches[-1]
            batch.rows //= 2
            batch.unit_rows //= 2
            weights, half = batch.weights, len(rows) // 2
            batch.weights = None if weights is None else weights[:half]
            more = type(batch)(**vars(batch))
            more.weights = None if weights is None else weights[half:]
            batch.last = False
            yield rows[:half]
            self.batches.append(more)
            yield rows[half:]

    patch.setattr(LotSampler, "__iter__", halves)


def over_all(patch):
    """The mean is over rows_per_unit rows, whether or not they are there."""
    original = Units.rows

    def rows(self, *args):
        found, weights = original(self, *args)
        return found, None if weights is None else (weights > 0).double()

    patch.setattr(Units, "rows", rows)


def stand_ins_count(patch):
    """A row that stands for a missing one counts like a record."""
    original = Units.rows
    patch.setattr(Units, "rows", lambda self, *args: (original(self, *args)[0], None))


def two_records(patch):
    """The views of a record are made from another one."""
    original = Views.of
    kept = []

    def of(self, record):
        views = original(self, record)
        before, kept[:] = list(kept), views
        return before or views

    patch.setattr(Views, "of", of)


@pytest.mark.parametrize("break_it", [clipped_by_row, woven, over_all, stand_ins_count])
def test_a_broken_unit_differs_from_the_loop_over_units(break_it, monkeypatch):
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        check_sums(*run(records(), self_check=False, max_grad_norm=5.0, **BY_USER), 3)


def test_a_unit_that_is_clipped_by_row_is_caught_by_the_replay(monkeypatch):
    clipped_by_row(monkeypatch)
    found = compare(replayed(self_check=False))
    assert any("bound" in finding.sentence for finding in found)


def test_a_unit_in_two_physical_batches_is_caught_by_the_replay(monkeypatch):
    split(monkeypatch)
    pair = replayed(rows_per_unit=4)
    assert max(pair.used) > 1.9
    assert compare(pair)


def test_views_of_another_record_differ_from_the_loop_over_units(monkeypatch):
    two_records(monkeypatch)
    with pytest.raises(AssertionError):
        recording, lots, engine = run(records(), **SETTINGS["views one by one"][0])
        for lot in lots.values():  # whose they should be
            counts = [row[2] for row in lot.rows]
            assert all(counts.count(index) == K for index in counts)
            for x, _, index, _ in lot.rows:
                assert (x - records().tensors[0][index]).norm() < 4
        check_sums(recording, lots, engine, 2)


def test_the_unbroken_views_are_near_their_own_record():
    _, lots, _ = run(records(), **SETTINGS["views one by one"][0])
    for lot in lots.values():
        for x, _, index, _ in lot.rows:
            assert (x - records().tensors[0][index]).norm() < 4


@pytest.mark.parametrize("loss", ["mean", "own"])
@pytest.mark.parametrize("break_it", [clipped_by_row, woven])
def test_the_self_check_notices_units_of_other_rows(break_it, loss, monkeypatch):
    break_it(monkeypatch)
    with pytest.raises(PrivacyError, match=r"unit|attributed"):
        run(records(), steps=1, loss=loss, **BY_USER)


def test_every_user_of_the_small_data_is_one_that_matters():
    assert {1, 2} < set(HAS)
    assert max(HAS) > K
