"""Opacus' validator and layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.loops import mlp, private, step
from vestige.errors import UnsupportedModel
from vestige.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, dp_rnn
from vestige.validators import ModuleValidator, module_validator
from vestige.validators.errors import UnsupportedModuleError


def bad():
    inner = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), inner, norm)


def test_every_layer_that_is_wrong_is_named():
    errors = ModuleValidator.validate(bad())
    for error, place in zip(errors, ("'1'", "'2.1'", "'3'"), strict=True):
        assert isinstance(error, UnsupportedModuleError) and place in str(error)
    with pytest.raises(UnsupportedModel, match=r"module '1' \(BatchNorm2d\)"):
        ModuleValidator.validate(bad(), strict=True)
    assert not ModuleValidator.is_valid(bad())


def test_a_fixed_copy_is_valid_and_the_original_is_left_alone():
    model = bad()
    fixed = ModuleValidator.fix(model)
    assert ModuleValidator.validate(fixed, strict=True) == []
    assert ModuleValidator.is_valid(ModuleValidator.fix_and_validate(model))
    assert isinstance(model[1], nn.BatchNorm2d) and isinstance(fixed[1], nn.GroupNorm)
    assert module_validator.ModuleValidator is ModuleValidator and ModuleValidator.is_valid(mlp())


def test_what_no_fix_mends_is_raised():
    model = mlp()
    model[0].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        ModuleValidator.fix_and_validate(model)


class Names(nn.Module):
    """A recurrent classifier as in Opacus' tutorials."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(9, 6), kind(6, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x, hidden=None):
        return self.out(self.rnn(self.embedding(x), hidden)[0][:, -1])


class Attending(nn.Module):
    """One layer of attention."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(9, 6), kind(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = self.embedding(x)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize(
    ("ours", "torchs", "model"),
    [
        (DPRNN, nn.RNN, Names),
        (DPGRU, nn.GRU, Names),
        (DPLSTM, nn.LSTM, Names),
        (DPMultiheadAttention, nn.MultiheadAttention, Attending),
    ],
)
def test_the_layers_are_torchs_own(ours, torchs, model):
    def trained(kind):
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randint(0, 9, (24, 5), generator=generator),
            torch.randint(0, 3, (24,), generator=generator),
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = model(kind)
        _, module, optimizer, loader = private(made, data)
        for x, y in loader:
            step(module, optimizer, x, y)
        return module.state_dict()

    found, expected = trained(ours), trained(torchs)
    assert dp_rnn.DPLSTM is DPLSTM and issubclass(ours, torchs)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
