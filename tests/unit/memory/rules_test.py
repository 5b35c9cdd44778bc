"""Memory rules at their edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.memory_runs import private, releases, run
from vestige.gradients.groups import partition
from vestige.memory.history import History
from vestige.memory.recall import Recollection
from vestige.memory.rules import FractionalMemory, UniformMemory, shuffled
from vestige.methods import FO, SMA, Exponential, Uniform
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door, Position
from vestige.sampling.streams import Randomness


@pytest.mark.parametrize("impostor", ["gradient", "sum", "list", "nothing"])
def test_what_is_no_release_is_a_type_error(impostor):
    stream, groups = releases(1)
    raw = {
        "gradient": torch.randn(50, dtype=torch.float64),
        "sum": ClippedSum(torch.randn(50, dtype=torch.float64), (1.0,)),
        "list": [1.0] * 50,
        "nothing": None,
    }[impostor]
    rule = FO().rule(4)
    memory = Recollection(rule, groups, groups.buffer(), 0.9, Position())
    memory.lot_begins()
    with pytest.raises(TypeError, match="releases only"):
        memory.released(raw, None)
    with pytest.raises(TypeError, match="releases only"):
        History(groups.segments(), groups.buffer(), 3, 0.3).append(raw)
    for each in (rule, SMA().rule(4), UniformMemory(3), Exponential().rule(4)):
        with pytest.raises(TypeError, match="View"):
            each.recall(raw)
    memory.released(next(stream), None)  # and a release is taken


def test_strong_tempering_leaves_the_newest_release_and_no_nan():
    """Raw weights of exp(-1e6 j) underflow; normalised in logarithms they are 1, 0, 0, ..."""
    stream, groups = releases(5)
    history = History(groups.segments(), groups.buffer(), 4, 0.3)
    for release in stream:
        history.append(release)
    rule = FO(tempering=1e6, window=4).rule(1)
    found = rule.recall(history.view())
    assert found.weights.tolist() == [[1.0, 0.0, 0.0]]
    assert found.depth.tolist() == [1.0]


def test_silent_releases_give_no_nan():
    """No noise and no gradient: every release is zero, and so are norms, gates and branches."""
    model = nn.Linear(6, 3)
    groups = partition(model, "flat")
    for method in (FO(), SMA(), Uniform(), Exponential()):
        door = Door(groups, NoiseScale.shared(0.0), Randomness(1), Ledger())
        memory = Recollection(method.rule(4), groups, groups.buffer(), 0.9, door.position)
        for _ in range(5):
            memory.lot_begins()
            release = door.release(ClippedSum(groups.buffer(), (1.0,)), 1.0)
            memory.released(release, None)
            flat = [v for v in memory.diagnostics().values() if isinstance(v, list)]
            assert "nan" not in str(flat)
        assert memory.branch is None or not memory.branch.values.any()


@given(st.integers(0, 30), st.integers(0, 10_000))
def test_a_shuffle_is_a_permutation_without_fixed_points(size, seed):
    items = list(range(100, 100 + size))
    mixed = shuffled(items, seed)
    assert sorted(mixed) == items
    assert mixed == shuffled(items, seed)
    assert size < 2 or all(a != b for a, b in zip(items, mixed, strict=True))


def test_fractional_memory_takes_the_whole_release_whatever_the_clipping():
    """Scores per layer would differ between layers; FO has one of each."""
    assert FractionalMemory.groupwise is False
    engine, *rest = private(FO(window=3), clipping="per_layer")
    run(engine, *rest, 4)
    assert engine.diagnostics()["groups"] == ["all"]
    assert len(engine.plan.group_names) == 4
