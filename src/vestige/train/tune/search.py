"""The search: a secret number of trials on drawn candidates, of which the best one is written.

Papernot, Steinke 2022 (arXiv 2110.03620). The number of trials is drawn from a truncated negative
binomial law, each trial draws its candidate from the public list, independently and with
replacement, and runs to its end; ties are broken at random.

Guarantee: what is written (the winner's model, settings and score) is (epsilon, delta)-DP with the
epsilon of the whole search, which is on the ledger before the first trial. Nothing else of a trial
reaches a disk, a stream, a log, the exit code or a file's time of modification. How long the search
takes and how much memory it uses follow the number of trials, and so do the times at which a file
system says that files were made: whoever watches the machine or its disk is not covered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vestige.checks import finite
from vestige.errors import ConfigError
from vestige.privacy.selection import Law
from vestige.sampling.streams import Randomness
from vestige.train.checks import check_out
from vestige.train.config import DATASETS, TrainConfig
from vestige.train.evaluation import ledger_of_held_out
from vestige.train.interrupt import Interrupt
from vestige.train.loop import Progress
from vestige.train.run_folder import LEDGER, ExistingFolder, RunFolder
from vestige.train.tune import trial
from vestige.train.tune.candidates import Candidate, candidates
from vestige.train.tune.cost import charged
from vestige.train.tune.prepared import Plan, planned
from vestige.train.tune.trial import Setup
from vestige.train.tune.writing import Winner, write

TRIALS, CANDIDATE, SEED = b"number of trials", b"candidate of trial", b"seed of trial"
ANSWER = "stopping the search after this step; it stays charged; Ctrl-C again stops now"
Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Search:
    """What `vestige tune` is asked for. `base` holds what all candidates share.

    `base.epsilon` is that of the whole search, `base.evaluate_epsilon` that of all its scores for
    the held-out records, which are public otherwise: benchmark sets, or `public_held_out`.
    """

    rows: tuple[Mapping[str, Any], ...]
    base: TrainConfig = field(default_factory=TrainConfig)
    trials: float = 10.0
    eta: float = 0.0
    public_held_out: bool = False
    out: Path | None = None
    law: Law = field(init=False)
    candidates: tuple[Candidate, ...] = field(init=False)

    def __post_init__(self) -> None:
        own = self.base.dataset not in DATASETS
        noisy = self.base.evaluate_epsilon is not None
        if own and not noisy and not self.public_held_out:
            raise ConfigError(
                f"the held-out records of {Path(self.base.dataset).name} are your own, and a score "
                "on them would reveal them: give --evaluate-epsilon, which adds noise to every "
                "score, or --held-out-is-public if they are."
            )
        if noisy and self.public_held_out:
            raise ConfigError(
                f"evaluate_epsilon {self.base.evaluate_epsilon} and held-out records that are "
                "public are both given: public records need no noise, so give one of them."
            )
        from vestige.parallel.ranks import launched

        count, told = launched()
        if count > 1:
            raise ConfigError(
                f"a search runs in one process, and this is one of {count} ({told}): each would "
                "draw a number of trials of its own. Start vestige tune by itself."
            )
        object.__setattr__(self, "law", Law.with_mean(float(self.trials), float(self.eta)))
        object.__setattr__(self, "candidates", candidates(self.base, self.rows))
        check_out(self.out or Path("runs"), fresh=self.out is not None and not self._stopped)

    @property
    def _stopped(self) -> bool:
        """Whether the folder is that of a search that was stopped, and holds its ledger alone."""
        if self.out is None or not self.out.is_dir():
            return False
        left = {path.name for path in self.out.iterdir()}
        return LEDGER in left and left <= {LEDGER, ledger_of_held_out(Path(LEDGER)).name}

    def folder(self) -> RunFolder:
        """The folder of the winner; one that holds a stopped search's ledger is gone on with."""
        if self.out is not None and self._stopped:
            return ExistingFolder(self.out)
        return RunFolder(self.out, f"{Path(self.base.dataset).stem}-tuned")


def tune(search: Search, tell: Tell | None = None) -> dict[str, Any]:
    """Search, write the winner's folder and return what its result.json holds.

    After Ctrl-C nothing of a trial is written, and the answer says "interrupted": the search stays
    charged, and the same command begins a new one on the same ledger.
    """
    tell = tell or (lambda _: None)
    with search.folder() as folder:
        ledger = search.base.ledger or folder.own(LEDGER)
        plan = planned(search.base, search.candidates, search.law, ledger, tell)
        with Interrupt(ANSWER) as interrupt, contextlib.ExitStack() as ledgers:
            tell(Progress("charging the search"))
            kept, folder.keep = folder.keep, True
            try:
                bills = [plan.bill, *([plan.held_out] if plan.held_out else [])]
                ledgers.enter_context(charged(bills))
            except ConfigError:  # before anything was charged
                folder.keep = kept
                raise
            begun = datetime.now()
            tell(Progress("searching; how many trials there are is secret"))
            secret = Randomness(search.base.noise_seed)
            winner = best_of(search.law, plan.setups, secret, lambda: interrupt.pending)
            if winner is None:
                return _stopped(plan)
            tell(Progress("writing the winner"))
            return write(search.base, search.rows, plan, winner, folder, begun)


def _stopped(plan: Plan) -> dict[str, Any]:
    """All that is left of a search that was stopped: its cost."""
    return {
        "interrupted": True,
        "epsilon": finite(plan.bill.epsilon),
        "delta": plan.bill.delta,
        "ledger": str(plan.bill.path),
    }


def best_of(
    law: Law, setups: Sequence[Setup], secret: Randomness, stop: Callable[[], bool]
) -> Winner | None:
    """The best of a random number of trials on drawn setups; None where the search was stopped."""
    best, winner = (-math.inf, 0.0), None
    for number in range(law.draw(lambda k: float(secret.uniforms(TRIALS, k, 1)[0]))):
        draw, tie = secret.uniforms(CANDIDATE, number, 2).tolist()
        place = min(int((1 - draw) * len(setups)), len(setups) - 1)
        seed = None
        if secret.repeatable:
            seed = int.from_bytes(secret.stream(SEED, number).update(bytes(8)), "big")
        outcome = None if stop() else trial.run(setups[place], seed, stop)
        if outcome is None:
            return None
        if (outcome.score, tie) > best:
            best, winner = (outcome.score, tie), Winner(place, outcome)
    return winner
