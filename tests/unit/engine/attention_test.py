"""Hugging Face's fused attention uses the mask that it is given, whoever has padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
}


class Wrapped(nn.Module):
    """A model of a user's own around one of the library."""

    def __init__(self):
        super().__init__()
        self.inner = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))

    def forward(self, ids, mask):
        return self.inner(input_ids=ids, attention_mask=mask).logits


def private(padded):
    torch.manual_seed(0)
    model = Wrapped()
    mask = torch.ones(12, 6)
    mask[padded, 4:] = 0
    data = TensorDataset(torch.randint(0, 30, (12, 6)), mask, torch.randint(0, 2, (12,)))
    engine = PrivacyEngine(noise_seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return engine, *engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("padded", [[], [3], list(range(12))], ids=["none", "one", "all"])
def test_a_masked_model_trains_whoever_has_padding(padded):
    engine, model, optimizer, loader = private(padded)
    for ids, mask, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(ids, mask), y).backward()
        optimizer.step()
    assert engine.released == 3


def test_the_kernel_of_a_row_does_not_follow_the_padding_of_another(monkeypatch):
    """Without the mask one record would choose for the lot: the usual attention does that."""
    _, model, _, _ = private([])
    seen = []
    attend = F.scaled_dot_product_attention

    def watched(*args, **options):
        seen.append(options.get("attn_mask") is not None)
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    ids, whole = torch.zeros(2, 6, dtype=torch.long), torch.ones(2, 6)
    with torch.no_grad():
        private_output = model(ids, whole)
        plain = Wrapped()
        plain.load_state_dict(model.state_dict())
        same = plain.eval()(ids, whole)
        assert torch.allclose(model.eval()(ids, whole), same, atol=1e-6)
    assert private_output.shape == (2, 2) and seen == [True, False, True]


def test_the_model_has_its_own_attention_again_afterwards():
    engine, model, _, _ = private([])
    assert model.inner.config._attn_implementation == "sdpa_always_masked"
    engine.detach()
    assert model.inner.config._attn_implementation == "sdpa"
    assert "always_masked" not in model.inner.config.to_json_string()


def test_an_engine_that_takes_anothers_place_keeps_the_masks():
    _, model, optimizer, loader = private([])
    engine = PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(loader.dataset, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert model.inner.config._attn_implementation == "sdpa_always_masked"
