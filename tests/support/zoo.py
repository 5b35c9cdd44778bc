"""Small models, one for every rule: name -> (model, input, a function that picks the output)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    """A language model whose output layer is its embedding, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(torch.tanh(self.mix(self.table(x))))
        return F.linear(h, self.table.weight)


class Functional(nn.Module):
    """Parameters used by hand: matmul both ways, einsum, scale, shift, a class token, views."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.place = nn.Parameter(torch.randn(1, 4, 4))
        self.a = nn.Parameter(torch.randn(4, 6))
        self.b = nn.Parameter(torch.randn(5, 4))
        self.c = nn.Parameter(torch.randn(6, 3))
        self.scale = nn.Parameter(torch.randn(3))
        self.packed = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        x = self.b @ x  # (5, 4) @ (n, 4, 4)
        x = x @ self.a
        x = torch.einsum("bti,ij->btj", x, self.c) * self.scale
        first, second = self.packed.chunk(2)
        return x @ first.t() + F.linear(x, second) - self.scale


class Odd(nn.Module):
    """An operation no rule covers, in a submodule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.odd = nn.Bilinear(4, 4, 2)
        self.squashed = Squashed()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.squashed(self.odd(h, h))


class Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.softmax(self.w, dim=0)


class FusedLinear(nn.Module):
    """GPT-2's layer: addmm on rows flattened with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], 5)


class Cross(nn.Module):
    """Attention with different query, key and value, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=5)
        self.packed = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, _ = self.attend(q, k, v, need_weights=False)
        mask = torch.triu(torch.ones(3, 3, dtype=torch.bool, device=h.device), 1)
        out, _ = self.packed(h, torch.sin(h), torch.cos(h), attn_mask=mask)
        return out


# The rule that each model of the zoo is for.
BY_RULE = {
    "linear": [
        "linear",
        "linear without bias",
        "linear, short sequence",
        "linear, long sequence",
        "linear, two axes",
        "tied",
        "functional",
        "fused linear",
    ],
    "convolution": [
        "conv1d",
        "conv2d",
        "conv2d gram",
        "conv2d strided",
        "conv2d dilated",
        "conv2d grouped",
        "conv2d grouped gram",
        "conv2d depthwise",
        "conv2d same",
        "conv2d circular",
        "conv3d",
    ],
    "norms": ["layer norm", "layer norm, two axes", "group norm", "instance norm", "rms norm"],
    "embedding": ["embedding", "bag of mean", "bag of sum", "bag with weights"],
    "elementwise": ["prelu"],
    "attention": ["attention", "cross attention", "attention with learned bias", "transformer"],
    "recurrent": [
        "lstm",
        "gru",
        "rnn",
        "lstm with projections",
        "lstm cell",
        "gru cell",
        "rnn cell",
        "last step by length",
    ],
    "fallback": ["transposed conv", "fallback", "bag of max"],
}


def first(out: Any) -> Tensor:
    return out[0]


def same(out: Any) -> Tensor:
    return out


def zoo() -> dict[str, tuple[nn.Module, Any, Any]]:
    """Every rule, in float32; tests convert. Rows are the first axis of every input."""
    torch.manual_seed(0)
    r = torch.randn
    conv = nn.Conv2d
    tokens = torch.randint(0, 7, (9, 5))
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return {
        "linear": (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), r(9, 5), same),
        "linear without bias": (nn.Linear(5, 4, bias=False), r(9, 5), same),
        "linear, short sequence": (nn.Linear(9, 8), r(9, 3, 9), same),
        "linear, long sequence": (nn.Linear(3, 2), r(9, 11, 3), same),
        "linear, two axes": (nn.Linear(3, 2), r(9, 2, 4, 3), same),
        "conv1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), r(9, 3, 11), same),
        "conv2d": (
            nn.Sequential(conv(2, 3, 3), nn.ReLU(inplace=True), conv(3, 2, 2)),
            r(9, 2, 6, 6),
            same,
        ),
        "conv2d gram": (nn.Sequential(conv(6, 7, 3), conv(7, 8, 2)), r(9, 6, 4, 4), same),
        "conv2d strided": (conv(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), r(9, 2, 6, 5), same),
        "conv2d dilated": (conv(2, 4, 3, dilation=2, padding=2), r(9, 2, 6, 6), same),
        "conv2d grouped": (conv(4, 6, 3, groups=2, padding=1), r(9, 4, 5, 5), same),
        "conv2d grouped gram": (conv(8, 12, 3, groups=2), r(9, 8, 4, 4), same),
        "conv2d depthwise": (conv(4, 4, 3, groups=4, bias=False), r(9, 4, 5, 5), same),
        "conv2d same": (conv(2, 3, 4, padding="same"), r(9, 2, 5, 5), same),
        "conv2d circular": (conv(2, 3, 3, padding=1, padding_mode="circular"), r(9, 2, 5, 5), same),
        "conv3d": (nn.Conv3d(2, 3, 2, padding=1), r(9, 2, 3, 4, 3), same),
        "transposed conv": (nn.Sequential(nn.ConvTranspose2d(2, 3, 2)), r(9, 2, 4, 4), same),
        "embedding": (nn.Embedding(7, 3, padding_idx=2), tokens, same),
        "layer norm": (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), r(9, 5, 4), same),
        "layer norm, two axes": (nn.LayerNorm((3, 4)), r(9, 2, 3, 4), same),
        "group norm": (nn.Sequential(conv(2, 6, 3), nn.GroupNorm(3, 6)), r(9, 2, 5, 5), same),
        "instance norm": (nn.InstanceNorm2d(3, affine=True), r(9, 3, 4, 4), same),
        "rms norm": (nn.RMSNorm(5), r(9, 3, 5), same),
        "prelu": (nn.Sequential(conv(2, 3, 2), nn.PReLU(3), nn.PReLU()), r(9, 2, 4, 4), same),
        "attention": (nn.MultiheadAttention(4, 2, batch_first=True), (r(9, 3, 4),) * 3, first),
        "cross attention": (Cross(), (r(9, 3, 4), r(9, 6, 3), r(9, 6, 5)), same),
        "attention with learned bias": (
            nn.Sequential(AttentionBias()),
            r(9, 3, 4),
            same,
        ),
        "transformer": (
            nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            r(9, 3, 4),
            same,
        ),
        "lstm": (
            nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
            r(9, 5, 3),
            first,
        ),
        "gru": (nn.GRU(3, 4, batch_first=True), r(9, 5, 3), first),
        "rnn": (nn.RNN(3, 4, bias=False, nonlinearity="relu", batch_first=True), r(9, 5, 3), first),
        "lstm with projections": (
            nn.LSTM(3, 4, num_layers=2, proj_size=2, bidirectional=True, batch_first=True),
            r(9, 5, 3),
            first,
        ),
        "lstm cell": (Steps(nn.LSTMCell(3, 4)), r(9, 5, 3), same),
        "gru cell": (Steps(nn.GRUCell(3, 4), zeros=True), r(9, 5, 3), same),
        "rnn cell": (Steps(nn.RNNCell(3, 4, bias=False)), r(9, 5, 3), same),
        "last step by length": (LastStep(), (r(9, 5, 3), torch.arange(9) % 5 + 1), same),
        "bag of mean": (nn.EmbeddingBag(7, 3, padding_idx=2), tokens, same),
        "bag of sum": (nn.EmbeddingBag(7, 3, mode="sum"), tokens, same),
        "bag of max": (nn.Sequential(nn.EmbeddingBag(7, 3, mode="max")), tokens, same),
        "bag with weights": (WeightedBag(), (tokens, r(9, 5)), same),
        "tied": (Tied(), tokens, same),
        "functional": (Functional(), r(9, 3, 4), same),
        "fused linear": (FusedLinear(), r(9, 4, 3), same),
        "fallback": (Odd(), r(9, 3), same),
    }


class AttentionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        return first(self.attend(x, x, x))


class Steps(nn.Module):
    """A cell in a loop over time, from no state or from zeros."""

    def __init__(self, cell: nn.Module, zeros: bool = False) -> None:
        super().__init__()
        self.cell, self.zeros = cell, zeros

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4) if self.zeros else None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


class LastStep(nn.Module):
    """What replaces a packed sequence: padded rows, and the step at which each of them ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.layer(x)
        return out[torch.arange(len(out)), lengths - 1]


class WeightedBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3, mode="sum", padding_idx=-1)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.bag(x, per_sample_weights=weights)


def cast(x, dtype):
    """The tensors of floating point in another dtype."""
    if isinstance(x, tuple):
        return tuple(cast(t, dtype) for t in x)
    return x.to(dtype) if x.is_floating_point() else x
