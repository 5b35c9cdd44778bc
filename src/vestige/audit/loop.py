"""The loop that every check and attack trains with: one that all methods understand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vestige.engine.privacy_engine import PrivacyEngine


@dataclass
class Loop:
    """An engine that is attached to a model and data; `losses(model, batch)` has one for each row.

    What `make_private` returned stands in its order.
    """

    engine: PrivacyEngine
    losses: Callable[[nn.Module, Any], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any

    def steps(self, count: int) -> Iterator[Any]:
        """Train for so many more releases; gives each batch after its step."""
        last = self.engine.released + count
        while self.engine.released < last:
            for batch in self.loader:
                closure: Any = self._closure(batch)  # torch wants a float, gets a tensor
                self.optimizer.step(closure)
                yield batch
                if self.engine.released == last:
                    break

    def _closure(self, batch: Any) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            losses = self.losses(self.model, batch)
            self.engine.backward(losses)
            return losses.detach().mean()  # as in anybody's loop, so that who uses it is seen

        return closure
