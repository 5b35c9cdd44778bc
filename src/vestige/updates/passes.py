"""Steps that evaluate their batch twice: what `optimizer.step(closure)` does with the closure.

    same sample   a noisy first look gives the direction of an ascent; the sum is taken uphill
    two points    one gradient per example, combined from here and from a look-ahead point, clipped
    own ascent    every example climbs along its own gradient, at its own weights; one clipped sum

Guarantee: the first look is charged with the release as one event (`Door.first_look`); in the other
two an example's part in the sum is still one clipped vector, so they cost what DP-SGD costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vestige.errors import PrivacyError
from vestige.gradients import Capture
from vestige.gradients.backward import exact
from vestige.gradients.per_row import Expanded, own_ascent
from vestige.gradients.units import Fold
from vestige.release.door import Release
from vestige.updates.ascent import Ascent

Closure = Callable[[], Any]


class Passes(ABC):
    """Turns the closure of a step into the clipped sum of its batch, and returns the loss."""

    whole_lots = False  # whether a lot must come in one physical batch
    first_look: Callable[[], Release]  # at the lot at hand, through the door; set by the run

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def run(self, closure: Closure) -> Any:
        """Evaluate the closure twice."""
        batch = self._capture.batch
        if batch is None or batch.backward is not None:
            raise PrivacyError(
                "optimizer.step(closure) needs a batch whose loss was not differentiated yet: draw "
                "it from the private loader and leave the backward to the closure. (After a step "
                "that failed, engine.abandon_lot() gives the lot up.)"
            )
        return self._run(closure)

    @abstractmethod
    def _run(self, closure: Closure) -> Any:
        """The passes themselves."""

    def _evaluate(self, closure: Closure) -> Any:
        loss, batch = closure(), self._capture.batch
        if batch is None or not batch.done:
            raise PrivacyError(
                "the closure of optimizer.step(closure) did not call backward on its loss: it must "
                "run the model on the batch, call backward, and return the loss."
            )
        return loss


class SameSample(Passes):
    """DP-SAM on one sample: a noisy first look at the lot says where to climb."""

    whole_lots = True

    def __init__(self, capture: Capture, ascent: Ascent) -> None:
        super().__init__(capture)
        self._ascent = ascent

    def _run(self, closure: Closure) -> Any:
        loss = self._evaluate(closure)
        self._ascent.learn(self.first_look())
        self._capture.collector.clear()  # before the batch may be summed once more
        self._capture.reopen()
        self._ascent.climb()
        try:
            self._evaluate(closure)
        finally:
            self._ascent.return_home()
        return loss


class TwoPoints(Passes):
    """weight * gradient at the point that `ascent` moves to + (1 - weight) * gradient here."""

    def __init__(self, capture: Capture, ascent: Ascent, weight: float) -> None:
        super().__init__(capture)
        self._ascent, self._weight = ascent, weight

    def _run(self, closure: Closure) -> Any:
        capture, collector = self._capture, self._capture.collector
        collector.begin(1.0)  # nothing of a pass that failed
        collector.holding = True
        try:
            capture.weight = 1 - self._weight
            loss = self._evaluate(closure)
            capture.reopen()
            capture.weight = self._weight
            self._ascent.climb()
            self._evaluate(closure)
        finally:
            self._ascent.return_home()
            capture.weight, collector.holding = 1.0, False
        with exact(collector.total.device.type):
            collector.finish()
        return loss


class OwnAscent(Passes):
    """Per-example SAM: row i is differentiated at weights moved along its own gradient."""

    def __init__(self, capture: Capture, radius: float) -> None:
        super().__init__(capture)
        self._radius = radius
        self._expanded = Expanded(capture.module, capture.groups, capture.axis, capture.mean_loss)

    def _run(self, closure: Closure) -> Any:
        capture, batch = self._capture, self._capture.batch
        assert batch is not None
        fold = Fold.of(batch)  # a unit climbs along its own gradient, with all its rows
        capture.paused = True  # rows have weights of their own: there is nothing to capture
        try:
            gradients, loss = self._expanded.gradients(closure, batch.rows)
            move = fold.spread(own_ascent(fold.sums(gradients), self._radius))
            gradients, _ = self._expanded.gradients(closure, batch.rows, move)
        finally:
            capture.paused = False
        batch.backward = -1  # from here on it counts: a failure must not let it count again
        if not batch.empty:
            with exact(gradients.device.type):
                capture.collector.add(fold.sums(gradients), batch.scale(capture.mean_loss))
        batch.done = True
        return loss
