"""Rows with weights of their own: a loop to hold them against, and what a pass may not touch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.support.reference import loop_gradients, take
from vestige.gradients.groups import partition
from vestige.gradients.per_row import Expanded


def moved_copy(model, groups, move):
    """A copy of the model at theta + move."""
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    with torch.no_grad():
        for slot in groups.slots:
            parameters[slot.name].add_(slot.view(move))
    return twin


def loop(model, x, cotangent, groups, moves=None, axis=0, pick=lambda out: out):
    """(n, P): row i's gradient of <cotangent_i, output_i> at theta + moves[i], row by row."""
    if moves is None:
        return loop_gradients(model, x, cotangent, groups, axis, pick)
    rows = []
    for i, move in enumerate(moves):
        one, twin = slice(i, i + 1), moved_copy(model, groups, move)
        row, weight = take(x, one, axis), take(cotangent, one, axis)
        rows.append(loop_gradients(twin, row, weight, groups, axis, pick))
    return torch.cat(rows)


def some_moves(rows, groups, dtype=torch.float64):
    moves = torch.randn(rows, groups.size, dtype=dtype)
    return moves.div_(moves.norm(dim=1, keepdim=True))


def assert_close(got, expected, tolerance=1e-10):
    assert got.shape == expected.shape
    assert (got - expected).norm() <= tolerance * expected.norm()
    assert expected.norm() > 0


def traces(model):
    """What a pass must leave as it was."""
    return (
        [sorted(m.__dict__) for m in model.modules()],
        [m.__dict__.get("forward") for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [len(p._backward_hooks or ()) for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [(k, id(t)) for m in model.modules() for k, t in {**m._parameters, **m._buffers}.items()],
        [t.tolist() for t in model.state_dict().values()],
    )


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(5, 3).double(), torch.randn(5, 2).double()


def expanded(model, axis=0, **options):
    return Expanded(model, partition(model, "flat"), axis, **options)


def once(model, x, c):
    (model(x) * c).sum().backward()


class Does(nn.Module):
    def __init__(self, action) -> None:
        super().__init__()
        self.inner, self.action = nn.Linear(3, 3), action
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor):
        return self.action(self, x)
