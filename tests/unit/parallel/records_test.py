"""Digests of records: the same for the same records in the same order, and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from vestige.parallel import records
from vestige.parallel.records import order_of


def test_a_digest_follows_records_and_their_order():
    x = torch.arange(12.0).view(6, 2)
    whole = order_of(TensorDataset(x, x[:, 0]))
    assert whole == order_of(TensorDataset(x.clone(), x[:, 0].contiguous())) and whole[1]
    assert whole != order_of(TensorDataset(x.flip(0), x[:, 0]))
    parts = [order_of(Subset(TensorDataset(x), own)) for own in ([0, 1], [1, 0], [0, 1])]
    assert parts[0] == parts[2] != parts[1] and parts[0][1]
    one, other = TensorDataset(x), TensorDataset(x + 1)
    joined = [order_of(ConcatDataset(some)) for some in ([one, other], [other, one], [one, other])]
    assert joined[0] == joined[2] != joined[1] and joined[0][1]


def test_of_data_that_do_not_show_their_records_goes_in_which_are_taken():
    """Each rank that shuffles for itself would have records of the others in its share of a lot."""
    hidden = [3, 1, 2]
    assert order_of(hidden) == order_of([1, 2, 3]) and not order_of(hidden)[1]
    assert order_of(hidden) != order_of([1, 2])
    taken = [order_of(Subset(hidden, own)) for own in ([0, 1], [1, 0], [0, 1])]
    assert taken[0] == taken[2] != taken[1] and not taken[0][1]
    assert not order_of(ConcatDataset([hidden, TensorDataset(torch.ones(2))]))[1]


def test_folders_of_torchvision_are_compared_by_their_files():
    files = [("a.png", 0), ("b.png", 1)]
    found = [order_of(SimpleNamespace(samples=some)) for some in (files, files[::-1], [*files])]
    assert found[0] == found[2] != found[1] and found[0][1]


class Table:
    """As a data set of Hugging Face is: columns, and which of their rows it has."""

    def __init__(self, values, indices=None):
        arrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install -e '.[data]'")
        self.data = arrow.table({"x": values, "text": [str(v) for v in values]})
        self._indices = None if indices is None else arrow.table({"indices": indices})

    def __len__(self):
        return len(self.data if self._indices is None else self._indices)


def test_a_hugging_face_data_set_is_compared_by_its_columns_and_rows(monkeypatch):
    whole = order_of(Table([1, 2, 3]))
    assert whole == order_of(Table([1, 2, 3])) != order_of(Table([1, 3, 2])) and whole[1]
    shuffled = [order_of(Table([1, 2, 3], own)) for own in ([0, 2, 1], [1, 2, 0], [0, 2, 1])]
    assert shuffled[0] == shuffled[2] != shuffled[1] and whole not in shuffled
    monkeypatch.setattr(records, "_MOST", 8)  # too much to be read: the rows still differ
    large = [order_of(Table([1, 2, 3], own)) for own in ([0, 2, 1], [1, 2, 0])]
    assert large[0] != large[1] and not large[0][1]
