"""Digests of records: the same for the same records in the same order, and for nothing else."""

from __future__ import annotations

import torch
from torch.utils.data import Subset, TensorDataset

from vestige.parallel.records import order_of


def test_a_digest_follows_records_and_their_order():
    x = torch.arange(12.0).view(6, 2)
    whole = order_of(TensorDataset(x, x[:, 0]))
    assert whole == order_of(TensorDataset(x.clone(), x[:, 0].contiguous()))
    assert whole != order_of(TensorDataset(x.flip(0), x[:, 0]))
    parts = [order_of(Subset(TensorDataset(x), own)) for own in ([0, 1], [1, 0], [0, 1])]
    assert parts[0] == parts[2] != parts[1]


def test_data_that_do_not_show_their_records_have_no_digest():
    assert order_of([1, 2]) is None
    assert order_of(Subset([1, 2], [0])) is None
