"""Synthetic rows without chance: ordinary models with dropout and masks of their own are accepted,
and what mixes rows behind a dropout is refused all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine, PrivacyError

WIDTH, TIME = 16, 5


class Around(nn.Module):
    """A layer over sequences, and a head over its mean."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call, self.head = layer, call, nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.call(self.layer, x).mean(1))


def attention(**options):
    return nn.MultiheadAttention(WIDTH, 2, dropout=0.2, **{"batch_first": True} | options)


def encoder(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, **options)


def causal(layer, x, dtype=None):
    ahead = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=dtype)
    return layer(x, x, x, attn_mask=torch.triu(ahead, 1))[0]


ORDINARY = {
    "encoder": (encoder(batch_first=True), lambda m, x: m(x)),
    "encoder, norm first": (encoder(batch_first=True, norm_first=True), lambda m, x: m(x)),
    "encoder, time first": (encoder(), lambda m, x: m(x.transpose(0, 1)).transpose(0, 1)),
    "two encoders": (nn.TransformerEncoder(encoder(batch_first=True), 2), lambda m, x: m(x)),
    "decoder": (nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True), lambda m, x: m(x, x)),
    "attention": (attention(), lambda m, x: m(x, x, x)[0]),
    "attention, no weights": (attention(), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "attention, mask of the default type": (attention(), causal),
    "attention, mask of its own type": (attention(), lambda m, x: causal(m, x, torch.float32)),
    "two LSTMs": (nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True), lambda m, x: m(x)[0]),
}
MIXING = {
    "attention over the batch": (attention(batch_first=False), lambda m, x: m(x, x, x)[0]),
    "encoder over the batch": (encoder(), lambda m, x: m(x)),
}


def epoch(case):
    """One epoch in training mode, with dropout on."""
    torch.manual_seed(0)
    model = Around(*case)
    data = TensorDataset(torch.randn(32, TIME, WIDTH), torch.randint(0, 3, (32,)))
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        dataset_size=32,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_train_with_their_dropout_and_are_checked(name):
    engine = epoch(ORDINARY[name])
    assert engine.released == 4 and engine.caveats() == []
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_meet_behind_a_dropout_are_refused(name):
    with pytest.raises(PrivacyError):
        epoch(MIXING[name])
