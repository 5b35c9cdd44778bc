"""Lots: exact inclusion, lots of every size, groups that take turns, and a fixed order.

Each distribution test raises a false alarm in at most one run in 10^7 (`FALSE_ALARM`, shared among
the comparisons that it makes).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from vestige import ConfigError
from vestige.sampling import lots as sampling
from vestige.sampling.loader import LotSampler, PrivateLoader
from vestige.sampling.lots import CyclicPoisson, FixedOrder, Poisson, draw_lot
from vestige.sampling.streams import Randomness

FALSE_ALARM = 1e-7


DRAWS = 20_000


def draw_many(size, rate, draws=DRAWS):
    """(draws, size) booleans: who was in which lot."""
    source = Randomness()
    present = np.zeros((draws, size), dtype=bool)
    for t in range(draws):
        present[t, draw_lot(source, t, size, rate)] = True
    return present


def is_binomial(count, trials, probability, tests):
    return stats.binomtest(int(count), trials, probability).pvalue > FALSE_ALARM / tests


@pytest.mark.parametrize("rate", [0.002, 0.1, 0.5, 0.93])
def test_every_record_is_in_a_lot_with_the_sampling_rate(rate):
    present = draw_many(12, rate)
    for count in present.sum(0):
        assert is_binomial(count, DRAWS, rate, 12)
    assert not is_binomial(present.sum(), 12 * DRAWS, rate / 2, 1)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_records_are_drawn_independently(rate):
    """Pairs of one lot, and a record in one lot and the next."""
    present = draw_many(8, rate)
    pairs = list(itertools.combinations(range(8), 2))
    for i, j in pairs:
        both = (present[:, i] & present[:, j]).sum()
        assert is_binomial(both, DRAWS, rate**2, len(pairs) + 8)
    for i in range(8):
        again = (present[0::2, i] & present[1::2, i]).sum()
        assert is_binomial(again, DRAWS // 2, rate**2, len(pairs) + 8)


@pytest.mark.parametrize(("size", "rate"), [(40, 0.1), (5, 0.5), (300, 0.01), (3, 0.9)])
def test_lot_sizes_are_binomial(size, rate):
    sizes = draw_many(size, rate).sum(1)
    cells = stats.binom.pmf(np.arange(size + 1), size, rate)
    observed = np.bincount(sizes, minlength=size + 1)
    # Cells are merged until each expects ten draws, as the chi-square approximation needs.
    edges = [0]
    for k in range(size + 1):
        if DRAWS * cells[edges[-1] : k + 1].sum() >= 10 and DRAWS * cells[k + 1 :].sum() >= 10:
            edges.append(k + 1)
    expected = np.add.reduceat(cells, edges) * DRAWS
    found = np.add.reduceat(observed, edges)
    assert len(edges) >= 3
    assert stats.chisquare(found, expected).pvalue > FALSE_ALARM


def test_the_ends_of_the_range():
    source = Randomness()
    for t in range(50):
        assert draw_lot(source, t, 7, 1.0).tolist() == list(range(7))
        lot = draw_lot(source, t, 1, 0.5).tolist()
        assert lot in ([], [0])
        assert len(draw_lot(source, t, 1000, 1e-300)) == 0
        assert len(draw_lot(source, t, 2000, 1 - 1e-9)) > 1990


@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.5, 0.999])
def test_a_lot_is_sorted_distinct_and_in_range(rate):
    source = Randomness()
    for t in range(100):
        lot = draw_lot(source, t, 777, rate)
        assert lot.dtype == np.int64
        assert (np.diff(lot) > 0).all()
        assert len(lot) == 0 or (lot[0] >= 0 and lot[-1] < 777)


def test_a_billion_records_cost_as_many_numbers_as_the_lot(monkeypatch):
    drawn = []
    uniforms = Randomness.uniforms

    def counted(self, purpose, step, count):
        drawn.append(count)
        return uniforms(self, purpose, step, count)

    monkeypatch.setattr(Randomness, "uniforms", counted)
    size, expected, lots = 10**9, 256, 400
    source = Randomness()
    sizes, positions = [], []
    for t in range(lots):
        lot = draw_lot(source, t, size, expected / size)
        sizes.append(len(lot))
        positions.append(lot)
    assert max(drawn) < 2 * expected
    assert sum(drawn) < 2 * expected * lots
    assert is_binomial(sum(sizes), size * lots, expected / size, 2)
    # Uniform over the whole billion, not crowded at one end.
    places = np.concatenate(positions) / size
    assert stats.kstest(places, "uniform").pvalue > FALSE_ALARM / 2


def test_a_draw_that_was_too_short_is_drawn_again_longer(monkeypatch):
    """The same lot comes out however many numbers are asked for at first."""
    expected = draw_lot(Randomness(3), 5, 500, 0.3)
    counts = []
    uniforms = Randomness.uniforms

    def scarce(self, purpose, step, count):
        counts.append(count)
        return uniforms(self, purpose, step, count)

    monkeypatch.setattr(Randomness, "uniforms", scarce)
    monkeypatch.setattr(sampling, "int", lambda _: 2, raising=False)  # the first guess is two
    assert np.array_equal(draw_lot(Randomness(3), 5, 500, 0.3), expected)
    assert counts[0] == 2
    assert counts == sorted(set(counts))


def test_a_record_less_changes_nothing_for_the_others():
    """The draw of D' is that of D without the last record: who else is in does not move."""
    for t in range(200):
        larger = draw_lot(Randomness(3), t, 100, 0.2)
        smaller = draw_lot(Randomness(3), t, 99, 0.2)
        assert np.array_equal(larger[larger < 99], smaller)


def test_lots_differ_between_steps_and_runs_and_repeat_with_the_seed():
    def lots(seed):
        source = Randomness(seed)
        return [tuple(draw_lot(source, t, 1000, 0.1)) for t in range(20)]

    assert lots(1) == lots(1)
    assert len(set(lots(1)) | set(lots(2)) | set(lots(None)) | set(lots(None))) == 80


# -- groups that take turns, and a fixed order -------------------------------------------------


def presence(drawing, size, lots):
    """(lots, size) booleans: who was in which lot."""
    present = np.zeros((lots, size), dtype=bool)
    for t in range(lots):
        present[t, drawing.lot(t)] = True
    return present


@pytest.mark.parametrize(("bands", "rate"), [(1, 0.2), (3, 0.1), (5, 0.2), (8, 0.01)])
def test_a_record_is_in_the_lots_of_its_group_only(bands, rate):
    present = presence(CyclicPoisson(Randomness(), 200, rate, bands), 200, 400)
    groups = set()
    for record in range(200):
        lots = np.flatnonzero(present[:, record])
        assert len(set(lots % bands)) <= 1
        assert (np.diff(lots) >= bands).all()
        groups.update(lots % bands)
    assert groups == set(range(bands))


@pytest.mark.parametrize(("bands", "rate"), [(2, 0.3), (3, 1 / 3), (5, 0.02)])
def test_cyclic_lots_have_the_right_rate(bands, rate):
    size, lots = 60, 200 * bands
    drawing = CyclicPoisson(Randomness(), size, rate, bands)
    assert drawing.rate == pytest.approx(bands * rate, rel=1e-15)
    present = presence(drawing, size, lots)
    for count in present.sum(0):
        assert is_binomial(count, lots // bands, drawing.rate, size)
    # Whether a record is in one turn of its group says nothing about the next, or about another.
    turns = present.reshape(-1, bands, size).any(1)
    if drawing.rate < 1:
        again = (turns[0::2] & turns[1::2]).sum()
        assert is_binomial(again, turns[0::2].size, drawing.rate**2, 2)
        pairs = (turns[:, 0::2] & turns[:, 1::2]).sum()
        assert is_binomial(pairs, turns[:, 0::2].size, drawing.rate**2, 2)


def groups_of(size, bands, seed=None):
    """Rate 1 / bands: each record is in every lot of its group, and the first cycle shows it."""
    return presence(CyclicPoisson(Randomness(seed), size, 1 / bands, bands), size, bands).argmax(0)


def test_groups_are_uniform_and_independent():
    groups = groups_of(60_000, 6)
    pairs = 6 * groups[0::2] + groups[1::2]
    assert stats.chisquare(np.bincount(groups, minlength=6)).pvalue > FALSE_ALARM / 2
    assert stats.chisquare(np.bincount(pairs, minlength=36)).pvalue > FALSE_ALARM / 2
    # An equal split would not be independent: sizes of groups must vary.
    sizes = [np.bincount(groups_of(40, 2), minlength=2)[0] for _ in range(200)]
    assert len(set(sizes)) > 3


def test_a_record_less_changes_nothing_for_the_others_of_cyclic_lots():
    assert np.array_equal(groups_of(500, 7, seed=3)[:499], groups_of(499, 7, seed=3))
    larger, smaller = (CyclicPoisson(Randomness(3), size, 0.05, 4) for size in (500, 499))
    for t in range(100):
        lot = larger.lot(t)
        assert np.array_equal(lot[lot < 499], smaller.lot(t))
        assert (np.diff(lot) > 0).all() and lot.dtype == np.int64


def test_one_band_is_poisson_sampling():
    cyclic, plain = CyclicPoisson(Randomness(3), 300, 0.1, 1), Poisson(Randomness(3), 300, 0.1)
    for t in range(30):
        assert np.array_equal(cyclic.lot(t), plain.lot(t))
        assert np.array_equal(plain.lot(t), draw_lot(Randomness(3), t, 300, 0.1))


def test_poisson_follows_its_table():
    drawing = Poisson(Randomness(3), 300, (1.0, 1e-300, 0.1))
    assert [len(drawing.lot(t)) for t in (0, 1)] == [300, 0]
    assert np.array_equal(drawing.lot(9), draw_lot(Randomness(3), 9, 300, 0.1))


def test_too_many_bands_are_refused():
    with pytest.raises(ConfigError, match=r"bands=6 .* 0.2 is 1.2, above 1.*\(at most 5\).*lot"):
        CyclicPoisson(Randomness(1), 100, 0.2, 6)
    assert CyclicPoisson(Randomness(1), 100, 0.2 * (1 + 1e-14), 5).rate == 1  # but for rounding
    with pytest.raises(ConfigError, match="above 1"):
        CyclicPoisson(Randomness(1), 100, 0.2 * (1 + 1e-9), 5)
    for rate in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="sample_rate"):
            CyclicPoisson(Randomness(1), 100, rate, 1)


def test_groups_without_records():
    drawing = CyclicPoisson(Randomness(1), 1, 0.25, 4)
    assert sorted(len(drawing.lot(t)) for t in range(4)) == [0, 0, 0, 1]


@pytest.mark.parametrize(("size", "batch"), [(60, 12), (61, 12), (5, 9), (7, 1)])
def test_every_record_once_per_epoch_in_the_same_lots(size, batch):
    drawing = FixedOrder(Randomness(), size, batch)
    period = -(-size // batch)
    assert drawing.period == period
    epoch = [drawing.lot(k).tolist() for k in range(period)]
    assert sorted(itertools.chain(*epoch)) == list(range(size))
    assert all(len(lot) == batch for lot in epoch[:-1])
    for k in range(4 * period):
        assert drawing.lot(k).tolist() == epoch[k % period]


def test_the_order_is_random_and_secret():
    def order(seed):
        drawing = FixedOrder(Randomness(seed), 2000, 1)
        return [int(drawing.lot(k)[0]) for k in range(2000)]

    assert order(1) == order(1)
    orders = [order(1), order(2), order(None), order(None)]
    assert len({tuple(o) for o in orders}) == 4
    # Neither sorted nor the same up to a shift: ranks in two orders are uncorrelated.
    for a, b in itertools.combinations([*orders, list(range(2000))], 2):
        assert stats.pearsonr(a, b).pvalue > FALSE_ALARM / 10


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize(
    "drawing",
    [CyclicPoisson(Randomness(5), 40, 0.1, 4), FixedOrder(Randomness(5), 40, 7)],
    ids=["cyclic", "fixed"],
)
def test_the_loader_hands_out_the_lots_of_the_drawing(drawing, physical):
    sampler = LotSampler(Randomness(5), 40, 0.1, 6, physical, drawing=drawing)
    handed = []
    data = DataLoader(TensorDataset(torch.arange(40)), batch_size=4)
    loader = PrivateLoader(data, sampler, handed.append)
    lots = [[] for _ in range(12)]
    for _ in range(2):
        for (rows,) in loader:
            lots[handed[-1].lot] += [] if handed[-1].empty else rows.tolist()
    assert lots == [drawing.lot(t).tolist() for t in range(12)]
