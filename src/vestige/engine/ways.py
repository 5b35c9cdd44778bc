"""Before gradients are taken in a new way: the model is checked, and compiled where that is asked.

A way is what the training flags of the model's modules are, and what it is given but for lengths.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError
from vestige.gradients import Capture
from vestige.gradients.self_check import self_check, signature
from vestige.sampling.forward_randomness import untouched

if TYPE_CHECKING:
    from vestige.gradients.compiled import Compiled
    from vestige.parallel.ranks import Ranks


class Ways:
    """The ways in which gradients of one model were taken; `unchecked` says why one was not
    checked on synthetic rows."""

    def __init__(self, capture: Capture, ranks: Ranks) -> None:
        self._capture, self._ranks = capture, ranks
        self._checked: set[Any] = set()
        self._seed: int | None = None  # of synthetic rows; None without a self-check
        self.unchecked: str | None = "self_check=False switched it off"
        self.compiled: Compiled | None = None

    def check_rows(self, seed: int) -> None:
        """Check the model's rows before gradients are taken in a new way."""
        self._seed, self.unchecked = seed, None
        self._capture.before_forward = self._check_way

    def compile(self, rows: int) -> None:
        """Run the model by compiled graphs, where it can; `rows` is a public number of them."""
        from vestige.gradients.compiled import Compiled  # Dynamo takes seconds to load

        if self._capture.shards.passing:
            raise ConfigError(
                "compile=True does not go with parameters in shards (fully_shard), which come and "
                "go while the model runs: leave one of them out."
            )
        self._capture.compiled = self.compiled = Compiled(self._capture, rows)
        self._capture.before_forward = self._check_way

    def _check_way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture, compiled = self._capture, self.compiled
        way = (tuple(m.training for m in capture.module.modules()), signature((args, kwargs)))
        if way in self._checked and not (compiled and compiled.recheck):
            return
        capture.before_forward = None
        stream = capture.batch.stream if capture.batch is not None else None
        try:
            with untouched(stream):
                if self._seed is not None:
                    self._check(args, kwargs, self._seed)
                if compiled:
                    compiled.prepare(args, kwargs)
        finally:
            capture.before_forward = self._check_way
        self._checked.add(way)  # not if it was refused: a model that was refused stays refused

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
        # A model in shards sends messages in every pass, so all ranks run the same ones.
        agree = self._ranks.sent if self._capture.meet else tuple[int, int, int]
        why = self_check(self._capture, args, kwargs, seed, agree)
        if why is not None:
            self.unchecked = why
            warnings.warn(
                f"the self-check was skipped because {why}. That the examples do not mix is shown "
                "by following their rows through the model's operations only.",
                UserWarning,
                stacklevel=3,
            )
