"""Ranks that are about to do different things stop, and say what."""

from __future__ import annotations

import pytest

from vestige.errors import PrivacyError
from vestige.parallel.meetings import Doing, Meetings
from vestige.parallel.ranks import Ranks
from vestige.release.query import Position


class Two(Ranks):
    """Two ranks, of which the other one is where it was put."""

    other: tuple[int, ...]

    def each_at(self, place):
        return [place, self.other]


@pytest.mark.parametrize("doing", list(Doing))
def test_ranks_that_agree_go_on(doing):
    ranks = Two()
    ranks.other = (doing, 3, 2)
    Meetings(ranks, Position(3, 2))(doing)


@pytest.mark.parametrize(
    "other, words",
    [
        ((Doing.EVALUATING, 3, 2), "runs the model without gradients"),
        ((Doing.SAVING, 3, 2), "saves a checkpoint"),
        ((Doing.TRAINING, 4, 2), "on a batch .lot 4, 2 releases"),
        ((Doing.TRAINING, 3, 1), "on a batch .lot 3, 1 releases"),
    ],
)
def test_ranks_that_differ_stop_and_say_what_each_does(other, words):
    ranks = Two()
    ranks.other = other
    said = rf"rank 0 runs the model on a batch .lot 3, 2 releases. where rank 1 .*{words}"
    with pytest.raises(PrivacyError, match=said):
        Meetings(ranks, Position(3, 2))(Doing.TRAINING)
