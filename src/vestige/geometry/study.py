"""How far noise moves a gradient and its direction: the synthetic study of GeoDP's appendix D.2.

    direction error: mean over angles of (theta* - theta)^2, the last angle's wrapped
    gradient error:  |g* - g|^2 / d in units of C^2;   beside them the cosine between g* and g

Paper: Duan, Hu, Ye, Sun 2025, arXiv 2504.05618, figures 3 and 4. It compares DP-SGD with GeoDP at
equal sigma, although the two do not protect equally (see published.py), and does not say what its
synthetic gradients are. Here an example's is C (signal * u + sqrt(1 - signal^2) h_i), with a common
random unit vector u and its own random h_i. The h_i are centred, so that the mean is signal * C u.
A batch has `examples` different gradients, equally often.

Besides, at the same joint sigma, the rigorous `Box` (beta = bounding) and `Tangent` (radius =
bounding * pi / 2) after `releases` releases of the same batch, each about the last one's direction,
the first about a random one. Remembering is free for DP-SGD too, so its fair rival is not one
release of DP-SGD but the mean of as many (`averaged`). `Tangent` needs at least 1 / bounding
releases to turn from the random start to the gradient; with fewer the start is most of its error.
Both release the mean of the lengths, which is longer than the mean by about 1 / signal.

Direction errors of vectors are those of the angles they have. GeoDP's is that of the angles it
drew, as in the paper's lemma 1, whose vector may have underflowed; the cosine is of the vector.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.geometry.base import Geometry
from vestige.geometry.box import Box
from vestige.geometry.hyperspherical import to_hyperspherical
from vestige.geometry.published import angle_scale, perturbed
from vestige.geometry.tangent import Tangent

METHODS = ("dp_sgd", "geodp", "averaged", "box", "tangent")
MEASURES = ("direction_mse", "gradient_mse", "cosine")


@dataclass(frozen=True)
class DirectionStudy:
    """One point of a figure: d, B, sigma and beta, and what the paper leaves open."""

    dimension: int
    batch: int
    sigma: float
    bounding: float
    trials: int = 5
    seed: int = 0
    signal: float = 0.5
    examples: int = 64
    releases: int = 20

    def __post_init__(self) -> None:
        for name, least in (
            ("dimension", 2),
            ("batch", 1),
            ("trials", 1),
            ("seed", 0),
            ("examples", 1),
            ("releases", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")
        if not is_number(self.sigma) or self.sigma < 0:
            raise ConfigError(f"sigma={self.sigma!r} must be a number of at least 0.")
        for name in ("bounding", "signal"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value <= 1:
                raise ConfigError(f"{name}={value!r} must be above 0 and at most 1.")
        if self.batch % self.examples and self.batch > self.examples:
            raise ConfigError(
                f"batch={self.batch} is no multiple of examples={self.examples}: each of them "
                "must be in the batch equally often."
            )


def direction_study(setting: DirectionStudy) -> dict[str, float]:
    """Means over the trials, named method_measure, of `METHODS` and `MEASURES`."""
    generator = torch.Generator().manual_seed(setting.seed)
    sums: dict[str, float] = defaultdict(float)
    for _ in range(setting.trials):
        for name, value in _trial(setting, generator).items():
            sums[name] += value
    return {name: value / setting.trials for name, value in sums.items()}


def _trial(setting: DirectionStudy, generator: torch.Generator) -> dict[str, float]:
    rows = _examples(setting, generator)
    mean = rows.mean(dim=0)

    def noise(size: int = setting.dimension) -> Tensor:
        return setting.sigma * torch.randn(size, generator=generator, dtype=torch.float64)

    angles_noise = noise()
    vectors = {
        "dp_sgd": mean + noise() / setting.batch,
        "geodp": perturbed(mean, angles_noise, 1.0, setting.batch, setting.bounding),
        # The mean of as many draws has this distribution.
        "averaged": mean + noise() / (setting.batch * math.sqrt(setting.releases)),
    }
    seed = int(torch.randint(2**62, (1,), generator=generator))
    variants: dict[str, Geometry] = {
        "box": Box(mean, setting.bounding, seed=seed),
        "tangent": Tangent(mean, setting.bounding * math.pi / 2, seed=seed),
    }
    copies = setting.batch / rows.shape[0]
    for name, geometry in variants.items():
        lengths = torch.linalg.vector_norm(rows, dim=1)
        for _ in range(setting.releases):
            values = copies * geometry.contribution(rows, lengths, 1.0)
            for segment, bound in zip(geometry.segments, geometry.bounds(1.0), strict=True):
                # sqrt(2) sigma on each of the two parts is sigma on both together.
                values[segment] += math.sqrt(2) * bound * noise(values[segment].numel())
            vectors[name] = geometry.gradient(values, setting.batch)
    measured = {
        f"{name}_{measure}": value
        for name, vector in vectors.items()
        for measure, value in zip(MEASURES, _errors(vector, mean), strict=True)
    }
    scale = angle_scale(setting.dimension, setting.batch, setting.bounding)
    measured["geodp_direction_mse"] = float((scale * angles_noise[1:]).square().mean())
    return measured


def _examples(setting: DirectionStudy, generator: torch.Generator) -> Tensor:
    """The different per-example gradients of a batch, clipped to C = 1."""
    count = min(setting.examples, setting.batch)
    rows = torch.randn(count + 1, setting.dimension, generator=generator, dtype=torch.float64)
    rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    own = rows[1:] - rows[1:].mean(dim=0)
    rows = setting.signal * rows[:1] + math.sqrt(1 - setting.signal**2) * own
    # Random vectors are only nearly orthogonal, so some sums are longer than 1. One factor for all
    # keeps the direction of the mean.
    return rows.div_(torch.linalg.vector_norm(rows, dim=1).amax().clamp(min=1.0))


def _errors(vector: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """Direction error, gradient error and cosine of one noisy vector."""
    angles = to_hyperspherical(torch.stack([vector, truth]))[1]
    error = angles[0] - angles[1]
    error[-1] = math.remainder(float(error[-1]), 2 * math.pi)
    norms = torch.linalg.vector_norm(vector) * torch.linalg.vector_norm(truth)
    cosine = float(vector @ truth / norms) if float(norms) else 0.0
    return float(error.square().mean()), float((vector - truth).square().mean()), cosine
