"""The settings of a pre-training on images of a random process. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from vestige.privacy.options import Count, File, Options, Positive
from vestige.train.checks import check_device

PRIOR_FILE = "prior.pt"
_Side = Annotated[int, Field(ge=8)]
_Pairs = Annotated[int, Field(ge=2)]


class Pretraining(Options):
    """What features are learned from: images of a random process, and no data at all.

    A file that is unfinished is gone on with, under the settings that it was begun with.
    """

    file: File = Field(default=Path(PRIOR_FILE), description="The file of the weights.")
    steps: Count = Field(default=12_000, description="Steps in all.")
    batch: _Pairs = Field(default=512, description="Images of a step, two views of each.")
    side: _Side = Field(default=32, description="Height and width of a view.")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="The seed of weights and images."
    )
    minutes: Positive | None = Field(
        default=None, description="Stop after so many; the same command goes on."
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")

    _device = field_validator("device")(check_device)

    @property
    def public(self) -> dict[str, int]:
        """What the weights are a function of."""
        return {name: getattr(self, name) for name in ("steps", "batch", "side", "seed")}

    def run(self, tell: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Learn until the steps are done, the time is up or somebody presses Ctrl-C."""
        from vestige.train.recipes.prior import pretrain

        return pretrain(self, tell or (lambda done, steps: None))
