"""TensorBoard scalars of a run, while it runs: `vestige train --tensorboard`.

Guarantee: only what metrics.jsonl holds is written: measurements on the held-out split, epsilon and
the diagnostics, which are made from releases, and no times. The training loss is among them only
where it was asked for, under a name that says that it is outside the guarantee.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from vestige.errors import ConfigError
from vestige.train.loop import Progress

FOLDER = "tensorboard"
_TAGS = {
    "test_accuracy": "held_out/accuracy",
    "test_loss": "held_out/loss",
    "averaged_test_accuracy": "held_out/averaged_accuracy",
    "averaged_test_loss": "held_out/averaged_loss",
    "epsilon": "privacy/epsilon",
    "train_loss_outside_guarantee": "outside_the_guarantee/train_loss",
}
_DIAGNOSTICS = ("rho", "tempering", "depth", "memory_ratio", "gate", "scale", "confidence")


class Scalars:
    """A callback of `training.train` that writes to FOLDER in the run folder.

    Raises ConfigError at once where the tensorboard package is missing.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "tensorboard is asked for and not installed: pip install "
                "'vestige-dp[tensorboard]', or leave --tensorboard out."
            )
        self._writer: Any = None

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def __call__(self, progress: Progress) -> None:
        """Write the numbers of an epoch that has just ended."""
        if progress.metrics is None or progress.folder is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(progress.folder / FOLDER))
            # Without the time, which follows the sizes of the lots.
            self._writer.add_scalar = partial(self._writer.add_scalar, walltime=0.0)
        for tag, value in scalars(progress.metrics).items():
            self._writer.add_scalar(tag, value, progress.step)
        self._writer.flush()


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl as tags and finite numbers; diagnostics as means over its steps."""
    found = {tag: metrics.get(name) for name, tag in _TAGS.items()}
    facts = metrics.get("diagnostics") or {}
    for name in _DIAGNOSTICS:
        for i, group in enumerate(facts.get("groups", ())):
            known = [step[i] for step in facts.get(name, ()) if step[i] is not None]
            found[f"{name}/{group}"] = math.fsum(known) / len(known) if known else None
    return {tag: float(v) for tag, v in found.items() if v is not None and math.isfinite(v)}
