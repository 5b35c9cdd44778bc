"""Watching the door: what an observer is told of every lot, in the order in which it happens.

    handed_out    a batch goes to the loop; the memory's branch is recalled already
    arrives       something is about to be released
    charged       the ledger was charged
    drawing       the noise is about to be drawn
    released      the noise is added

`Door.observers` is empty in ordinary runs. An observer sees sums before their noise, so a run that
is watched promises nothing: the checks of `vestige verify` watch runs on records that they made up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vestige.privacy.ledger import Event
from vestige.sampling.loader import Batch

if TYPE_CHECKING:
    from vestige.release.query import Branch


@dataclass
class Passage:
    """Something on its way through the door; the tensors are the door's own: copy to keep.

    `kind` is "release", "first look" or "measurement". `total` and `counts` are private: what is
    released before its noise. The rest of the first block is public. `values`, `stds` and
    `noisy_counts` are empty until the noise is added. An observer may write over `values` and
    `noisy_counts` then, as a replay of earlier releases does.
    """

    kind: str
    lot: int  # -1 where the door was not told its number
    step: int
    gain: float
    bounds: tuple[float, ...]
    total: Tensor
    branch: Tensor | None = None
    counts: Tensor | None = None

    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    stds: tuple[float, ...] = ()
    noisy_counts: tuple[float, ...] | None = None


class Observer:
    """Told of everything that goes through a door that has it in `observers`. Does nothing."""

    def handed_out(self, batch: Batch, branch: Branch | None) -> None:
        """The loader gives `batch` to the loop; `branch` is what a memory recalled for its lot."""

    def arrives(self, passage: Passage) -> None:
        """Something is about to be charged and released."""

    def charged(self, event: Event) -> None:
        """The ledger was charged."""

    def drawing(self, passage: Passage) -> None:
        """The noise is about to be drawn."""

    def released(self, passage: Passage) -> None:
        """The noise is added: `passage` has what is let out."""
