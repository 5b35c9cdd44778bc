"""Parts behind the door: their moments, and what they keep: saved, checked, given back."""

from __future__ import annotations

import pytest
import torch

from tests.support.small_runs import private, run
from vestige import ConfigError
from vestige.release.part import Part, Saved


class Inner(Saved):
    saved = ("scale",)

    def __init__(self):
        self.scale = 2.0


class Kept(Part):
    name, what = "kept", "keepsake"
    saved = ("count", "flag", "bounds", "values", "by_name", "inner")

    def __init__(self):
        self.count, self.flag, self.bounds = 3, True, (1.0, 2.0)
        self.values, self.by_name = torch.arange(4.0), {"a": torch.ones(2)}
        self.inner = Inner()


def test_a_state_is_a_copy_and_comes_back_in_place():
    part, other = Kept(), Kept()
    state = part.state_dict()
    assert state["bounds"] == [1.0, 2.0] and state["inner"] == {"scale": 2.0}
    part.values.zero_()
    assert state["values"].tolist() == [0, 1, 2, 3]
    other.count, other.flag, other.bounds, other.inner.scale = 0, False, (5.0, 6.0), 9.0
    place = other.values.zero_().data_ptr()
    other.check_state(state, 3)
    other.load_state_dict(state)
    assert (other.count, other.flag, other.bounds, other.inner.scale) == (3, True, (1.0, 2.0), 2.0)
    assert other.values.tolist() == [0, 1, 2, 3] and other.values.data_ptr() == place


@pytest.mark.parametrize(
    "damage",
    [
        {"count": -1},
        {"count": 1.5},
        {"flag": 1},
        {"bounds": [1.0]},
        {"bounds": [1.0, "x"]},
        {"values": torch.zeros(5)},
        {"values": [0.0] * 4},
        {"by_name": {}},
        {"inner": {"scale": float("nan")}},
        {"inner": None},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(damage):
    part = Kept()
    with pytest.raises(ConfigError, match="the saved keepsake does not fit"):
        part.check_state(part.state_dict() | damage, 3)
    whole = {k: v for k, v in part.state_dict().items() if k not in damage}
    with pytest.raises(ConfigError, match="the saved keepsake does not fit"):
        part.check_state(whole, 3)
    assert part.count == 3 and part.values.tolist() == [0, 1, 2, 3]


class Noted(Part):
    """Writes down its moments."""

    def __init__(self):
        self.seen = []

    def lot_begins(self):
        self.seen.append("begins")

    def lot_ends(self):
        self.seen.append("ends")

    def released(self, release, gradient):
        assert torch.equal(gradient.values, release.values / gradient.batch_size)
        self.seen.append(f"released {release.step}")

    def stepped(self):
        self.seen.append("stepped")


def test_every_lot_has_the_same_four_moments():
    engine, model, optimizer, loader = private("dp-sgd")
    noted = Noted()
    engine._run.parts = (*engine._run.parts, noted)
    run(engine, model, optimizer, loader, 2)
    moments = ["begins", "ends", "released 0", "stepped", "begins", "ends", "released 1", "stepped"]
    assert noted.seen == moments
    next(iter(loader))
    engine.abandon_lot()
    assert noted.seen[len(moments) :] == ["begins", "ends"]


def test_a_withheld_gradient_leaves_the_weights_where_they_are():
    class Withholding(Part):
        withholds = True

        def released(self, release, gradient):
            gradient.withheld = True

        def stepped(self):
            raise AssertionError("the weights have not moved")

    engine, model, optimizer, loader = private("dp-sgd")
    engine._run.parts = (Withholding(),)
    before = [p.detach().clone() for p in model.parameters()]
    run(engine, model, optimizer, loader, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert engine.released == 2
