"""Which rows a drawn user has in a lot: uniform, of its own, and told to nobody."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch

from vestige.errors import ConfigError
from vestige.sampling.loader import LotSampler, batches_of_a_lot
from vestige.sampling.streams import Randomness
from vestige.sampling.units import Units

IDS = ["ann", "bob", "ann", "cid", "bob", "ann", "ann", "ann"]  # five, two and one row


def units(rows=3, ids=IDS):
    return Units(ids, rows, len(ids))


def test_a_unit_has_its_own_records_and_stand_ins_of_weight_zero():
    rows, weights = units().rows(Randomness(1), 0, [1, 2])
    assert rows == [1, 4, 1, 3, 3, 3]
    assert weights.tolist() == [1.5, 1.5, 0, 3, 0, 0]


def test_units_with_all_their_rows_need_no_weights():
    rows, weights = units(2).rows(Randomness(1), 0, [0, 1])
    assert weights is None
    assert set(rows[:2]) < {0, 2, 5, 6, 7}
    assert rows[2:] == [1, 4]


def test_no_unit_has_no_rows():
    assert units().rows(Randomness(1), 0, []) == ([], None)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ids_come_in_any_form_and_only_their_order_counts(kind):
    made = Units(kind([30, 10, 30, 20]), 2, 4)
    assert len(made) == 3
    assert made.rows(Randomness(1), 0, [0, 1, 2])[0] == [1, 1, 3, 3, 0, 2]


def test_rows_of_a_unit_are_a_function_of_key_lot_and_unit():
    many = Units([0] * 40 + [1] * 40, 4, 80)
    alone = many.rows(Randomness(7), 3, [1])[0]
    assert many.rows(Randomness(7), 3, [0, 1])[0][4:] == alone  # whoever else is in the lot
    assert many.rows(Randomness(7), 4, [1])[0] != alone
    assert many.rows(Randomness(8), 3, [1])[0] != alone
    first = many.rows(Randomness(7), 3, [0])[0]
    assert [row + 40 for row in first] != alone


def test_every_choice_of_rows_is_equally_likely():
    made, seen, draws = units(2), Counter(), 4000
    randomness = Randomness(11)
    for lot in range(draws):
        seen[tuple(made.rows(randomness, lot, [0])[0])] += 1
    pairs = list(combinations([0, 2, 5, 6, 7], 2))
    expected = draws / len(pairs)
    chi_square = sum((seen[pair] - expected) ** 2 / expected for pair in pairs)
    assert sum(seen[pair] for pair in pairs) == draws
    assert chi_square < 27.9  # 9 degrees of freedom: once in 1,000


def test_rows_of_shards_are_chosen_by_streams_of_their_own():
    many, key = Units([0] * 40, 4, 40), b"k" * 32
    shards = [Randomness(key=key, share=(rank, 2), sharded=True) for rank in range(2)]
    assert many.rows(shards[0], 0, [0])[0] != many.rows(shards[1], 0, [0])[0]
    ranks = [Randomness(key=key, share=(rank, 2)) for rank in range(2)]
    assert many.rows(ranks[0], 0, [0])[0] == many.rows(ranks[1], 0, [0])[0]


def sampler(seed, users=300, rate=0.05, physical=None, rows=3, share=(0, 1)):
    ids = np.repeat(np.arange(users), np.arange(users) % 5 + 1)
    pieces = batches_of_a_lot(rate * users, physical, share[1])
    randomness = Randomness(seed, share=share)
    made = LotSampler(randomness, users, rate, 60, physical, pieces=pieces)
    made.units = Units(ids, rows, len(ids))
    return made, ids


def test_lots_of_units_are_poisson():
    made, ids = sampler(3)
    counts, sizes = Counter(), []
    for rows in made:
        drawn = {int(ids[row]) for row in rows}
        counts.update(drawn)
        sizes.append(len(drawn))
        assert len(rows) == 3 * len(drawn)
    lots, rate = len(sizes), 0.05
    mean, variance = 300 * rate, 300 * rate * (1 - rate)
    assert abs(np.mean(sizes) - mean) < 4 * math.sqrt(variance / lots)
    assert abs(np.var(sizes) - variance) < 4 * variance * math.sqrt(2 / lots)
    inclusions = np.array([counts[user] for user in range(300)])
    expected = lots * rate  # whatever the number of a user's rows
    chi_square = float(((inclusions - expected) ** 2 / (expected * (1 - rate))).sum())
    assert abs(chi_square - 300) < 4 * math.sqrt(2 * 300)
    few = inclusions[np.arange(300) % 5 == 0].mean()
    many = inclusions[np.arange(300) % 5 == 4].mean()
    assert abs(few - many) < 4 * math.sqrt(2 * expected / 60)


@pytest.mark.parametrize("share", [(0, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("physical", [1, 4, None])
def test_no_unit_is_split_over_batches_or_ranks(physical, share):
    made, ids = sampler(4, physical=physical, share=share)
    seen = Counter()
    for rows in made:
        batch = made.batches[-1]
        by_unit = [ids[rows[i : i + 3]] for i in range(0, len(rows), 3)]
        assert all(len(set(unit)) == 1 for unit in by_unit)
        seen.update((batch.lot, int(unit[0])) for unit in by_unit)
        assert batch.unit_rows == 3
        assert batch.rows == max(3, len(rows))
        assert batch.empty == (not rows)
    assert set(seen.values()) == {1}


def test_ranks_share_the_units_of_a_lot():
    whole = sorted(int(i) for made, ids in [sampler(4)] for rows in made for i in ids[rows])
    parts = [sampler(4, share=(rank, 3)) for rank in range(3)]
    assert sorted(int(i) for made, ids in parts for rows in made for i in ids[rows]) == whole


def test_units_of_one_row_are_drawn_like_records():
    plain = LotSampler(Randomness(6), 50, 0.1, 20)
    users = LotSampler(Randomness(6), 50, 0.1, 20)
    users.units = Units(np.arange(50), 1, 50)
    assert list(plain) == list(users)


def test_ids_are_not_saved_and_not_shown():
    made = units()
    with pytest.raises(TypeError, match="cannot be saved"):
        pickle.dumps(made)
    assert "ann" not in repr(made) + str(made)
    assert not any("ann" in digest for digest in made.digests())


def test_digests_tell_ids_and_owners_apart():
    same, mixed, renamed = units(), units(ids=IDS[::-1]), units(ids=["x" + i for i in IDS])
    assert units().digests() == same.digests()
    assert mixed.digests()[1:] == same.digests()[1:]
    assert mixed.digests()[0] != same.digests()[0]
    assert set(renamed.digests()[1:]).isdisjoint(same.digests())


@pytest.mark.parametrize(
    ("ids", "rows", "match"),
    [
        ([1, 2], None, "without rows_per_unit"),
        ([1, 2], 0, "rows_per_unit=0"),
        ([1, 2], 1.5, "rows_per_unit=1.5"),
        ([1, 2, 3], 2, r"shape \(3,\) for 2 records"),
        ([[1], [2]], 2, r"shape \(2, 1\) for 2 records"),
        ([1.0, math.nan], 2, "no id for some of the records"),
        (np.array(["a", None], object), 2, "no id for some of the records"),
        (np.array(["a", 3], object), 2, "several types"),
    ],
)
def test_what_are_no_units_is_refused(ids, rows, match):
    with pytest.raises(ConfigError, match=match):
        Units(ids, rows, 2)


@pytest.mark.parametrize(
    "ids", [[1, 2], [1.0, 2.0], ["1", "2"], [b"1", b"2"], torch.tensor([1, 2])]
)
def test_digests_are_the_same_for_an_id_of_another_type(ids):
    """A user on two ranks is found, also where one of them has read numbers and one text."""
    assert Units(ids, 1, 2).digests() == Units([1, 2], 1, 2).digests()


@pytest.mark.parametrize(
    "ids",
    [
        [float("nan"), "2", "3"],
        ["1", None, "3"],
        ["1", "", "3"],
        ["1", "NaN", "3"],
        np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
        np.array(["1", "nan", "3"]),
    ],
)
def test_records_of_nobody_are_refused_in_every_form(ids):
    with pytest.raises(ConfigError, match="no id for some of the records"):
        Units(ids, 1, 3)


def test_ids_in_half_precision_are_read():
    assert len(Units(torch.tensor([1, 2, 2], dtype=torch.bfloat16), 1, 3)) == 2
