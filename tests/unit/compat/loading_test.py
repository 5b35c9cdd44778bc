"""Opacus' loaders over the engine's lots."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.support.loops import mlp, private, records, step
from vestige.data_loader import DPDataLoader
from vestige.errors import ConfigError, PrivacyError
from vestige.utils.batch_memory_manager import BatchMemoryManager


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_physical_batches_change_no_release():
    engine, model, optimizer, loader = private()
    sizes = []
    for _ in range(2):
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        )
        with manager as pieces:
            for x, y in pieces:
                sizes.append(len(x))
                step(model, optimizer, x, y)
    assert max(sizes) == 2 and len(sizes) > 8 and engine.released == 8

    whole, other, its, lots = private()
    for _ in range(2):
        for x, y in lots:
            step(other, its, x, y)
    torch.testing.assert_close(weights(model), weights(other))
    assert engine.ledger.events == whole.ledger.events
    # After the block lots come in one piece again.
    for x, y in loader:
        step(model, optimizer, x, y)
    assert engine.released == 12


def test_the_two_must_be_of_one_run():
    _, _, optimizer, loader = private()
    other = private()[2]
    plain = DataLoader(records(), batch_size=6)
    for wrong in (
        (loader, other),
        (plain, optimizer),
        (loader, torch.optim.SGD(mlp().parameters())),
    ):
        with pytest.raises(ConfigError, match="not of one private run: pass both"):
            BatchMemoryManager(data_loader=wrong[0], max_physical_batch_size=2, optimizer=wrong[1])
    with pytest.raises(ConfigError, match="max_physical_batch_size=0"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=0, optimizer=optimizer)


def test_a_method_that_needs_whole_lots_says_so():
    model = mlp()
    _, _, optimizer, loader = private(model, method="dp-sam")
    with pytest.raises(ConfigError, match="needs it in one piece"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)


def test_no_batch_comes_out_before_an_engine_knows_of_it():
    loader = DPDataLoader(records(), sample_rate=0.25, drop_last=True, generator=None)
    assert (len(loader), loader.batch_size, loader.sample_rate) == (4, 6, 0.25)
    with pytest.raises(PrivacyError, match=r"pass it to make_private\(data_loader=...\)"):
        next(iter(loader))


def test_a_sampler_or_ranks_are_refused():
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    with pytest.raises(ConfigError, match="WeightedRandomSampler"):
        DPDataLoader.from_data_loader(DataLoader(records(), batch_size=6, sampler=sampler))
    for make in (
        lambda: DPDataLoader(records(), sample_rate=0.25, distributed=True),
        lambda: DPDataLoader.from_data_loader(DataLoader(records(), 6), distributed=True),
    ):
        with pytest.raises(PrivacyError, match=r"distributed=True.* docs/scaling.md"):
            make()


def test_an_ordinary_loader_is_no_private_one():
    assert not isinstance(DataLoader(records(), batch_size=6), DPDataLoader)
    assert isinstance(private()[3], DPDataLoader)
