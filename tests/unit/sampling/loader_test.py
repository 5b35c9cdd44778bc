"""Poisson lots: exact inclusion, lots of every size, physical batches, workers and refusals.

Each distribution test raises a false alarm in at most one run in 10^7 (`FALSE_ALARM`, shared among
the comparisons that it makes).
"""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from vestige import ConfigError, PrivacyEngine, VestigeError
from vestige.sampling.collate import blank
from vestige.sampling.loader import (
    LotSampler,
    PrivateLoader,
    batches_of_a_lot,
    check_loader,
)
from vestige.sampling.lots import draw_lot
from vestige.sampling.streams import Randomness


class Numbers(Dataset):
    """Record i is the number i, as a dict, so that nothing takes the in-memory path."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"index": torch.tensor(index), "one": torch.ones(2)}


def loader_of(size=60, rate=0.1, lots=12, physical=None, seed=5, dataset=None, **options):
    """A private loader by itself, and the list of the batches it hands out."""
    sampler = LotSampler(Randomness(seed), size, rate, lots, physical)
    handed = []
    source = DataLoader(dataset or Numbers(size), batch_size=4, **options)
    return PrivateLoader(source, sampler, handed.append), handed


def expected_lots(first, count, size=60, rate=0.1, seed=5):
    return [draw_lot(Randomness(seed), t, size, rate).tolist() for t in range(first, first + count)]


def gather(batches, handed):
    """lot number -> the indices that came, an empty lot's stand-in left out."""
    lots = collections.defaultdict(list)
    for batch, note in zip(batches, handed, strict=True):
        assert len(batch["index"]) == note.rows
        lots[note.lot] += [] if note.empty else batch["index"].tolist()
    return lots


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("physical", [None, 1, 4])
def test_batches_are_the_drawn_lots_whatever_the_workers(physical, workers):
    loader, handed = loader_of(physical=physical, num_workers=workers)
    batches = list(loader)
    lots = gather(batches, handed)
    assert [lots[t] for t in range(12)] == expected_lots(0, 12)
    # ceil((6 + 6 sqrt(6)) / physical) batches of each of 12 lots.
    assert len(batches) == len(loader) == 12 * {None: 1, 1: 21, 4: 6}[physical]
    assert sum(note.last for note in handed) == 12
    if physical:
        assert max(note.rows for note in handed) <= physical
    # The last batch of a lot says so, and no batch of it comes later.
    for note, following in itertools.pairwise(handed):
        assert note.last == (following.lot != note.lot)
        assert following.lot == note.lot + note.last


def test_the_in_memory_path_draws_the_same_lots():
    x = torch.arange(60.0)
    data = TensorDataset(x, torch.stack([x, x], dim=1))
    for options in ({}, {"num_workers": 1}):
        loader, handed = loader_of(dataset=data, physical=5, **options)
        lots = collections.defaultdict(list)
        for (a, b), note in zip(loader, handed, strict=False):
            assert torch.equal(b, torch.stack([a, a], dim=1))
            lots[note.lot] += [] if note.empty else a.long().tolist()
        assert [lots[t] for t in range(12)] == expected_lots(0, 12)


def test_a_lot_has_as_many_batches_as_public_numbers_say():
    for lot, physical, batches in [
        (1, 1, 7),
        (4, 2, 8),
        (64, 16, 7),
        (100, 160, 1),
        (100, 159, 2),
        (256.5, 64, 6),
        (1000, None, 1),
    ]:
        assert batches_of_a_lot(lot, physical) == batches


class Fixed:
    """Lots of sizes that are given."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def lot(self, number):
        return np.arange(self.sizes[number])


def test_whatever_a_lots_size_is_its_batches_are_as_many():
    """Spare batches have no records; a lot beyond the bound comes in larger batches, whole."""
    sizes = (0, 1, 4, 10, 11, 40, 41, 60)
    sampler = LotSampler(Randomness(1), 60, 0.1, len(sizes), 4, drawing=Fixed(*sizes))
    handed = []
    loader = PrivateLoader(DataLoader(Numbers(60), batch_size=6), sampler, handed.append)
    batches = list(loader)
    assert len(batches) == len(loader) == 6 * len(sizes)
    lots = gather(batches, handed)
    assert [lots[t] for t in range(len(sizes))] == [list(range(size)) for size in sizes]
    for t, size in enumerate(sizes):
        notes = handed[6 * t : 6 * t + 6]
        full = [note.rows for note in notes if not note.empty]
        assert [note.last for note in notes] == [False] * 5 + [True]
        assert all(note.rows == 1 for note in notes if note.empty)
        assert max(full, default=0) <= max(4, -(-size // 6))
    assert [note.rows for note in handed[-6:]] == [10] * 6


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_after_a_break_the_next_epoch_goes_on_with_fresh_lots(options):
    loader, handed = loader_of(**options)
    batches = []
    for stop in (3, 1, 5):
        for seen, batch in enumerate(loader, start=1):
            batches.append(batch)
            if seen == stop:
                break
    lots = gather(batches, handed)
    assert [lots[t] for t in range(9)] == expected_lots(0, 9)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_no_lot_is_ever_handed_out_twice(options):
    """A second iteration inside the first: its lots must not come again when the first goes on.

    Two releases of the same lot are not two independent Poisson samples, which is what is charged.
    """
    loader, handed = loader_of(**options)
    batches = []
    outer = iter(loader)
    batches.append(next(outer))
    batches += list(loader)
    try:
        batches += list(outer)
    except VestigeError:  # refusing to go on is as good
        del handed[len(batches) :]
    numbers = [note.lot for note in handed]
    assert len(numbers) == len(set(numbers))
    lots = gather(batches, handed)
    assert all(lots[t] == expected_lots(t, 1)[0] for t in lots)


def test_empty_lots_are_one_blank_row_each():
    x = torch.full((40, 3), 7.0)
    for dataset in (TensorDataset(x), [(row,) for row in x]):
        loader, handed = loader_of(size=40, rate=0.01, lots=60, dataset=dataset)
        empty = 0
        for (batch,), note in zip(loader, handed, strict=False):
            assert batch.shape == (note.rows, 3)
            assert (batch == (0 if note.empty else 7)).all()
            empty += note.empty
        assert note.last
        assert 10 < empty < 60
        assert len(handed) == 60


def test_an_empty_lot_reaches_a_custom_collate_function():
    def collate(rows):
        return {
            "x": torch.stack([r["one"] for r in rows]),
            "names": [str(r["index"]) for r in rows],
        }

    loader, handed = loader_of(size=9, rate=1e-9, lots=3, collate_fn=collate)
    for batch in loader:
        assert batch["x"].tolist() == [[0.0, 0.0]]
        assert batch["names"] == [""]
    assert [note.empty for note in handed] == [True] * 3


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_a_blank_batch_has_the_structure_and_nothing_of_the_example():
    example = {
        "x": torch.full((1, 4), 5.0),
        "pair": Pair(torch.tensor([3]), [torch.tensor([True])]),
        "text": ["secret"],
        "number": (4, 2.5, b"secret"),
        "array": np.full((1, 3), 9.0),
    }
    empty = blank(example)
    assert set(empty) == set(example)
    assert isinstance(empty["pair"], Pair)
    assert isinstance(empty["pair"].right, list)
    assert empty["x"].shape == (1, 4)
    assert empty["x"].dtype == torch.float32
    assert empty["x"].untyped_storage().data_ptr() != example["x"].untyped_storage().data_ptr()
    assert empty["x"].untyped_storage().nbytes() == 16
    for value in (empty["x"], empty["pair"].left, empty["pair"].right[0]):
        assert not value.any()
    assert empty["text"] == [""]
    assert empty["number"] == (0, 0.0, b"")
    assert not np.shares_memory(empty["array"], example["array"])
    assert not empty["array"].any()


def test_a_blank_row_keeps_no_larger_storage_alive():
    """x[:0] or an expanded row would carry a whole example in its storage."""
    data = torch.arange(1.0, 101.0)
    loader, _ = loader_of(size=10, rate=1e-9, lots=1, dataset=TensorDataset(data.view(10, 10)))
    ((row,),) = list(loader)
    assert row.untyped_storage().nbytes() == row.numel() * row.element_size()
    assert not torch.frombuffer(bytearray(bytes(row.untyped_storage())), dtype=row.dtype).any()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(19, -1, -1))

    def __len__(self):
        return 20


DATA = TensorDataset(torch.arange(20.0).view(20, 1))


REFUSED = {
    "weighted": (lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 20, 20))),
    "subset": (lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(5)))),
    "custom": (lambda: DataLoader(DATA, 4, sampler=Backwards())),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False))
    ),
    "no batch": (lambda: DataLoader(DATA, batch_size=None)),
    "iterable": (lambda: DataLoader(Endless(), 4)),
    "replacement": (lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True))),
    "fewer": (lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=7))),
    "another source": (lambda: DataLoader(DATA, 4, sampler=SequentialSampler(range(5)))),
    "dealt out": (lambda: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0))),
    "empty": (lambda: DataLoader(TensorDataset(torch.zeros(0, 1)), 4)),
    "a list": (lambda: [torch.zeros(4, 1)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loaders_that_poisson_lots_cannot_stand_in_for_are_refused(name):
    loader = REFUSED[name]()
    with pytest.raises(ConfigError, match=r"data_loader|batch_size"):
        check_loader(loader)
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 4),
        DataLoader(DATA, 4, shuffle=True),
        DataLoader(DATA, 4, drop_last=True),
        DataLoader(DATA, 4, sampler=SequentialSampler(DATA)),
        DataLoader(Subset(DATA, range(10)), 4, shuffle=True),
        DataLoader(ConcatDataset([DATA, DATA]), 4),
        DataLoader(DATA, 4, collate_fn=default_collate),
    ],
)
def test_ordinary_loaders_are_accepted(loader):
    assert check_loader(loader) == 4


def test_a_subset_is_sampled_within_itself():
    subset = Subset(Numbers(1000), range(500, 560))
    loader, handed = loader_of(dataset=subset)
    lots = gather(list(loader), handed)
    assert [lots[t] for t in range(12)] == [[500 + i for i in lot] for lot in expected_lots(0, 12)]


def test_shuffling_is_replaced_by_poisson_lots():
    """Over an epoch of a shuffled loader each record comes once; here one may come twice."""
    sampler = LotSampler(Randomness(1), 50, 0.1, 10)
    loader = PrivateLoader(DataLoader(Numbers(50), 5, shuffle=True), sampler, lambda _: None)
    counts = collections.Counter(i for batch in loader for i in batch["index"].tolist())
    assert len(counts) < 50
    assert max(counts.values()) > 1


def test_a_private_loader_is_not_made_private_again():
    loader, _ = loader_of()
    with pytest.raises(ConfigError, match="already private"):
        check_loader(loader)
