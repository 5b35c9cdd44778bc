"""No record adds more than the bound, layer by layer, whatever its numbers are.

On a CPU bf16 is autocast and TF32 means numbers that are rounded to it; tests/gpu/layers_test.py
has the same on tensor cores.
"""

from __future__ import annotations

import pytest

from tests.support.hard_layers import HARD, LAYERS, contributions
from tests.support.products import PRECISIONS
from vestige.gradients.uses import LookedUp


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_record_adds_more_than_the_bound(name, precision):
    for hard in HARD:
        assert max(contributions(name, hard, precision, "cpu")) <= 1 + 1e-6, hard


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_an_ordinary_record_adds_all_of_the_bound(name, precision):
    assert min(contributions(name, {}, precision, "cpu")) > 0.99


def test_norms_without_a_slack_for_the_sum_would_be_noticed(monkeypatch):
    """Exact norms of terms that cancel: what the sum's rounding leaves passes unclipped."""

    def bare(self):
        same = self.indices.unsqueeze(1) == self.indices.unsqueeze(2)
        g = self.g.double()
        return (g @ g.transpose(1, 2)).mul_(same).sum((1, 2)).clamp_(min=0)

    monkeypatch.setattr(LookedUp, "square_norms", bare)
    found = [max(contributions("embedding", hard, "fp32", "cpu")) for hard in HARD]
    assert max(found) > 10
