"""Readings of the FO paper in a plain loop: which choice gives the numbers that it prints?

Some readings break the guarantee (noise in the memory and not in the step; a memory without noise).
So this loop shares nothing with the engine: no door, no ledger, no release. Nothing it computes is
private, and every row says so: epsilon is infinite. It exists for public benchmark images only.

All runs of a call go side by side, one slice of every tensor for each, so that a GPU makes a table
of them in a minute. The model is the paper's MLP (tanh), whose gradients are written out by hand:

    |gradient of example i|^2 = sum over layers of (|input_i|^2 + 1) |output gradient_i|^2

Paper: FO-DP-SGD, arXiv 2605.09890, equations 1 to 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vestige.lab.readings import Reading

HIDDEN = (64, 32)
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Images:
    """Flat pixels in [0, 1] and labels of a benchmark."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int


def run_side_by_side(
    readings: Sequence[Reading], images: Images, device: str = "cpu", watch: Watch | None = None
) -> list[list[float]]:
    """The test accuracy of every reading after each of its epochs.

    They share data, lot and length; everything else may differ from one to the next.
    """
    loop = SideBySide(readings, images, device)
    curves: list[list[float]] = [[] for _ in readings]
    epochs = readings[0].epochs
    for epoch in range(1, epochs + 1):
        for _ in range(loop.steps // epochs):
            loop.train_step()
        for curve, accuracy in zip(curves, loop.accuracies(), strict=True):
            curve.append(round(accuracy, 6))
        if watch:
            watch(epoch, epochs)
    return curves


class SideBySide:
    """The runs at work; the first axis of every tensor is the run."""

    def __init__(self, readings: Sequence[Reading], images: Images, device: str) -> None:
        first = readings[0]
        self.readings, self.device = readings, torch.device(device)
        self.lot, self.step, self.steps = first.lot, 0, first.steps
        self.x, self.y = images.x_train.to(device), images.y_train.to(device)
        self.x_test, self.y_test = images.x_test.to(device), images.y_test.to(device)
        # A run has a generator of its own, so that its numbers do not depend on its neighbours.
        self.random = [torch.Generator(self.device).manual_seed(r.seed) for r in readings]
        self.theta = torch.stack([_weights(r, images) for r in readings]).to(device)
        self.shapes = _shapes(images)
        self.clip, self.beta, self.lr = (self._column(n) for n in ("clip", "beta", "lr"))
        shrinks = self._each(lambda r: r.beta if r.noise_times_beta else 1.0)
        self.sigma = self._column("noise_multiplier") * shrinks
        self.noisy_step = self._each(lambda r: r.noise != "stored")
        self.noisy_memory = self._each(lambda r: r.noise != "step")
        self.adam, self.cosine = self._column("adam").bool(), self._column("cosine").bool()
        scaling = {r.pixels: _scaling(r.pixels, images.x_train) for r in readings}
        self.factor = self._each(lambda r: scaling[r.pixels][0])
        self.summand = self._each(lambda r: scaling[r.pixels][1])
        self.mean, self.square = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.trend = torch.zeros_like(self.theta)
        longest = max(r.window for r in readings)
        self.kept = self.theta.new_zeros(longest - 1, *self.theta.shape)  # the newest first
        self.remembers = longest > 1 and any(r.beta < 1 for r in readings)

    def _each(self, fact: Callable[[Reading], float]) -> Tensor:
        """A number of every run, to be multiplied with its slice."""
        return torch.tensor([[float(fact(r))] for r in self.readings], device=self.device)

    def _column(self, name: str) -> Tensor:
        return self._each(lambda r: getattr(r, name))

    def train_step(self) -> None:
        """One lot of every run."""
        query = self.beta * self.clipped(*self.lots())
        if self.remembers:
            query += (1 - self.beta) * self.recalled()
        size = self.theta.shape[1]
        noise = torch.stack(
            [torch.randn(size, generator=g, device=self.device) for g in self.random]
        )
        noise *= self.sigma * self.clip
        if self.remembers:
            self.remember(query + noise * self.noisy_memory)
        bend = 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
        rate = self.lr * torch.where(self.cosine, bend, 1.0)
        self.move((query + noise * self.noisy_step) / self.lot, rate)
        self.step += 1

    def lots(self) -> tuple[Tensor, Tensor]:
        """Poisson lots as a fixed number of rows and a mask: no lot is longer."""
        most = min(len(self.x), int(self.lot + 8 * math.sqrt(self.lot)))
        drawn = torch.stack(
            [torch.rand(len(self.x), generator=g, device=self.device) for g in self.random]
        )
        numbers, rows = drawn.topk(most, dim=1, largest=False)
        return rows, numbers < self.lot / len(self.x)

    def clipped(self, rows: Tensor, inside: Tensor) -> Tensor:
        """sum_i clip_C(g_i) over the rows inside, flat."""
        inputs, gradients = self._backward(self.scaled(self.x[rows]), self.y[rows])
        squares = torch.zeros_like(inside, dtype=torch.float32)
        for a, g in zip(inputs, gradients, strict=True):
            squares += (a.square().sum(2) + 1) * g.square().sum(2)
        factors = (self.clip / squares.sqrt().clamp_min(1e-30)).clamp_max(1.0) * inside
        parts = []
        for a, g in zip(inputs, gradients, strict=True):
            g = g * factors[..., None]
            parts += [(g.transpose(1, 2) @ a).flatten(1), g.sum(1)]
        return torch.cat(parts, 1)

    def scaled(self, x: Tensor) -> Tensor:
        """Pixels as each run wants them."""
        return x * self.factor[..., None] + self.summand[..., None]

    def _backward(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Each layer's inputs, and the gradients of cross-entropy by its outputs."""
        layers = list(self._layers())
        inputs = [x]
        for weight, bias in layers[:-1]:
            inputs.append(torch.tanh(inputs[-1] @ weight.transpose(1, 2) + bias))
        weight, bias = layers[-1]
        gradient = torch.softmax(inputs[-1] @ weight.transpose(1, 2) + bias, 2)
        gradient.scatter_add_(2, y[..., None], gradient.new_full((*y.shape, 1), -1.0))
        gradients = [gradient]
        for (weight, _), a in zip(reversed(layers[1:]), reversed(inputs[1:]), strict=True):
            gradients.append((gradients[-1] @ weight) * (1 - a.square()))
        return inputs, gradients[::-1]

    def _layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        at = 0
        for rows, columns in self.shapes:
            weight = self.theta[:, at : at + rows * columns].unflatten(1, (rows, columns))
            at += rows * columns
            yield weight, self.theta[:, None, at : at + rows]
            at += rows

    def recalled(self) -> Tensor:
        """u: the releases that are kept, weighted by equations 4 to 9."""
        lags = min(self.step, len(self.kept))
        if not lags:
            return torch.zeros_like(self.theta)
        norm = self.trend.norm(dim=1)
        gaps = (self.kept[:lags] - self.trend).norm(dim=2)
        scores = gaps / (norm.clamp_min(1e-6) + 1e-12)
        j = torch.arange(1, lags + 1, device=self.device)[:, None]
        alpha, tau = self._column("alpha")[:, 0], self._column("inconsistency")[:, 0]
        logs = (alpha - 1) * torch.log(j + 1.0) - norm / (norm + 1) * tau * scores * j
        # Each run has a window of its own: older releases have no weight.
        logs = torch.where(j < self._column("window")[:, 0], logs, -math.inf)
        normalised = self._column("normalised")[:, 0].bool()
        weights = torch.where(normalised, torch.softmax(logs, 0), logs.exp())
        return torch.einsum("jr,jrp->rp", weights.nan_to_num(0.0), self.kept[:lags])

    def remember(self, stored: Tensor) -> None:
        """Keep it as the newest, and move the trend towards it."""
        ema = self._column("ema")
        self.trend = stored if self.step == 0 else ema * stored + (1 - ema) * self.trend
        self.kept = torch.cat([stored[None], self.kept[:-1]])

    def move(self, gradient: Tensor, lr: Tensor) -> None:
        """A step of SGD, or of Adam with torch's constants."""
        if not self.adam.any():
            self.theta -= lr * gradient
            return
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient.square(), 0.001)
        t = self.step + 1
        scale = (self.square / (1 - 0.999**t)).sqrt_().add_(1e-8)
        adaptive = self.mean / (1 - 0.9**t) / scale
        self.theta -= lr * torch.where(self.adam, adaptive, gradient)

    def accuracies(self) -> list[float]:
        """The share of test images that each run classifies correctly."""
        x = self.scaled(self.x_test)
        *hidden, (weight, bias) = self._layers()
        for w, b in hidden:
            x = torch.tanh(x @ w.transpose(1, 2) + b)
        found = (x @ weight.transpose(1, 2) + bias).argmax(2) == self.y_test
        return [float(share) for share in found.double().mean(1)]


def _shapes(images: Images) -> list[tuple[int, int]]:
    widths = (images.x_train.shape[1], *HIDDEN, images.classes)
    return [(out, into) for into, out in pairwise(widths)]


def _scaling(pixels: str, x: Tensor) -> tuple[float, float]:
    """x a + b: to [-1, 1], as they are in [0, 1], or to mean 0 and deviation 1."""
    if pixels == "half":
        return 2.0, -1.0
    if pixels == "unit":
        return 1.0, 0.0
    mean, std = float(x.mean()), float(x.std())
    return 1 / std, -mean / std


def _weights(reading: Reading, images: Images) -> Tensor:
    """The initial weights, flat: torch's default for linear layers, or Xavier's with no bias."""
    random = torch.Generator().manual_seed(10_000 + reading.seed)
    parts = []
    for out, into in _shapes(images):
        reach = math.sqrt(6 / (into + out)) if reading.xavier else 1 / math.sqrt(into)
        parts.append((torch.rand(out * into, generator=random) * 2 - 1) * reach)
        bias = (torch.rand(out, generator=random) * 2 - 1) * reach
        parts.append(torch.zeros(out) if reading.xavier else bias)
    return torch.cat(parts)
