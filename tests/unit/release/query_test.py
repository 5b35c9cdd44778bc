"""What goes into the door: nothing but a clipped sum, beside a branch of releases."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.support.doors import branch_of, door_of, linear_groups
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import Branch, ClippedSum, Release, recalled


@pytest.fixture
def groups():
    return linear_groups()


def test_what_makes_a_branch_makes_no_release(monkeypatch, groups):
    """Whoever gets hold of the proof that `recalled` gives a branch has no proof of a release."""
    assert type(recalled(torch.zeros(3), 0)) is Branch
    proofs = {}
    for kind in (Branch, Release):

        def init(self, *args, _certificate, kind=kind):
            proofs[kind] = _certificate

        monkeypatch.setattr(kind, "__init__", init)
    recalled(torch.zeros(3), 0)
    door_of(groups, NoiseScale.shared(1.0)).release(ClippedSum(groups.buffer(), (1.0,)), 0.1)
    monkeypatch.undo()
    with pytest.raises(TypeError, match=r"Door\.release"):
        Release(torch.zeros(3), 0, _certificate=proofs[Branch])
    with pytest.raises(TypeError, match="memory of releases"):
        Branch(torch.zeros(3), 0, _certificate=proofs[Release])


def test_the_door_takes_nothing_but_a_clipped_sum(groups):
    door = door_of(groups, NoiseScale.shared(1.0))
    public = door.release(ClippedSum(groups.buffer(), (1.0,)), 0.1)
    for raw in (groups.buffer(), [1.0], public, None):
        with pytest.raises(TypeError, match="ClippedSum"):
            door.release(raw, 0.1)
    assert door.steps == 1


def test_a_clipped_sum_cannot_be_saved_copied_or_printed():
    private = ClippedSum(torch.full((3,), 12345.0), (1.0,))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="private"):
            pickle.dumps(private, protocol)
    for way in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="private"):
            way(private)
    assert "12345" not in repr(private) + str(private)
    assert not hasattr(private, "__dict__")


def test_a_branch_must_come_from_a_history_and_belong_to_the_step(groups):
    door = door_of(groups, NoiseScale.shared(1.0))
    clipped = ClippedSum(groups.buffer(), (1.0,))
    for raw in (torch.randn(40), clipped, [0.0] * 40):
        with pytest.raises(TypeError, match="Branch"):
            door.release(clipped, 0.1, raw)
    with pytest.raises(TypeError, match="memory of releases"):
        Branch(torch.zeros(40), 0)
    with pytest.raises(RuntimeError, match="recalled for step 1, the release is step 0"):
        door.release(clipped, 0.1, branch_of(groups, torch.randn(40), 1))
    assert door.steps == 0
