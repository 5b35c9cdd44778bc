"""Products with weights that every row has its own of: every path equals a loop over rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.own_weights import (
    assert_close,
    expanded,
    loop,
    some_moves,
    traces,
)
from vestige import UnsupportedModel
from vestige.gradients.groups import partition


class Images(nn.Module):
    """Convolutions that take every path: shared weights, a group for each row, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.large = nn.Conv2d(16, 16, 3, padding=1, stride=2)
        self.small = nn.Conv2d(16, 24, 3, dilation=2, bias=False)
        self.out = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.large(F.elu(self.first(x), inplace=True)))
        return self.out(self.small(h).mean((2, 3)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_float32_paths_agree_with_the_loop_in_float64(channels_last):
    torch.manual_seed(1)
    model, x, cotangent = Images(), torch.randn(6, 3, 13, 13), torch.randn(6, 3)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    rows = expanded(model)
    moves = some_moves(6, rows.groups, torch.float32)
    for move in (None, moves.clone()):
        got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 6, move)
        twin = copy.deepcopy(model).double()
        known = None if move is None else moves.double()
        expected = loop(twin, x.double(), cotangent.double(), rows.groups, known)
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, 1e-5)


def test_tied_parameters_are_one_and_a_layer_used_twice_adds_up():
    torch.manual_seed(4)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.conv = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.b(torch.tanh(self.a(x))) @ self.a.weight)
            return self.conv(torch.tanh(self.conv(h.unsqueeze(1))))

    model, x = Shared().double(), torch.randn(5, 3, 4).double()
    rows, cotangent = expanded(model), torch.randn(5, 1, 3, 4).double()
    assert rows.groups.size == 16 + 4 + 10
    moves = some_moves(5, rows.groups)
    for move in (None, moves.clone()):
        got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 5, move)
        assert_close(got, loop(model, x, cotangent, rows.groups, None if move is None else moves))


def test_autocast_and_half_precision_weights():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2))
    x, cotangent = torch.randn(5, 3, 5, 5), torch.randn(5, 2)
    expected = loop(model, x, cotangent, partition(model, "flat"))

    def closure(dtype=None):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):
            out = model(x.to(dtype or x.dtype))
        (out * cotangent).sum().backward()

    assert_close(expanded(model).gradients(closure, 5)[0], expected, 0.02)
    model.bfloat16()
    rows = expanded(model)
    for move in (None, torch.zeros(5, rows.groups.size)):
        got, _ = rows.gradients(lambda: closure(torch.bfloat16), 5, move)
        assert got.dtype == torch.float32
        assert_close(got, expected, 0.02)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_mix_examples_are_refused(option):
    model, x = nn.Embedding(7, 3, **option), torch.randint(0, 7, (5, 4))
    before = traces(model)
    with pytest.raises(UnsupportedModel, match="max_norm or scale_grad_by_freq"):
        expanded(model).gradients(lambda: model(x).sum().backward(), 5)
    assert traces(model) == before


def test_a_sparse_embedding_gives_dense_gradients():
    model, x = nn.Embedding(7, 3, sparse=True).double(), torch.randint(0, 7, (5, 4))
    rows, cotangent = expanded(model), torch.randn(5, 4, 3).double()
    got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 5)
    dense = nn.Embedding.from_pretrained(model.weight.detach(), freeze=False)
    assert_close(got, loop(dense, x, cotangent, rows.groups))
