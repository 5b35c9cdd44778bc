"""The statement of a run that was killed: from its last checkpoint and its ledger.

The checkpoint has the plan and what was public when it was made; the ledger has everything that was
charged since, so the epsilon is that of the whole run, the releases that the crash has lost and
those that were still planned included.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.plan import PrivacyPlan
from vestige.privacy import ledger_file
from vestige.privacy.ending import Ending
from vestige.privacy.ledger import Facts, together
from vestige.statement import build
from vestige.train.run_folder import CHECKPOINT, run_ledger


def of_folder(folder: Path, ledger: Path | None = None) -> dict[str, Any]:
    """The statement of the unfinished run in `folder`; ConfigError where it cannot be made.

    `ledger` is the file that the run shares with others, where it is not in the folder.
    """
    from vestige.engine import checkpoint
    from vestige.engine.caveats import REPEATABLE, REPEATABLE_BEFORE

    state, _ = checkpoint.read(folder / CHECKPOINT)
    try:
        engine, config = state["engine"], state["others"]["config"]
        plan = PrivacyPlan.restored(engine["plan"])
        path, run = run_ledger(folder, config["ledger"], ledger), engine["run"]
        delta, accountant = config["delta"], config["accountant"]
        known = sum(event["count"] for event in engine["own"]["events"])
        ending = Ending.restored(state["others"]["ending"])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(folder / CHECKPOINT)!r} was not made by vestige train: use engine.statement() "
            "in your own loop."
        ) from error
    spent = ledger_file.read(path).runs
    own = spent[run].events if run in spent else ()
    charged = sum(event.count for event in own)
    others = together(s.facts for name, s in spent.items() if name != run and s.events)
    seeded = {REPEATABLE: engine["repeatable_noise"], REPEATABLE_BEFORE: others.test_mode}
    return build(
        replace(plan, adjacency=together([others, Facts(plan.adjacency)]).adjacency),
        own,
        delta=delta,
        accountant=accountant,
        released=engine["released"],
        repeatable=engine["repeatable_noise"],
        caveats=[caveat for caveat, holds in seeded.items() if holds],
        run={
            "dataset": config["dataset"],
            "seed": config["seed"],
            "interrupted": True,
            "target_epsilon": config["epsilon"],
            "max_epsilon": config["max_epsilon"],
            "tuning": config.get("tuning"),
        },
        earlier=[e for name, other in spent.items() if name != run for e in other.events],
        over_reported=engine["lost"] + max(0, charged - known),
        ending=ending,
        repeatable_before=others.test_mode,
    )
