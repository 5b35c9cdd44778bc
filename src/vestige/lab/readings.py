"""A reading of the FO paper: what a run of the plain loop (plain_loop.py) is told."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from vestige.lab.fields import RunModel, Span, one_of

NOISES = ("release", "stored", "step")
PIXELS = ("half", "unit", "standard")


class Reading(RunModel):
    """One run of the plain loop.

    `noise` is in the `release` (as printed: the step and the memory see it), in what is `stored`
    but not in the step, or in the `step` but not in what is stored. beta 1 has no memory: DP-SGD,
    or DP-Adam with `adam`. ConfigError for a bad value.
    """

    called = "the reading"

    dataset: str
    train_range: Span
    test_range: Span
    lot: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=1)]
    lr: Annotated[float, Field(gt=0)]
    noise_multiplier: Annotated[float, Field(ge=0)]
    clip: Annotated[float, Field(gt=0)] = 1.0
    beta: Annotated[float, Field(gt=0, le=1)] = 1.0
    alpha: float = 0.8
    window: Annotated[int, Field(ge=1)] = 8
    inconsistency: float = 0.1
    ema: float = 0.3
    noise: Annotated[str, one_of(NOISES)] = "release"
    noise_times_beta: bool = False
    normalised: bool = True
    adam: bool = False
    cosine: bool = False
    xavier: bool = False
    pixels: Annotated[str, one_of(PIXELS)] = "half"
    seed: int = 0

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.epochs * math.ceil((self.train_range[1] - self.train_range[0]) / self.lot)

    def config(self) -> dict[str, Any]:
        """Every setting as plain JSON types."""
        return {"kind": "plain loop", **self.model_dump(mode="json")}
