"""Which ledger an engine is charged on, and its account in a ledger file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vestige.engine.forecast import coming_events, lots_left
from vestige.engine.lineage import Things
from vestige.engine.run import Run
from vestige.errors import ConfigError, PrivacyError
from vestige.privacy.events import counts
from vestige.privacy.ledger import Event, Ledger
from vestige.privacy.ledger_file import Account, LedgerFile, common_data, opened_here, read


class Books:
    """The ledger of one engine: its own, another engine's, or one in a file.

    A file is opened when everything else is right, so that a refused setting leaves no lock behind.
    """

    def __init__(self, ledger: Ledger | str | Path | None) -> None:
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger()
        self._path = None if ledger is None or isinstance(ledger, Ledger) else Path(ledger)
        self._given = ledger is not None
        self.solved_beside: Sequence[Event] | None = None  # what it held when noise was solved for
        self.inherited = 0  # releases of engines before, on whose ledger this one goes on

    def join(self, things: Things, module: nn.Module, optimizer: Optimizer) -> None:
        """Choose the ledger; engines whose place this one will take pay for a lot at hand first."""
        file = self.ledger.file
        if file and file.closed:
            self.ledger, self._path = Ledger(), file.path  # of an engine that has ended
        if self._path is not None:
            shared = opened_here(self._path)
            if shared and shared.ledger:
                self.ledger, self._path = shared.ledger, None
        held = self.ledger
        leaving = [trace for trace in things.in_the_way(module, optimizer) if not trace.over]
        for trace in leaving:
            trace.pay()
        if not self._given:
            self.ledger = things.ledger_before(leaving) or held
        if self.ledger is not held:
            self.inherited = self.ledger.steps

    def spent(self) -> Sequence[Event]:
        """What the ledger holds, in its file too, before this engine opens it."""
        if self._path is not None and self._path.exists():
            return read(self._path).events
        return self.ledger.merged()

    def check_unchanged(self) -> None:
        """Refuse a ledger that was charged while the noise was solved for."""
        if self.solved_beside is not None and self.ledger.merged() != self.solved_beside:
            raise ConfigError(
                f"the ledger was charged by another run while the noise was solved for: it holds "
                f"{self.ledger.steps} releases now. Call make_private_with_epsilon of a new "
                "engine, and they will be counted."
            )

    def enter(self, run: Run, data: Mapping[str, Any]) -> None:
        """Give the run its account, where there is a file; `data` are public facts about them."""
        run.ranks.decided(lambda: self._enter(run, data))
        follow(run)
        self.ledger.engines += 1

    def _enter(self, run: Run, data: Mapping[str, Any]) -> None:
        self.ledger.check_unit(run.door.facts, run.door.run)
        if self.ledger.file:
            run.door.account = _account(self.ledger.file, run, data)
        elif self._path is not None:
            self._open(self._path, run, data)

    def open(self, path: Path, run: Run, data: Mapping[str, Any], create: bool = True) -> None:
        """Keep the ledger in this file from now on: rank 0 does, others hold a copy."""
        run.ranks.decided(lambda: self._open(path, run, data, create))
        follow(run)

    def _open(self, path: Path, run: Run, data: Mapping[str, Any], create: bool = True) -> None:
        file = LedgerFile(path, create)
        try:
            account = _account(file, run, data)
            self.ledger.keep_in(file)
        except BaseException:
            file.close()
            raise
        run.door.account = account


def follow(run: Run) -> None:
    """Have every rank know what rank 0's ledger holds, under the same name of the run."""
    door = run.door
    if run.ranks.group is None:
        return
    facts = door.ledger.facts(but=door.run)
    events, own, door.lost, door.run, facts, run.kept_elsewhere = run.ranks.sent(
        (door.ledger.events, door.own.events, door.lost, door.run, facts, bool(door.account))
    )
    more = counts(door.ledger.events) - counts(events)
    run.ranks.all_well(
        PrivacyError(
            f"the ledger of rank {run.ranks.rank} holds {more.total()} releases that rank 0's does "
            "not, and they would be forgotten: give every rank the same ledger, or begin on one "
            "rank alone with PrivacyEngine(ledger=FILE)."
        )
        if more
        else None
    )
    if not run.ranks.leads:
        door.ledger.follow(events)
        door.own.follow(own)
        door.ledger.inherited = facts


def _account(file: LedgerFile, run: Run, facts: Mapping[str, Any]) -> Account:
    """The account of a run on a ledger file, which must be about the same data."""
    data = {key: facts[key] for key in ("name", "records", "unit") if key in facts}
    common_data([*(r.about for r in file.content.runs.values()), {"data": data}])
    about = {
        "data": data,
        "method": run.plan.method,
        "steps": run.plan.steps,
        "adjacency": run.plan.adjacency,
        "test_mode": run.repeatable,
    }
    # A crash charges the open block: at most a fiftieth of the plan.
    block = min(64, max(1, (run.plan.steps or 800) // 50))
    return file.account(
        run.door.run,
        about,
        block,
        lambda lots: coming_events(run, min(lots, lots_left(run))),
        run.door.session,
    )
