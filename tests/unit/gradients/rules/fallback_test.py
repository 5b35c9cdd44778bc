"""Modules that run one row at a time: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from tests.support.reference import captured_sum, check_sum_of_zoo, clip_and_sum, loop_gradients
from tests.support.zoo import BY_RULE
from vestige import PrivacyError, UnsupportedModel
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["fallback"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)


class Distances(nn.Module):
    """A layer that no rule covers, on rows and on a table that is handed to it."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, x, table, scale=None):
        keys = self.key(table)  # a product of two parameters
        scores = x @ keys.t()
        return scores if scale is None else scale(scores)


class SharedTable(nn.Module):
    """A table for all layers, and a module that is handed on: neither is the layer's own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)
        self.scale = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Distances(), Distances()])

    def forward(self, x):
        x = x + self.table.weight[0]
        for layer in self.layers:
            x = layer(torch.tanh(x), self.table.weight, scale=self.scale)
        return self.scale(x)


@pytest.mark.parametrize("rows", [1, 4, 5])  # as many as the table has, and others
@pytest.mark.parametrize("physical", [1, 3, None])
def test_parameters_and_modules_that_are_arguments_have_gradients_by_row(rows, physical):
    torch.manual_seed(0)
    model, x = SharedTable().double(), torch.randn(rows, 3, 4).double()
    groups, cotangent = partition(model, "flat"), torch.randn(rows, 3, 4).double()
    gradients = loop_gradients(model, x, cotangent, groups)
    bound = float(gradients.norm(dim=1).median())
    expected = clip_and_sum(gradients, groups, Clip((bound,)))
    got, watch = captured_sum(model, x, cotangent, bounds=bound, physical=physical)
    assert watch.runs_row_by_row()
    assert (got - expected).norm() <= 1e-9 * expected.norm()


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, past_key_values=None):
        if past_key_values is not None:
            past_key_values.append(x)
        return x @ torch.softmax(self.weight, 0)


class Generator(nn.Module):
    """A model that keeps a cache if its configuration says so, or always."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always
        self.config = types.SimpleNamespace(use_cache=True)
        self.layer = Caching()

    def forward(self, x):
        asked = self.always or self.config.use_cache
        return self.layer(x, past_key_values=[] if asked else None)


def test_a_cache_is_off_in_training_and_refused_where_it_is_asked_for():
    torch.manual_seed(0)
    model, x = Generator().double(), torch.randn(5, 4).double()
    groups, cotangent = partition(model, "flat"), torch.randn(5, 4).double()
    expected = clip_and_sum(loop_gradients(model, x, cotangent, groups), groups, Clip((1.0,)))
    got, _ = captured_sum(model, x, cotangent)
    assert torch.allclose(got, expected, rtol=1e-9)
    assert model.config.use_cache is True  # as it was
    with pytest.raises(UnsupportedModel, match=r"past_key_values.*use_cache=False"):
        captured_sum(Generator(always=True).double(), x, cotangent)


class KeepsInEval(nn.Module):
    """What it makes of its parameter is kept from pass to pass, except in training."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.randn(4, 4)), {}

    def forward(self, x):
        if self.training:
            return x @ torch.softmax(self.weight, 0)
        self.kept.setdefault("weight", torch.softmax(self.weight, 0))
        return torch.bmm(x.unsqueeze(1), self.kept["weight"].expand(len(x), 4, 4)).squeeze(1)


def test_a_layer_that_keeps_tensors_in_eval_is_told_to_train():
    x, cotangent = torch.randn(5, 4), torch.randn(5, 4)
    model = nn.Sequential(KeepsInEval())
    captured_sum(model, x, cotangent)
    with pytest.raises(UnsupportedModel, match=r"in eval\(\): call model\.train\(\)"):
        captured_sum(model.eval(), x, cotangent, physical=3)


@pytest.mark.parametrize("how", ["object", "closure", "attribute"])
def test_a_row_does_not_meet_the_whole_batch_beside_its_arguments(how):
    """The layer has no rule, so it runs row by row; what it reaches is not split into rows."""

    class Reaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x, reach):
            sign = torch.where((reach() == 7).any(), -1.0, 1.0)
            return torch.linalg.matrix_exp(self.weight).mul(x.sum()) * sign

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.kept = Reaching(), None

        def forward(self, x):
            holder = types.SimpleNamespace(x=x)
            self.kept = types.SimpleNamespace(x=x)
            reach = {
                "object": lambda: holder.x,
                "closure": lambda: x,
                "attribute": lambda: self.kept.x,
            }[how]
            try:
                return self.layer(x, reach).flatten(1)
            finally:
                self.kept = None

    with pytest.raises(PrivacyError, match="reaches the whole batch"):
        captured_sum(Model(), torch.randn(4, 5), torch.randn(4, 9))
