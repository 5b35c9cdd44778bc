"""Many releases of the real engine, with what went into each: the material of the noise check.

A run is saved in the middle and goes on to its end. Then another engine loads what was saved and
goes on from there on other records, as after a crash: the two share their past and nothing else.
The engines are in their ordinary mode, where each draws its own key.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from vestige.audit.recording import (
    Look,
    Recording,
    Setting,
    SmallRun,
    Tape,
    flat_charges,
    records,
    small_run,
)
from vestige.gradients.clipping import Clipping
from vestige.methods import Method
from vestige.plan import PrivacyPlan
from vestige.sampling import streams as randomness

# Single precision, as most runs have; enough coordinates for a variance to within half a per cent.
SETTING = Setting(size=60, steps=200, hidden=40, dtype=torch.float32)


@dataclass(frozen=True)
class Observation:
    """The recordings of a run and of one that was resumed from the middle of it."""

    method: Method
    setting: Setting
    plan: PrivacyPlan
    whole: Recording
    resumed: Recording
    correlated: bool  # one charge covers several lots, whose noise is correlated
    forgotten: int  # charges that were saved and not on the ledger of the engine that resumed

    @property
    def recordings(self) -> tuple[Recording, Recording]:
        """Both of them."""
        return self.whole, self.resumed


@dataclass
class Stretch:
    """The looks and lots that one charge pays for: one lot, or several of correlated noise."""

    rate: float
    multiplier: float  # infinity where nothing was charged
    looks: list[Look]

    @property
    def lots(self) -> list[int]:
        """The numbers of the lots."""
        return sorted({look.lot for look in self.looks})


def observe(
    method: Method,
    *,
    steps: int = SETTING.steps,
    seed: int | None = None,
    clipping: Clipping | None = None,
    groups: int = 0,
) -> Observation:
    """Run `method` for `steps` releases, and half as many again from its middle.

    With `groups`, their number, each clipping group has a noise multiplier of its own.
    """
    setting = replace(SETTING, steps=steps, clipping=clipping, groups=groups)
    with entropy_from(seed):
        run = small_run(method, records(setting), setting)
        with Tape(run.engine) as tape:
            run.go(tape, steps - steps // 2)
            saved, charged = _saved(run), len(flat_charges(run.engine))
            run.go(tape, steps // 2)
        other = small_run(method, records(setting, seed=5), setting)
        _load(other, saved)
        forgotten = max(0, charged - len(flat_charges(other.engine)))
        with Tape(other.engine) as again:
            other.go(again, steps // 2)
    attached = run.engine._run
    correlated = attached is not None and attached.door.correlation is not None
    recordings = tape.finished(), again.finished()
    return Observation(method, setting, run.engine.plan, *recordings, correlated, forgotten)


def _saved(run: SmallRun) -> tuple[dict[str, Any], ...]:
    states = run.engine.state_dict(), run.model.state_dict(), run.optimizer.state_dict()
    return copy.deepcopy(states)


def _load(run: SmallRun, saved: tuple[dict[str, Any], ...]) -> None:
    engine, model, optimizer = saved
    run.engine.load_state_dict(engine)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)


def stretches(recording: Recording, correlated: bool) -> list[Stretch]:
    """What each charge pays for: a lot, or with correlated noise all lots up to the next charge.

    Several charges of one lot do not add up (they would be about independent lots), so the
    strongest one counts.
    """
    found: list[Stretch] = []
    for look in recording.looks:
        same_lot = bool(found) and found[-1].looks[-1].lot == look.lot
        if not found or not (same_lot or (correlated and not look.charges)):
            found.append(Stretch(0.0, float("inf"), []))
        found[-1].looks.append(look)
        for rate, multiplier in look.charges:
            found[-1].rate = max(found[-1].rate, rate)
            found[-1].multiplier = min(found[-1].multiplier, multiplier)
    return found


@contextmanager
def entropy_from(seed: int | None) -> Iterator[None]:
    """Keys from `seed` in place of the operating system's entropy, one after the other.

    Engines stay in their ordinary mode, where each has a key of its own; only that the keys can be
    had again. None leaves everything as it is.
    """
    if seed is None:
        yield
        return
    drawn = 0

    def token_bytes(count: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(f"vestige check {seed} {drawn}".encode()).digest(count)

    place: Any = randomness
    original = place.secrets
    place.secrets = SimpleNamespace(**vars(original) | {"token_bytes": token_bytes})
    try:
        yield
    finally:
        place.secrets = original
