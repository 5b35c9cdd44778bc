"""What a search leaves behind: the folder of its winner, and nothing of any other trial.

Every file has the time at which the search began: the time between two files would tell how long
it took, and so how many trials there were.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from vestige import statement
from vestige.checks import finite, round_up
from vestige.engine.caveats import REPEATABLE, REPEATABLE_BEFORE
from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.ending import AS_PLANNED, Ending
from vestige.privacy.ledger import together
from vestige.statement.model import RunFacts
from vestige.train.config import TrainConfig
from vestige.train.loop import versions
from vestige.train.run_folder import CONFIG, RESULT, RunFolder
from vestige.train.saved_model import MODEL_FILE, WEIGHTS_FILE, described, sha256
from vestige.train.tasks import from_hits
from vestige.train.tune.cost import ACCOUNTANT, METHOD
from vestige.train.tune.prepared import Plan
from vestige.train.tune.trial import Outcome

_NOISY = "the held-out split, through one noisy release of every trial, which its own ledger holds"
_PUBLIC = "the held-out split, which is public or was declared so"


@dataclass(frozen=True)
class Winner:
    """The best trial: which candidate it had, and what it handed out."""

    place: int
    outcome: Outcome


def write(
    base: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    plan: Plan,
    winner: Winner,
    folder: RunFolder,
    begun: datetime,
) -> dict[str, Any]:
    """Write the winner's folder; the content of its result.json."""
    outcome, bill, setup = winner.outcome, plan.bill, plan.setups[winner.place]
    if outcome.plan is None:
        raise ConfigError(
            f"the search has no winner, because its trials failed ({outcome.failure}); it stays "
            f"charged on {str(bill.path)!r}. Try one candidate with vestige train on public data."
        )
    result = _result(base, rows, plan, winner) | {"folder": str(folder.path)}
    for name, content in outcome.weights.items():
        folder.write(name, content)
    folder.write_json(MODEL_FILE, described(setup.dataset, setup.config.chosen_model))
    config = setup.config.public() | {name: result[name] for name in ("settings", "beta")}
    folder.write_json(
        CONFIG,
        config
        | {
            "noise_multiplier": outcome.plan.noise_multiplier,
            "planned_steps": outcome.plan.steps,
            "planned_epsilon": result["epsilon"],
            "target_epsilon": base.epsilon,
            "ledger": None if base.ledger is None else str(base.ledger),
            "repeatable_noise": base.noise_seed is not None,
            "search": result["search"],
            "optimizer": result["optimizer"],
            "device": result["device"],
            "versions": versions(),
        },
    )
    stated = _statement(base, plan, winner, result, begun)
    folder.write_json(statement.JSON_FILE, stated)
    folder.write(statement.MARKDOWN_FILE, statement.markdown(stated).encode())
    folder.write(statement.HTML_FILE, statement.html(stated).encode())
    folder.write_json(RESULT, result)
    settle_times(folder, begun)
    return result


def _statement(
    base: TrainConfig, plan: Plan, winner: Winner, result: Mapping[str, Any], begun: datetime
) -> dict[str, Any]:
    """The winner's statement, over the search and what its ledger held before."""
    outcome, bill, dataset = winner.outcome, plan.bill, plan.setups[winner.place].dataset
    assert outcome.plan is not None
    told = {name: result[name] for name in RunFacts.model_fields if name in result}
    return statement.build(
        replace(outcome.plan, adjacency=result["adjacency"]),
        [bill.event],
        delta=bill.delta,
        accountant=ACCOUNTANT,
        released=result["steps"],
        repeatable=bill.facts.test_mode,
        caveats=result["caveats"],
        earlier=bill.earlier,
        ending=Ending(AS_PLANNED),
        repeatable_before=bill.before.test_mode,
        run=told
        | {
            "classes": dataset.classes,
            "classes_inferred": dataset.classes_inferred,
            "planned_epsilon": result["epsilon"],
            "date": begun.date().isoformat(),
            "held_out": ["score"],
            "weights_sha256": sha256(outcome.weights[WEIGHTS_FILE]),
            **({"tuning": base.tuning} if base.tuning else {}),
        },
    )


def _result(
    base: TrainConfig, rows: Sequence[Mapping[str, Any]], plan: Plan, winner: Winner
) -> dict[str, Any]:
    """What result.json holds: the winner's, at the cost of the search."""
    outcome, bill, setup = winner.outcome, plan.bill, plan.setups[winner.place]
    assert bill.event.selection is not None
    law, dataset, chosen = bill.event.selection.law, setup.dataset, rows[winner.place]
    facts = together([bill.before, bill.facts])
    result = dict(outcome.result)
    if plan.held_out is not None:  # exact figures of records that are protected are not kept
        result = {name: value for name, value in result.items() if not name.startswith("averaged")}
        result |= {"accuracy": None, "loss": None, "metrics": {}}
        result["held_out_release"] = from_hits(dataset, outcome.score) | {
            "epsilon": plan.held_out.alone,
            "epsilon_of_ledger": finite(plan.held_out.epsilon),
            "delta": bill.delta,
            "noise_std": setup.held_out_noise,
            "adjacency": plan.held_out.facts.adjacency,
        }
    said = [c for c in outcome.caveats if c not in (REPEATABLE, REPEATABLE_BEFORE)]
    said += [REPEATABLE] * bill.facts.test_mode + [REPEATABLE_BEFORE] * bill.before.test_mode
    said.append(
        f"the best of a secret number of trials (mean {law.mean:.4g}) on {len(plan.setups)} "
        f"candidates: epsilon is that of the whole search; a trial alone has "
        f"{round_up(bill.of_one_trial)}, which must not be claimed for it"
    )
    return result | {
        "tuned_by": METHOD,
        "chosen": dict(chosen),
        "score": from_hits(dataset, outcome.score),
        "measured_on": _PUBLIC if plan.held_out is None else _NOISY,
        "epsilon": finite(bill.epsilon),
        "accountant": ACCOUNTANT,
        "guarantee": accounting.guarantee(bill.epsilon, facts.adjacency),
        "adjacency": facts.adjacency,
        "target_epsilon": base.epsilon,
        "repeatable_noise": base.noise_seed is not None,
        "interrupted": False,
        "lost_releases": 0,
        "earlier_releases": sum(event.count for event in bill.earlier),
        "caveats": said,
        "search": {
            "epsilon": finite(bill.alone),
            "epsilon_of_one_trial": finite(bill.of_one_trial),
            "mean_trials": law.mean,
            "eta": law.eta,
            "gamma": law.gamma,
            "candidates": [dict(row) for row in rows],
        },
    }


def settle_times(folder: RunFolder, begun: datetime) -> None:
    """Give every file, and the folder, the time at which the search began."""
    then = begun.timestamp()
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (then, then))
