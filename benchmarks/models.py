"""GPT-2 (124M) and ViT-B/16 in plain torch, for step times: their layers, their sizes, no more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, WIDTH, HEADS, DEPTH = 50257, 1024, 768, 12, 12
CLASSES, PATCH, PIXELS = 1000, 16, 224


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm, each added to what came in."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output at every position."""
        rows, positions, _ = x.shape
        parts = self.attention_in(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(rows, positions, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, positions, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Radford et al. 2019, the smallest one: 124M parameters, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
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
        self.places = nn.Parameter(torch.empty(1, (PIXELS // PATCH) ** 2 + 1, WIDTH).normal_(0.02))
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
