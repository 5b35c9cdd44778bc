"""GPT-2 (124M), ViT-B/16 and a Llama-shaped 1B with LoRA in plain torch, for step times: their
layers, their sizes, no more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, WIDTH, HEADS, DEPTH = 50257, 1024, 768, 12, 12
CLASSES, PATCH, PIXELS = 1000, 16, 224


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm, each added to what came in."""

    def __init__(self, causal: bool, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.causal, self.heads = causal, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output at every position."""
        rows, positions, width = x.shape
        parts = self.attention_in(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, positions, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, positions, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


@dataclass(frozen=True)
class GPT2Size:
    """The smallest of Radford et al. 2019: 124M parameters."""

    words: int = WORDS
    length: int = LENGTH
    width: int = WIDTH
    heads: int = HEADS
    depth: int = DEPTH


class GPT2(nn.Module):
    """Radford et al. 2019; its head is tied to its embedding."""

    def __init__(self, size: GPT2Size | None = None) -> None:
        super().__init__()
        size = size or GPT2Size()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.length, size.width)
        blocks = (Block(True, size.width, size.heads) for _ in range(size.depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.01)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """The next word's logits at every position."""
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ViT(nn.Module):
    """Dosovitskiy et al. 2021, ViT-B/16: 86M parameters, 196 patches and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.empty(1, (PIXELS // PATCH) ** 2 + 1, WIDTH))
        nn.init.normal_(self.places, std=0.02)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """The classes' logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


@dataclass(frozen=True)
class LlamaSize:
    """As in Llama 3.2 1B; `rank` is that of the adapters."""

    words: int = 128_256
    width: int = 2048
    depth: int = 16
    heads: int = 32
    groups: int = 8  # heads of keys and values
    inner: int = 8192
    rank: int = 16


class Adapted(nn.Module):
    """A frozen product and the product of two small matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.down, self.up = (
            nn.Linear(inputs, rank, bias=False),
            nn.Linear(rank, outputs, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Their sum."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Scale(nn.Module):
    """RMSNorm: every position divided by its root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """In float32 within."""
        wide = x.float()
        normal = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return normal.to(x.dtype) * self.weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions: the halves of every head, turned by an angle of its place."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class LlamaBlock(nn.Module):
    """Grouped heads with rotary positions, and SwiGLU, each after a norm."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size, width = size, size.width
        narrow = width // size.heads * size.groups
        self.norm1, self.norm2 = Scale(width), Scale(width)
        self.queries, self.values = (
            Adapted(width, width, size.rank),
            Adapted(width, narrow, size.rank),
        )
        self.keys = nn.Linear(width, narrow, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, width, bias=False)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        rows, positions, _ = x.shape
        return x.view(rows, positions, heads, -1).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """Keys or values for the queries of their group."""
        rows, groups, positions, width = x.shape
        each = self.size.heads // groups
        wide = x.unsqueeze(2).expand(rows, groups, each, positions, width)
        return wide.reshape(rows, groups * each, positions, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output at every position."""
        normal = self.norm1(x)
        q = turned(self._heads(self.queries(normal), self.size.heads))
        k = turned(self._heads(self.keys(normal), self.size.groups))
        v = self._heads(self.values(normal), self.size.groups)
        mixed = F.scaled_dot_product_attention(q, self._shared(k), self._shared(v), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        normal = self.norm2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Llama(nn.Module):
    """The shape of Llama 3.2 1B: a frozen base in bf16, adapters in float32 on queries and values.

    Run it under bf16 autocast."""

    def __init__(self, size: LlamaSize | None = None) -> None:
        super().__init__()
        size = size or LlamaSize()
        self.words = nn.Embedding(size.words, size.width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.depth))
        self.norm = Scale(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.head.weight = self.words.weight
        adapters = {
            id(adapter.weight)
            for module in self.modules()
            if isinstance(module, Adapted)
            for adapter in (module.down, module.up)
        }
        for parameter in self.parameters():
            if id(parameter) not in adapters:
                parameter.requires_grad_(False)
                parameter.data = parameter.data.bfloat16()

    def forward(self, words: Tensor) -> Tensor:
        """The next word's logits at every position."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
