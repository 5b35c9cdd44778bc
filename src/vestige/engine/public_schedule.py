"""Noise or clip bounds that a public table moves while a loop goes on.

A loop that calls a scheduler after every epoch, or after every release where that was declared,
makes them a function of the release's number. The table is fixed before the first lot; a call at
another moment, or one that is left out, is refused, because the loop would then decide when the
noise changes.

Guarantee: the schedule is a function of the release's number alone, so that the releases compose
one by one (FO-DP-SGD equation 41). Every release is charged at the noise that is drawn for it: the
door reads both from one table.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vestige.checks import is_number
from vestige.engine.run import Run
from vestige.errors import ConfigError, PrivacyError
from vestige.methods.method import Feature
from vestige.plan import constant
from vestige.release.part import Part
from vestige.updates.control import ClipControl


class PublicSchedule(Part):
    """Factors of what the run began with, one for each call of `advance`, from call 0 on.

    `every` says when calls come: after each "epoch" or each "release". `instead` is the line to
    write where the schedule cannot be honoured.
    """

    feature: Feature

    def __init__(
        self, run: Run, factors: Sequence[float], instead: str, every: str = "epoch"
    ) -> None:
        if every not in ("epoch", "release"):
            raise ConfigError(
                f"every={every!r} is not when a scheduler's calls can come: 'epoch' or 'release'."
            )
        self._run, self._factors, self._instead = run, tuple(factors), instead
        self._table: list[float] = []  # one factor per release; the last holds beyond
        self.period = run.plan.lots_per_epoch if every == "epoch" else 1  # from call to call
        self.calls = 0
        if run.begun or run.position.release:
            raise self._refused("lots were drawn before, and what came of them may have chosen it")
        if self.feature in run.excludes:
            words = run.excludes[self.feature].format(value=self.name)
            raise ConfigError(f"the {self.name} is refused: method {run.plan.method!r} {words}")
        self._check_run()
        self._grow()
        run.parts = (self, *run.parts)

    @property
    def factor(self) -> float:
        """The factor of the next release."""
        return self._factors[self.calls]

    def advance(self) -> None:
        """Go on to the next factor; after a piece of a lot nothing is due, and nothing happens."""
        run, released = self._run, self._run.position.release
        if run.in_lot and run.capture.batch is None:
            return
        if run.in_lot or released != self.period * (self.calls + 1):
            raise self._refused(
                f"call {self.calls + 1} came after {released} releases, and calls must come after "
                f"every {self.period} (every='epoch' or 'release'), lest the data decide when"
            )
        self.calls += 1
        try:
            self._grow()
        except BaseException:
            self.calls -= 1
            raise

    def lot_begins(self) -> None:
        """Refuse a lot before which a call was left out."""
        released = self._run.position.release
        if released // self.period != self.calls:
            raise self._refused(
                f"call {self.calls + 1} was left out after {released} releases, and calls must "
                f"come after every {self.period}, lest the data decide when"
            )

    def _refused(self, why: str) -> PrivacyError:
        return PrivacyError(f"the {self.name} is refused: {why}. {self._instead}")

    def _grow(self) -> None:
        """Let the table reach the next release, or the end of a run of known length."""
        start, period = len(self._table), self.period
        last = max(self._run.plan.steps or 1, self.calls * period + 1)
        calls = [t // period for t in range(start, last)]
        for call in dict.fromkeys(calls):
            factor = self._factors[call] if call < len(self._factors) else math.nan
            if not is_number(factor) or factor < self._least:
                raise self._refused(f"its factor for call {call} is {factor!r}")
        added = [self._factors[call] for call in calls]
        self._apply(start, added)
        self._table += added

    _least = 0.0

    def _check_run(self) -> None:
        """Refuse a run where something else moves the same."""
        raise NotImplementedError

    def _apply(self, start: int, factors: Sequence[float]) -> None:
        """Put the factors of the releases from `start` on to work, and into the plan."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, and a digest of all its factors, those to come included."""
        digest = hashlib.sha256(repr(self._factors).encode()).hexdigest()
        return {"period": self.period, "calls": self.calls, "factors": digest}

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse a state of other factors, or of another place than after so many releases."""
        fits = isinstance(state, Mapping) and state.keys() == self.state_dict().keys()
        if fits and all(type(state[name]) is int for name in ("period", "calls")):
            period, calls = state["period"], state["calls"]
            fits = (
                period == self.period
                and 0 <= calls <= releases // period <= calls + 1  # a call may be due
                and calls < len(self._factors)
                and state["factors"] == self.state_dict()["factors"]
            )
        else:
            fits = False
        if not fits:
            raise ConfigError(
                f"the saved {self.name} has other factors, or another place: build the scheduler "
                "that the run had, before the checkpoint is loaded."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.calls = state["calls"]
        self._grow()


class NoiseSchedule(PublicSchedule):
    """The noise multiplier times a public factor."""

    name, what, feature = "noise schedule", "noise schedule", Feature.NOISE_SCHEDULE

    def _check_run(self) -> None:
        run = self._run
        if run.calibrated:
            raise self._refused("the noise was solved for a target epsilon, and may not move")
        if len(run.door.scales) > 1 or run.part(NoiseSchedule):
            raise self._refused("the noise of this run has a schedule already")
        self._first, self._stds = run.door.scales[0], tuple[tuple[float, ...], ...]()

    def _apply(self, start: int, factors: Sequence[float]) -> None:
        run, scales = self._run, tuple(self._first.scaled(factor) for factor in factors)
        run.door.scales = run.door.scales[:start] + scales
        stds = self._stds = self._stds[:start] + tuple(s.stds(run.plan.bounds) for s in scales)
        run.plan = replace(
            run.plan,
            noise_multiplier=constant([scale.joint for scale in run.door.scales]),
            noise_stds=stds[0] if len(stds) == 1 else stds,
        )


class ClipFactors(PublicSchedule):
    """The clip bounds times a public factor; the noise is in units of them, and costs the same."""

    name, what, feature = "clip schedule", "clip schedule", Feature.MOVING_CLIP
    _least = 1e-12

    def _check_run(self) -> None:
        run, self._first = self._run, self._run.capture.collector.clip.bounds
        moving = any(isinstance(part, ClipControl | ClipFactors) for part in run.parts)
        if moving or self._first != run.plan.bounds:
            raise self._refused("the clip bounds of this run are moved or used otherwise")

    def _apply(self, start: int, factors: Sequence[float]) -> None:
        run, collector = self._run, self._run.capture.collector
        bounds = tuple(c * self.factor for c in self._first)
        collector.clip = replace(collector.clip, bounds=bounds)
        every = [*self._table, *factors]
        span = f"public factors from {min(every):.4g} to {max(every):.4g}"
        run.plan = replace(run.plan, clipping=f"scheduled, {run.agreed.clipping}, {span}")
