"""The tape records while it is entered, and leaves nothing behind."""

from __future__ import annotations

from vestige.audit.tape import Tape
from vestige.audit.verify.runs import Setting, records, small_run
from vestige.methods import (
    DPSGD,
)


def test_the_tape_leaves_nothing_behind():
    run = small_run(DPSGD(), records(Setting()), Setting(), noise_seed=1)
    door = run.engine.door
    with Tape(run.engine, frozen=[]) as tape:
        assert door.observers == [tape] and door.randomness.relabel is not None
        run.go(tape, 2)
    assert door.observers == [] and door.randomness.relabel is None
    assert len(tape.seen.looks) == 2
    run.go(tape, 1)
    assert len(tape.seen.looks) == 2  # not recorded any more
