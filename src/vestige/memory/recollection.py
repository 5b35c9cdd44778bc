"""Recall before you look: the branch of the next step, from releases and weights alone.

At the end of a step the release is remembered and the branch of the next step is recalled, before
the next lot is handed out. Nothing here takes a batch, a gradient or a loss, so what is recalled
cannot depend on the lot that it will be mixed with.

Guarantee: given the transcript, the branch is a constant; the release that it enters is charged at
sigma/beta whatever the rule (FO-DP-SGD theorem B.1, SMA-DP-SGD theorem 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.checks import check_state
from vestige.errors import ConfigError
from vestige.gradients.groups import Groups
from vestige.memory.base import Array, Memory, Recall
from vestige.memory.history import History
from vestige.memory.noise_gram import NoiseGram
from vestige.memory.spectra import WeightSpectra
from vestige.plan import Table, at
from vestige.release.door import Branch, Release


class Recollection:
    """A memory rule at work: history, exponents, and the branch of the step to come."""

    def __init__(
        self,
        rule: Memory,
        groups: Groups,
        like: Tensor,
        share: Table,
        history_dtype: torch.dtype | None = None,
    ) -> None:
        self._rule, self._share = rule, share
        self._parts = groups.names if rule.groupwise else ("all",)
        segments = groups.segments() if rule.groupwise else [slice(0, groups.size)]
        self._history = History(segments, like, rule.window, rule.ema, history_dtype)
        self._spectra = (
            None if rule.refresh is None else WeightSpectra(groups, rule.estimator, rule.refresh)
        )
        # Only a rule that debiases needs the noise's part of the inner products.
        self._noise = (
            NoiseGram(len(self._parts), rule.window - 1, rule.ema) if rule.debias else None
        )
        self._sizes = [s.stop - s.start for s in groups.segments()]
        self._coefficients: Array = np.zeros((len(self._parts), 0))
        self.branch: Branch | None = None
        self._recalled_for = -1
        self._recall: Recall | None = None
        self._branch_norms: Array = np.zeros(len(self._parts))
        self._last: tuple[int, Recall, Array, Array] | None = None  # the step that was remembered

    def prepare(self, step: int) -> None:
        """Recall the branch of `step`, unless that was done and the weights are the same."""
        if self._history.count != step:
            # An interrupt fell between a release and its remembering.
            self._history.restart(step, "a release could not be remembered")
            if self._noise:
                self._noise.restart()
        due = self._spectra is not None and self._spectra.due(step)
        if self._recalled_for == step and not (due and self._spectra_changed()):
            return
        if due and self._spectra is not None:
            self._spectra.read()
        view = self._history.view(self._spectra.exponents if self._spectra else ())
        recall = self._rule.recall(self._noise.taken_off(view) if self._noise else view)
        rest = 1 - at(self._share, step)
        factor = rest * recall.scale
        silent = self._history.depth == 0 or not factor.any()
        self._coefficients = factor[:, None] * recall.weights
        self.branch = None if silent else self._history.mix(self._coefficients)
        self._branch_norms = rest * recall.norms(view)
        self._recall, self._recalled_for = recall, step

    def _spectra_changed(self) -> bool:
        return self._spectra is not None and self._spectra.changed()

    def remember(self, release: Release) -> None:
        """Keep a release. The branch that went with it stays valid until the next `prepare`."""
        assert self._recall is not None
        self._history.append(release)
        if self._noise:
            self._noise.inherit(self._coefficients, self._noise_power(release))
        self._last = release.step, self._recall, self._branch_norms, self._history.release_norms()

    def _noise_power(self, release: Release) -> Array:
        """The expected squared norm of a step's fresh noise in each part."""
        powers = [n * std**2 for n, std in zip(self._sizes, release.stds, strict=True)]
        return np.array(powers if self._rule.groupwise else [sum(powers)])

    def diagnostics(self) -> dict[str, Any]:
        """The last step's numbers, one per part (and lag), as plain lists: all of them public."""
        if self._last is None:
            return {}
        step, recall, branch, release = self._last
        arrays = {
            "weights": recall.weights,
            "depth": recall.depth,
            **recall.facts,
            "memory_ratio": np.divide(
                branch, release, out=np.zeros_like(release), where=release > 0
            ),
        }
        return {
            "groups": list(self._parts),
            "step": step,
            "beta": at(self._share, step),
            **{name: self._listed(name, array) for name, array in arrays.items()},
        }

    def _listed(self, name: str, array: npt.NDArray[Any]) -> list[Any]:
        """As lists; arrays over lags are filled up to the window, so that all steps look alike."""
        if array.ndim == 1:
            return list(array.tolist())
        filling = [0.0 if name == "weights" else None] * (self._rule.window - 1 - array.shape[1])
        return [[*row, *filling] for row in array.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """The history and the exponents."""
        exponents = None if self._spectra is None else list(self._spectra.exponents)
        noise = self._noise.state_dict() if self._noise else None
        return {"history": self._history.state_dict(), "exponents": exponents, "noise": noise}

    def check_state(self, state: Any, step: int) -> None:
        """Refuse a saved memory that does not fit, before anything is changed."""
        if not isinstance(state, Mapping) or set(state) != {"history", "exponents", "noise"}:
            raise ConfigError(
                "the saved memory lacks its history or its exponents: it was not written by "
                "state_dict, or was damaged."
            )
        self._history.check_state(state["history"], step)
        if self._spectra is not None:
            self._spectra.check_state(state["exponents"])
        if self._noise:
            check_state("memory's noise", state["noise"], self._noise.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved memory that `check_state` has let through.

        The branch is recalled when the next lot is handed out.
        """
        self._history.load_state_dict(state["history"])
        if self._spectra is not None:
            self._spectra.restore(state["exponents"])
        if self._noise:
            self._noise.load_state_dict(state["noise"])
        self.branch, self._recalled_for, self._last = None, -1, None
