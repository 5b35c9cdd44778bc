"""Observers are told what goes through the door."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.doors import door_of, linear_groups
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door
from vestige.release.observer import Observer
from vestige.sampling.streams import Randomness


@pytest.fixture
def groups():
    return linear_groups()


def exactly(number, bound):
    """A number of the whole data, to which one record adds at most `bound`."""
    return ClippedSum(torch.tensor([number], dtype=torch.float64), (bound,))


class Listed(Observer):
    """Writes down what it is told, and how much was on the ledger then."""

    def __init__(self, ledger):
        self.ledger, self.told, self.passages = ledger, [], []

    def note(self, event):
        self.told.append((event, self.ledger.steps))

    def arrives(self, passage):
        self.note("arrives")
        assert passage.values.numel() == 0

    def charged(self, event):
        self.note(f"charged {event.sample_rate:g}")

    def drawing(self, passage):
        self.note("drawing")

    def released(self, passage):
        self.note(passage.kind)
        self.passages.append(replace(passage, values=passage.values.clone()))


def test_observers_are_told_in_order_what_goes_through(groups):
    ledger = Ledger()
    door = door_of(groups, NoiseScale.shared(1.0), ledger)
    assert door.observers == []
    listed = Listed(ledger)
    door.observers.append(listed)
    total = torch.randn(groups.buffer().shape)
    look = door.first_look(ClippedSum(total, (2.0,)), 0.1, lot=3).values.clone()
    out = door.release(ClippedSum(total, (2.0,)), 0.1, lot=3)
    number = door.measure(exactly(5.0, 1.5), 2.0, lot=4)
    assert listed.told == [
        *(("arrives", 0), ("charged 0.1", 1), ("drawing", 1), ("first look", 1)),
        *(("arrives", 1), ("drawing", 1), ("release", 1)),
        *(("arrives", 1), ("charged 1", 2), ("drawing", 2), ("measurement", 2)),
    ]
    first, second, third = listed.passages
    assert torch.equal(first.values, look) and torch.equal(second.values, out.values)
    assert (first.step, second.step, second.lot, second.gain) == (0, 0, 3, 1.0)
    assert second.bounds == second.stds == (2.0,) and torch.equal(second.total, total)
    assert (float(third.total), float(third.values)) == (5.0, number)
    assert (third.bounds, third.stds) == ((1.5,), (3.0,))


def test_an_observer_may_put_earlier_releases_in_the_place_of_new_ones(groups):
    class Frozen(Observer):
        def released(self, passage):
            passage.values.fill_(7.0)
            if passage.noisy_counts is not None:
                passage.noisy_counts = (0.25,)

    counting = Door(groups, NoiseScale.shared(1.0), Randomness(), Ledger(), count_noise=1.0)
    counting.observers.append(Frozen())
    clipped = ClippedSum(groups.buffer(), (1.0,), torch.zeros(1))
    out = counting.release(clipped, 0.1)
    assert out.values.eq(7.0).all() and out.counts == (0.25,)
    assert counting.measure(exactly(5.0, 1.0), 1.0, lot=0) == 7.0
