"""Names of autograd nodes: an operation's own, however often they are asked."""

from __future__ import annotations

import torch

from vestige.gradients.nodes import name_of


class MulBackward0(torch.autograd.Function):
    """A user's operation that is called as one of torch's nodes is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_node_has_the_name_of_its_operation_however_often_it_is_asked():
    x = torch.ones(3, requires_grad=True)
    made = [(x * 2, "Mul"), (MulBackward0.apply(x), "MulBackward0Backward"), (x.exp(), "Exp")]
    for _ in range(2):
        assert [name_of(out.grad_fn) for out, _ in made] == [name for _, name in made]
        made.reverse()
