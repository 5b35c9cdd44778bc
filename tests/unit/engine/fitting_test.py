"""max_physical_batch_size="auto": what fits, from the model and the machine alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.loops import epoch, mlp, private, records
from vestige import ConfigError
from vestige.engine import fitting
from vestige.engine.fitting import most_that_fits

AUTO = {"max_physical_batch_size": "auto"}
SEEN: list[torch.Tensor] = []  # by the last model that was limited


class Limited(nn.Module):
    """An MLP on a device that has room for `room` rows."""

    def __init__(self, room):
        super().__init__()
        self.inner, self.room = mlp(), room
        SEEN.clear()

    def forward(self, x):
        SEEN.append(x.detach().clone())
        if len(x) > self.room:
            raise torch.OutOfMemoryError("no room")
        return self.inner(x)


class Wide(nn.Module):
    """Every row takes `mebibytes` and more of activations."""

    def __init__(self, mebibytes):
        super().__init__()
        self.first, self.last, self.times = nn.Linear(5, 8), nn.Linear(8, 3), mebibytes * 2**15

    def forward(self, x):
        x = self.first(x).unsqueeze(1).expand(-1, self.times, -1)
        return self.last(x.tanh().mean(1))


@given(st.integers(0, 400), st.integers(1, 300))
def test_the_search_ends_within_a_quarter_below_what_fits_and_never_above(room, most):
    tried = []

    def fits(n):
        tried.append(n)
        return n <= room

    found = most_that_fits(fits, most)
    if room >= most:
        assert found == most
    else:
        assert 0.75 * room - 1 <= found <= room
    assert max(tried) <= max(1, most) and len(tried) <= 14


def test_a_whole_lot_that_fits_comes_in_one_batch():
    engine, model, optimizer, loader = private(**AUTO)
    assert engine.plan.max_physical_batch_size is None and loader.batches_per_lot == 1
    assert epoch(model, optimizer, loader) == len(loader)


def test_a_device_that_is_full_is_believed(monkeypatch):
    """The way of a GPU: torch's own error says what does not fit, and nothing of a trial stays."""
    monkeypatch.setattr(fitting, "foreseen", lambda steps, _: fitting.told(steps))
    engine, model, optimizer, loader = private(Limited(7), **AUTO)
    assert engine.plan.max_physical_batch_size in (6, 7)
    assert max(len(x) for x in SEEN) > 7  # it was tried out
    assert epoch(model, optimizer, loader) == len(loader)
    assert engine.released == 4


def test_a_device_without_room_for_one_record_is_told(monkeypatch):
    monkeypatch.setattr(fitting, "foreseen", lambda steps, _: fitting.told(steps))
    with pytest.raises(ConfigError, match="do not fit into memory"):
        private(Limited(0), **AUTO)


def test_what_is_left_of_a_lot_comes_in_more_batches():
    engine, model, optimizer, loader = private(Limited(7), **AUTO)
    rows = engine.plan.max_physical_batch_size
    assert rows in (6, 7) and loader.batches_per_lot == -(-(6 + 6 * 6**0.5) // rows)
    assert epoch(model, optimizer, loader) == len(loader)
    assert engine.released == 4


def test_the_weights_are_those_of_the_number_itself():
    engine, model, optimizer, loader = private(Limited(7), **AUTO)
    rows = engine.plan.max_physical_batch_size
    other = private(Limited(7), max_physical_batch_size=rows)
    epoch(model, optimizer, loader)
    epoch(*other[1:])
    for one, two in zip(model.parameters(), other[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_no_number_of_a_record_is_tried():
    """The same for any records: the model never sees one, nor does the found number move."""
    seen, found = [], []
    for scale in (1.0, 1e6):
        model = Limited(7)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        engine, *_ = private(model, records(scale=scale), **AUTO)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(0)
        seen.append(list(SEEN))
        found.append(engine.plan.max_physical_batch_size)
    assert found[0] == found[1]
    data = records(scale=1.0).tensors[0]
    rows = torch.cat([x for x in seen[0] if x.ndim == 2])
    assert not (rows.unsqueeze(1) == data).all(2).any()
    assert [len(a) for a in seen[0]] == [len(b) for b in seen[1]]


def test_on_a_cpu_half_of_what_is_free_is_used(monkeypatch):
    """Growth is measured: of 256 MiB, rows of 4 MiB and its gradients get a half."""
    monkeypatch.setattr(fitting, "free_memory", lambda: 2**28)
    engine, *_ = private(Wide(4), batch_size=20, **AUTO)
    assert 3 <= engine.plan.max_physical_batch_size <= 16


def test_units_are_counted_whole():
    views = {"views": 3, "augment": lambda x: x + 0.1 * torch.randn_like(x)}
    engine, *_ = private(Limited(8), **AUTO, **views)
    assert engine.plan.max_physical_batch_size == 6 and engine.plan.units_per_batch == 2


@pytest.mark.parametrize(
    ("model", "words"), [(Limited(0), "do not fit"), (nn.Linear(4, 3), "does not run on synthetic")]
)
def test_what_cannot_be_found_is_refused(model, words):
    with pytest.raises(ConfigError, match=words):
        private(model, **AUTO)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_records_that_are_mappings_are_the_models_arguments():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

        def forward(self, tokens, labels=None):
            return self.head(self.table(tokens).mean(1))

    data = [{"tokens": torch.tensor([1, 2, 6]), "labels": torch.tensor(1)} for _ in range(12)]
    engine, *_ = private(Named(), data, **AUTO)
    assert engine.plan.max_physical_batch_size is None


def test_another_word_is_no_number():
    with pytest.raises(ConfigError, match="max_physical_batch_size='all'"):
        private(max_physical_batch_size="all")
