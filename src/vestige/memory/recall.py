"""Recall before you look: the branch of the next step, from releases and weights alone.

At the end of a step the release is remembered and the branch of the next step is recalled, before
the next lot is handed out. Nothing here takes a batch, a gradient or a loss, so what is recalled
cannot depend on the lot that it will be mixed with.

Guarantee: given the transcript, the branch is a constant; the release that it enters is charged at
sigma/beta whatever the rule (FO-DP-SGD theorem B.1, SMA-DP-SGD theorem 1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.checks import check_state, is_number
from vestige.errors import ConfigError
from vestige.gradients.groups import Groups
from vestige.gradients.shards import own_part
from vestige.memory import spectrum
from vestige.memory.history import History, Keeping
from vestige.memory.products import NoiseGram
from vestige.memory.rules import Array, Memory, Recall
from vestige.plan import Table, at
from vestige.release.door import Branch, Position, Release
from vestige.release.part import Gradient, Part


class Recollection(Part):
    """A memory rule at work: history, exponents, and the branch of the step to come."""

    name = "memory"

    def __init__(
        self,
        rule: Memory,
        groups: Groups,
        like: Tensor,
        share: Table,
        position: Position,
        keeping: Keeping | None = None,
    ) -> None:
        self._rule, self._share, self._position = rule, share, position
        self._parts = groups.names if rule.groupwise else ("all",)
        segments = groups.segments() if rule.groupwise else [slice(0, groups.size)]
        keeping = keeping or Keeping()
        self._add = keeping.add
        self._history = History(segments, like, rule.window, rule.ema, keeping)
        self._spectra = (
            None
            if rule.refresh is None
            else WeightSpectra(groups, rule.estimator, rule.refresh, keeping)
        )
        # Only a rule that debiases needs the noise's part of the inner products.
        self._noise = (
            NoiseGram(len(self._parts), rule.window - 1, rule.ema) if rule.debias else None
        )
        sizes = torch.tensor([s.stop - s.start for s in groups.segments()], dtype=torch.float64)
        self._sizes = (sizes if self._add is None else self._add(sizes.to(like.device))).tolist()
        self._coefficients: Array = np.zeros((len(self._parts), 0))
        self._recalled: Branch | None = None
        self._recalled_for = -1
        self._recall: Recall | None = None
        self._branch_norms: Array = np.zeros(len(self._parts))
        self._last: tuple[int, Recall, Array, Array] | None = None  # the step that was remembered

    def lot_begins(self) -> None:
        """Done when the optimizer had stepped, unless somebody has changed the weights since."""
        self._prepare(self._position.release)

    def stepped(self) -> None:
        """Recall the branch of the next step."""
        self._prepare(self._position.release)

    def _prepare(self, step: int) -> None:
        """Recall the branch of `step`, unless that was done and the weights are the same."""
        if self._history.count != step:
            # An interrupt fell between a release and its remembering.
            self._history.restart(step, "a release could not be remembered")
            if self._noise:
                self._noise.restart()
        due = self._spectra is not None and self._spectra.due(step)
        again = self._recalled_for == step
        if again and not (due and self._spectra_changed()):
            return
        if due and self._spectra is not None:
            self._spectra.read(again)
        view = self._history.view(self._spectra.exponents if self._spectra else ())
        recall = self._rule.recall(self._noise.taken_off(view) if self._noise else view)
        rest = 1 - at(self._share, step)
        factor = rest * recall.scale
        silent = self._history.depth == 0 or not factor.any()
        self._coefficients = factor[:, None] * recall.weights
        self._recalled = None if silent else self._history.mix(self._coefficients)
        self._branch_norms = rest * recall.norms(view)
        self._recall, self._recalled_for = recall, step

    @property
    def branch(self) -> Branch | None:
        """What is mixed into the query of the next step."""
        return self._recalled

    def _spectra_changed(self) -> bool:
        return self._spectra is not None and self._spectra.changed()

    def released(self, release: Release, gradient: Gradient) -> None:
        """Keep a release. The branch that went with it stays valid until the next is recalled."""
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

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse a saved memory that does not fit, before anything is changed."""
        if not isinstance(state, Mapping) or set(state) != {"history", "exponents", "noise"}:
            raise ConfigError(
                "the saved memory lacks its history or its exponents: it was not written by "
                "state_dict, or was damaged."
            )
        self._history.check_state(state["history"], releases)
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
        self._recalled, self._recalled_for, self._last = None, -1, None


class Damping(Part):
    """What is left of a memory after the release that recalls nothing: beta * gradient."""

    def __init__(self, share: Table) -> None:
        self._share = share

    def released(self, release: Release, gradient: Gradient) -> None:
        """Scale the gradient."""
        gradient.values.mul_(at(self._share, release.step))


class RecallAfter(Recollection):
    """The same memory after the release: the gradient becomes beta * gradient + branch / lot."""

    @property
    def branch(self) -> None:
        """Nothing is mixed into the query."""
        return

    def released(self, release: Release, gradient: Gradient) -> None:
        """Keep the release, and mix the memory that was recalled before it into the gradient."""
        super().released(release, gradient)
        gradient.values.mul_(at(self._share, release.step))
        if self._recalled is not None:
            gradient.values.add_(self._recalled.values, alpha=1 / gradient.batch_size)


class WeightSpectra:
    """Reads the exponents of the groups: the mean over a group's matrices, None without one.

    Guarantee: a function of the weights, which are public (post-processing of the releases). They
    are estimated at step 1 and then whenever (step - 1) % refresh = 0.
    """

    def __init__(
        self,
        groups: Groups,
        estimator: str,
        refresh: int,
        keeping: Keeping,
    ) -> None:
        self._matrices = [(s.group, s.trained) for s in groups.slots if s.trained.ndim >= 2]
        self._estimator, self._refresh = estimator, refresh
        self._add, self._divide = keeping.add, keeping.divide
        self._seen: tuple[tuple[object, ...], Tensor] | None = None
        self.exponents: tuple[float | None, ...] = (None,) * groups.count

    def due(self, step: int) -> bool:
        """Whether step `step` has exponents of its own."""
        return step >= 1 and (step - 1) % self._refresh == 0

    def changed(self) -> bool:
        """Whether somebody changed the weights since they were read, on any rank."""
        places, norms = self._fingerprint()
        before, lengths = self._seen or ((), norms)
        here = places != before or not torch.equal(norms, lengths)  # a read, at the last moment
        if self._add is None or not self._matrices:
            return here
        return bool(self._add(torch.tensor(float(here), device=self._matrices[0][1].device)) > 0)

    @torch.no_grad()
    def read(self, again: bool = False) -> None:
        """Estimate the exponents from the weights as they are now.

        Ranks divide the matrices, but not `again`, which a rank with whole weights decides alone.
        """
        found: list[list[float]] = [[] for _ in self.exponents]
        matrices = [p for _, p in self._matrices]
        find = functools.partial(spectrum.exponents, estimator=self._estimator)
        divide = None if again and self._add is None else self._divide
        each = divide(matrices, find) if divide else find(matrices)
        for (group, _), rho in zip(self._matrices, each, strict=True):
            if rho is not None:
                found[group].append(rho)
        self.exponents = tuple(math.fsum(r) / len(r) if r else None for r in found)
        self._seen = self._fingerprint()

    def check_state(self, exponents: Any) -> None:
        """Refuse saved exponents that are not one number or None for each group."""
        fits = isinstance(exponents, list) and len(exponents) == len(self.exponents)
        if not fits or not all(rho is None or is_number(rho) for rho in exponents):
            raise ConfigError(
                f"the saved memory has no exponent for each of {len(self.exponents)} groups: it "
                "was written by a run with another clipping, or was damaged."
            )

    def restore(self, exponents: Sequence[float | None]) -> None:
        """Take over saved exponents. The weights count as changed."""
        self.exponents, self._seen = tuple(exponents), None

    def _fingerprint(self) -> tuple[tuple[object, ...], Tensor]:
        # Writing through .data changes neither the version nor the address: only the norm tells.
        weights: list[Tensor] = [own_part(p) for _, p in self._matrices]
        norms = torch.stack(torch._foreach_norm(weights)) if weights else torch.empty(0)
        return tuple((p._version, p.data_ptr()) for p in weights), norms
