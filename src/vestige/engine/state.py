"""The state of a run: what is saved of it, and how another engine goes on with it.

Everything is checked before anything is changed, so a state or a checkpoint that is refused leaves
the engine as it was.

Guarantee: what was spent before stays charged; with a ledger file, the file's charges count, and
those for releases that a crash has lost are counted as lost.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vestige.engine import checkpoint
from vestige.engine.run import Run
from vestige.engine.sharded_state import (
    gathered,
    own_history,
    own_optimizer_state,
    scattered,
    whole_history,
)
from vestige.errors import ConfigError, PrivacyError, VestigeError
from vestige.parallel.meetings import Doing
from vestige.privacy.events import counts
from vestige.privacy.ledger import Facts, Ledger, Spending, together
from vestige.updates.master_weights import MasterWeights

_VERSION = 2
_COUNTS = ("released", "next_lot", "lost")
_FACTS = ("repeatable_noise", "ledger_file")
_BESIDE = {"version", "others", "gap"}
_STATE = {"run", "plan", "ledger", "own", *_COUNTS, *_FACTS}


def state_of(run: Run) -> dict[str, Any]:
    """Plan, ledger and position as plain JSON types, and tensors of past releases."""
    run.check_state()
    others = run.door.ledger.facts(but=run.door.run)
    parts = {part.name: part.state_dict() for part in run.parts if part.name}
    return {
        **whole_history(parts, run.groups),
        "version": _VERSION,
        "run": run.door.run,
        "own": run.door.own.state_dict(),
        "lost": run.door.lost,
        "plan": run.agreed.as_dict(),
        "ledger": run.door.ledger.state_dict(),
        "released": run.door.steps,
        "next_lot": run.lots.next_lot,
        "repeatable_noise": run.repeatable,
        "ledger_file": run.door.account is not None or run.kept_elsewhere,
        **({"others": asdict(others)} if others != Facts() else {}),
        # Without a file, whoever goes on from here makes a new gap anyway.
        **({"gap": True} if run.gap and run.door.account else {}),
    }


def load_state(run: Run, state: Mapping[str, Any]) -> None:
    """Go on where `state` was taken."""
    _check_state(state, run)
    state = own_history(state, run.groups)
    parts = [part for part in run.parts if part.name]
    for part in parts:
        part.check_state(state[part.name], state["released"])
    others = _others(state)
    own = _own_charges(run, state)
    own = _take_charges(run, state, own)  # refuses before it changes anything
    for part in parts:
        part.load_state_dict(state[part.name])
    run.lots.next_lot = state["next_lot"]
    run.position.lot, run.position.release = state["next_lot"], state["released"]
    repeated = run.repeatable and bool(state["repeatable_noise"])
    run.repeatable = run.repeatable or bool(state["repeatable_noise"])
    _continue_ledger(run, state, own, others)
    run.gave_up = state["next_lot"] > state["released"]
    if run.door.correlation:
        run.door.correlation.continue_from(state["next_lot"], repeated)


def save(
    path: Path,
    run: Run,
    facts: Mapping[str, Any],
    noise_seed: int | None,
    others: Mapping[str, Any],
) -> None:
    """Write a checkpoint of the run; `facts` are the public ones about its data."""
    if run.in_lot:
        raise PrivacyError(
            "save_checkpoint was called in the middle of a lot: save after optimizer.step(), "
            "or call engine.abandon_lot() first."
        )
    if run.capture.meet:
        run.capture.meet(Doing.SAVING)
    if run.door.account:
        run.door.account.open()  # a checkpoint that is there has its run on the ledger
        run.door.account.settle()
    state = {
        "engine": state_of(run),
        "model": gathered(run.capture.module.state_dict()),
        "optimizer": gathered(run.optimizer.state_dict()),
        "optimizer_class": type(run.optimizer).__name__,
        "data": dict(facts),
        "others": {k: v.state_dict() if _has_state(v) else v for k, v in others.items()},
    }
    if run.ranks.leads:
        checkpoint.write(path, state, {**checkpoint.generators(), "noise_seed": noise_seed})


def load(
    path: Path, run: Run, facts: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Go on from a checkpoint; returns its plain values that nobody in `others` has taken."""
    state, secret = checkpoint.read(path)
    checkpoint.check_model(state["model"], run.capture.module)
    checkpoint.check_optimizer(state["optimizer"], state["optimizer_class"], run.optimizer)
    checkpoint.check_data(state["data"], facts)
    missing = sorted(set(others) - set(state["others"]))
    if missing:
        raise ConfigError(f"the checkpoint holds nothing under {', '.join(missing)}.")
    model, optimizer = run.capture.module, run.optimizer
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    try:
        model.load_state_dict(scattered(state["model"], model.state_dict()))
        masters = run.part(MasterWeights)
        with masters.wide() if masters else nullcontext():
            optimizer.load_state_dict(own_optimizer_state(state["optimizer"], optimizer))
        load_state(run, state["engine"])  # last: it refuses before it changes anything
    except Exception as error:
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        if isinstance(error, VestigeError):
            raise
        raise ConfigError(
            f"the checkpoint {str(path)!r} holds values that no run has ({error}): it was not "
            "written by save_checkpoint."
        ) from error
    for name, thing in others.items():
        thing.load_state_dict(state["others"][name])
    if secret and run.ranks.leads:  # what others draw in their loops must stay their own
        checkpoint.restore_generators(secret)
    return {k: v for k, v in state["others"].items() if k not in others}


def _own_charges(run: Run, state: Mapping[str, Any]) -> Ledger:
    """The run's charges until now: what the state knows of, or more where the file has more."""
    known, account = _saved(state["own"]), run.door.account
    whole = _saved(state["ledger"])
    # Correlated noise is charged for a stretch of releases at once.
    forgotten = run.door.correlation is None and known.steps < state["released"]
    if forgotten or counts(known.merged()) - counts(whole.merged()):
        raise PrivacyError(
            f"the saved state has {state['released']} releases, {known.steps} charges of its own "
            f"and {whole.steps} on its ledger, which do not fit: it was damaged or changed."
        )
    if account is None:
        if state["ledger_file"] and run.ranks.leads:
            raise PrivacyError(
                "the saved run has its ledger in a file, which may know of more than this state: "
                "go on with PrivacyEngine(ledger=FILE)."
            )
        return known
    if account.file.has_open(state["run"], account):
        raise PrivacyError(
            f"run {state['run']} is going on in another engine of this process: end it before it "
            "is continued from a checkpoint."
        )
    spent = account.file.content.runs.get(state["run"])
    there = counts(spent.events if spent else ())
    missing = counts(known.merged()) - there
    if missing or (spent is None and state["ledger_file"]):
        raise PrivacyError(
            f"the ledger {str(account.file.path)!r} lacks {missing.total()} releases of run "
            f"{state['run']} that the saved state knows of: it was replaced or cut. Restore the "
            "ledger that belongs to the run."
        )
    everything = counts(account.file.content.events)
    if counts(_saved(state["ledger"]).merged()) - everything:
        raise PrivacyError(
            f"the ledger {str(account.file.path)!r} lacks releases of other runs that the saved "
            "state knows of: it was replaced or cut. Restore the ledger that belongs to the run."
        )
    return Ledger.of(spent.events if spent else ())


def _saved(state: Any) -> Ledger:
    ledger = Ledger()
    ledger.load_state_dict(state)
    return ledger


def _take_charges(run: Run, state: Mapping[str, Any], own: Ledger) -> Ledger:
    """Have what the state knows of on the ledger; the run's own charges that are then there.

    A ledger without a file that another engine of this process has charged for the same run knows
    of more than the state: it stays as it is. One with charges of other runs gets those of the
    state beside them.
    """
    ledger = run.door.ledger
    if run.kept_elsewhere and not run.ranks.leads:
        return own  # it is a copy of what rank 0 has in its file, which knows of everything
    if ledger.file or not ledger.steps or ledger.engines > 1:
        ledger.load_state_dict(state["ledger"])
        return own
    whole, before = _saved(state["ledger"]), ledger.runs.get(state["run"])
    alone = counts(whole.merged()) == counts(own.merged())
    if before is not None and alone and counts(own.merged()) <= counts(before.own.merged()):
        return Ledger.of(before.own.events)
    ledger.add(whole.events)
    return own


def _others(state: Mapping[str, Any]) -> Facts:
    """What the state says of other runs on its ledger; nothing where there is nothing to say."""
    try:
        facts = Facts(**state.get("others", {}))
    except TypeError:
        facts = None
    if facts is None or type(facts.adjacency) is not str or type(facts.test_mode) is not bool:
        raise ConfigError(
            f"the engine state has others={state['others']!r}, which is not what state_dict "
            "writes: it was damaged."
        )
    return facts


def _continue_ledger(run: Run, state: Mapping[str, Any], own: Ledger, others: Facts) -> None:
    """Take the saved run's name on the ledger, with everything that it is charged there."""
    door = run.door
    door.lost = state["lost"] + own.steps - _saved(state["own"]).steps
    door.run = state["run"]
    door.own.load_state_dict(own.state_dict())  # in place: others may look at it
    door.facts = replace(door.facts, test_mode=run.repeatable)
    door.ledger.inherited = together([door.ledger.inherited, others])
    run.gap = not state["ledger_file"] or bool(state.get("gap"))
    if door.account:
        door.account.about["test_mode"] = run.repeatable
        door.account.rename(door.run)
    elif own.steps:
        door.ledger.spends(door.session, door.run, Spending(door.facts, door.own))


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None))


def _check_state(state: Mapping[str, Any], run: Run) -> None:
    """Refuse a saved state that this run cannot continue from."""
    if run.in_lot:
        raise PrivacyError(
            "a state was loaded in the middle of a lot: finish the lot or call "
            "engine.abandon_lot() first."
        )
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        version = state.get("version") if isinstance(state, Mapping) else None
        raise ConfigError(f"engine state has version {version!r}; this Vestige reads {_VERSION}.")
    _check_complete(state, _STATE)
    for name in _COUNTS:
        if type(state[name]) is not int or state[name] < 0:
            raise ConfigError(
                f"the engine state has {name}={state[name]!r}, which is no count: it was damaged."
            )
    for name in _FACTS:
        if type(state[name]) is not bool:
            raise ConfigError(
                f"the engine state has {name}={state[name]!r}, which is neither true nor false: it "
                "was damaged."
            )
    if run.begun or run.door.steps or run.door.own.steps:
        raise PrivacyError(
            "a state was loaded into an engine that has drawn lots: it would forget them, and use "
            "their noise once more. Make a new PrivacyEngine and load before the first batch."
        )
    if not isinstance(state["plan"], Mapping) or not isinstance(state["run"], str):
        raise ConfigError("the engine state's plan or run is no such thing: it was damaged.")
    ours, theirs = run.agreed.as_dict(), dict(state["plan"])
    keys = sorted(ours.keys() | theirs.keys(), key=str)
    different = [k for k in keys if not checkpoint.same(theirs.get(k), ours.get(k))]
    if different:
        details = "; ".join(f"{k}: {theirs.get(k)} -> {ours.get(k)}" for k in different)
        raise PrivacyError(
            f"the saved run was made with other settings ({details}): call make_private with "
            "the same ones (make_private_with_epsilon: with resume=CHECKPOINT), or start a new run."
        )
    names = {part.name for part in run.parts if part.name}
    _check_complete(state, names)
    unbuilt = sorted(set(map(str, state)) - names - _STATE - _BESIDE)
    if unbuilt:
        raise ConfigError(
            f"the saved run had a {', a '.join(unbuilt)}, which this one has not: build the same "
            "scheduler before the state is loaded."
        )


def _check_complete(state: Mapping[str, Any], names: set[str]) -> None:
    missing = names - set(state)
    if missing:
        raise ConfigError(
            f"the engine state lacks {', '.join(sorted(missing))}: it was not written by "
            "state_dict, or was damaged."
        )
