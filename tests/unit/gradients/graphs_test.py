"""A use that is taken apart and put together of other tensors is the same use of those."""

from __future__ import annotations

import pytest
import torch

from vestige.errors import UnsupportedModel
from vestige.gradients.graphs import taken_apart
from vestige.gradients.uses import LookedUp, Outer, PerExample, Viewed

WEIGHT = torch.zeros(6, 4, dtype=torch.float64)


def outer(n, t=None):
    positions = () if t is None else (t,)
    a, g = (torch.randn(n, *positions, d, dtype=torch.float64) for d in (4, 3))
    return Outer(a, g)


USES = {
    "outer": lambda n: outer(n),
    "outer with positions": lambda n: outer(n, 2),
    "per example": lambda n: PerExample(torch.randn(n, 5, dtype=torch.float64)),
    "looked up": lambda n: LookedUp(
        torch.randint(0, 6, (n, 3)), torch.randn(n, 3, 4, dtype=torch.float64), 6
    ),
    "viewed": lambda n: Viewed(outer(n, 2), WEIGHT, WEIGHT[1:4]),
}


@pytest.mark.parametrize("name", list(USES))
def test_a_use_is_put_together_of_other_tensors(name):
    made, other, others = [], USES[name](7), []
    build = taken_apart(USES[name](3), made)
    taken_apart(other, others)
    again = build(others)
    assert type(again) is type(other)
    assert len(made) == len(others) > 0
    assert torch.equal(again.dense(), other.dense())
    assert torch.equal(again.square_norms(), other.square_norms())


def test_a_tensor_that_two_parts_share_comes_once():
    shared, tensors = torch.randn(3, 4), []
    build = [taken_apart(use, tensors) for use in (Outer(shared, shared), PerExample(shared))]
    assert len(tensors) == 1
    assert build[0](tensors).a is build[1](tensors).values


def test_what_follows_the_number_of_rows_is_refused():
    class Symbol(torch.SymInt):
        pass

    use = PerExample(torch.randn(3, 4))
    use.shape = (Symbol(None),)
    with pytest.raises(UnsupportedModel, match="follows the number of rows"):
        taken_apart(use, [])
