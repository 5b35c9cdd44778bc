"""`vestige compare`: the fair column for a user's own data and list of methods.

Every method gets the same formal (epsilon, delta), or the same noise; the same initial weights and
splits, seed by seed; the same few learning rates to choose from. The noise is fresh in every run:
the data is private, and runs that shared their noise would cost more than their sum says.

Guarantee: `study_epsilon` is that of all runs together, tuning included, for adding or removing one
record that the runs train on: whoever sees all of the results learns no more than it says. Records
that are held out, for validation or as the test split, are outside of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.checks import check_count, finite
from vestige.engine.ending import ending
from vestige.errors import ConfigError
from vestige.lab.kept_runs import KeptRuns
from vestige.lab.statistics import PairedTest, corrected, paired_test, summarise
from vestige.methods import resolve
from vestige.plan import common_adjacency
from vestige.privacy import accounting, ledger_file
from vestige.privacy.ledger import Event
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.interrupt import Interrupt
from vestige.train.training import Progress

if TYPE_CHECKING:
    from vestige.train.data import Dataset

MATCHES = ("epsilon", "sigma")
FACTORS = (1 / 16, 1 / 4, 1.0, 4.0)  # of a method's default learning rate, where it is tuned
VALIDATION_SHARE = 5  # a fifth of the training records is held out for tuning
# Of a run's result.
_KEPT = "accuracy loss epsilon noise_multiplier steps interrupted folder".split()
_ONE_OF = (
    "one of {} runs of a comparison; whoever has seen results of the others has to count the cost "
    "of the whole study, in its comparison.json"
)
_SPACES = re.compile(r"\W*[, ]\W*")  # of a run's name, for its folder
_SPLIT_SEED = 0  # public: which records these are


@dataclass(frozen=True)
class Study:
    """What `vestige compare` is asked for. `base` holds what all runs share."""

    methods: tuple[str, ...]
    epsilon: float
    base: TrainConfig = field(default_factory=TrainConfig)
    match: str = "epsilon"
    tune: bool = False
    seeds: int = 5
    ledger: Path | None = None  # a file that every run is charged on before its noise is drawn
    out: Path | None = None  # a folder that the runs are kept in, to go on from and to load

    def __post_init__(self) -> None:
        if len(self.methods) < 2 or len(set(self.methods)) != len(self.methods):
            raise ConfigError(
                f"methods {', '.join(self.methods) or '(none)'}: give at least two different ones, "
                "with commas."
            )
        if self.match not in MATCHES:
            raise ConfigError(f"match {self.match!r} is unknown: choose {' or '.join(MATCHES)}.")
        for name in self.methods:
            if not resolve(name).private and self.match == "epsilon":
                raise ConfigError(
                    f"method {name!r} has no guarantee, so no noise reaches an epsilon: leave it "
                    "out, or compare at equal noise with match sigma, for study."
                )
        check_count("seeds", self.seeds)
        if self.tune and self.base.lr is not None:
            raise ConfigError(f"lr {self.base.lr} and tune are both given: give one of them.")
        self.base.changed(epsilon=self.epsilon)  # refuses a bad one
        if self.base.dataset_size is not None:
            raise ConfigError(
                f"dataset_size {self.base.dataset_size} is for single runs: a comparison says how "
                "many records it trains on."
            )

    @property
    def reference(self) -> str:
        """What the others are tested against: DP-SGD, or the first."""
        return "dp-sgd" if "dp-sgd" in self.methods else self.methods[0]

    @property
    def asked(self) -> dict[str, Any]:
        """What makes it this study and no other one, as JSON types."""
        own = {name: getattr(self, name) for name in "methods epsilon match tune seeds".split()}
        return self.base.saved() | own

    @property
    def runs(self) -> int:
        """How many there will be."""
        each = self.seeds + (len(FACTORS) if self.tune else 0)
        return each * len(self.methods)


Tell = Callable[[str, Progress], None]


def compare(study: Study, tell: Tell | None = None) -> dict[str, Any]:
    """Run the study and return its report, as plain JSON types.

    After Ctrl-C the report is of the runs so far, with "interrupted": true. With `out` the same
    study goes on from there (kept_runs.py).
    """
    with Interrupt() as interrupt:
        return _Comparison(study, tell or (lambda *_: None), interrupt).report()


class _Comparison:
    """A study at work."""

    def __init__(self, study: Study, tell: Tell, interrupt: Interrupt) -> None:
        self._study, self._tell, self._interrupt = study, tell, interrupt
        self._kept = study.out and KeptRuns(study.out, study.asked, study.ledger)
        self._ledger = self._kept.ledger if self._kept else study.ledger
        self._runs: list[dict[str, Any]] = []
        self._events: list[Event] = []
        self._left_out = False  # a run, after Ctrl-C

    def report(self) -> dict[str, Any]:
        """Run everything, and sum it up."""
        study = self._study
        whole = self._load()
        final, tuning = _split(whole) if study.tune else (whole, None)
        sigma = self._shared_noise(len(final.x_train)) if study.match == "sigma" else None
        for method in study.methods:
            rate = self._chosen_rate(method, tuning, sigma) if tuning is not None else study.base.lr
            for seed in range(study.seeds):
                self._run(method, "final", final, seed, rate, sigma)
        return {
            "dataset": study.base.dataset,
            "model": study.base.chosen_model,
            "match": study.match,
            "target_epsilon": study.epsilon,
            "delta": study.base.delta,
            "records": len(final.x_train),
            "validation_records": 0 if tuning is None else len(tuning.x_test),
            "seeds": study.seeds,
            "reference": study.reference,
            "methods": self._lines(),
            "runs": self._runs,
            **self._cost(),
            "interrupted": self._left_out,
        }

    def _load(self) -> Dataset:
        base = self._study.base
        self._tell(f"loading {Path(base.dataset).name}", Progress("loading"))
        whole = training.load_data(base, _SPLIT_SEED)
        if whole.task == "regression":
            raise ConfigError(
                f"{Path(base.dataset).name} is for regression, and a comparison tests accuracies: "
                "compare on classes, or train each method by itself."
            )
        return whole

    def _shared_noise(self, records: int) -> float:
        """The noise at which DP-SGD reaches the epsilon."""
        base = self._study.base
        return accounting.calibrate(
            self._study.epsilon,
            base.delta,
            base.chosen_lot / records,
            base.planned_steps(records),
            base.accountant,
        ).noise_multiplier

    def _chosen_rate(self, method: str, tuning: Dataset, sigma: float | None) -> float | None:
        """The rate with the best accuracy on the validation records; the smaller one in a tie."""
        default = resolve(method).info.default_lr
        tried = []
        for factor in FACTORS:
            # With a seed that is not reported.
            run = self._run(method, "tuning", tuning, self._study.seeds, default * factor, sigma)
            if run is not None:
                tried.append((-run["accuracy"], run["lr"]))
        return min(tried)[1] if tried else None

    def _run(
        self,
        method: str,
        role: str,
        dataset: Dataset,
        seed: int,
        rate: float | None,
        sigma: float | None,
    ) -> dict[str, Any] | None:
        if self._interrupt.pending or self._left_out:
            self._left_out = True
            return None
        config = self._study.base.changed(
            method=method,
            seed=seed,
            lr=rate,
            epsilon=self._study.epsilon if sigma is None else None,
            noise_multiplier=sigma,
            tuning=self._study.base.tuning or _ONE_OF.format(self._study.runs),
        )
        name = f"{method}, {role}, seed {seed}"
        name += f", lr {config.chosen_lr:g}" if role == "tuning" else ""

        def tell(progress: Progress) -> None:
            self._tell(name, progress)

        if self._kept:
            result, own = self._kept.run(_SPACES.sub("-", name), config, dataset, tell)
        else:
            result, own = self._made(config, dataset, tell)
        self._events += own
        run = {"method": method, "role": role, "seed": seed, "lr": config.chosen_lr}
        run |= {name: result[name] for name in _KEPT}
        # Of this run: the ledger may hold others, whose cost the study's own sum has.
        run["epsilon"] = finite(accounting.epsilon(own, config.delta, config.accountant))
        self._runs.append(run)
        self._left_out = self._left_out or result["interrupted"]
        return None if result["interrupted"] else run

    def _made(
        self, config: TrainConfig, dataset: Dataset, tell: Callable[[Progress], None]
    ) -> tuple[dict[str, Any], list[Event]]:
        """A run of which nothing is kept but its charges: made, or planned."""
        session = training.prepare(config, dataset=dataset)
        if self._ledger is not None:
            session.engine.keep_ledger(self._ledger)
        result = session.run(tell)
        attached = session.engine._attached()
        return result, [*attached.door.own.merged(), *ending(attached).unmade]

    def _lines(self) -> list[dict[str, Any]]:
        by_method = {
            method: [
                run
                for run in self._runs
                if run["method"] == method and run["role"] == "final" and not run["interrupted"]
            ]
            for method in self._study.methods
        }
        accuracies = {
            method: {run["seed"]: run["accuracy"] for run in runs}
            for method, runs in by_method.items()
        }
        tests: dict[str, PairedTest] = {
            method: test
            for method, values in accuracies.items()
            if method != self._study.reference
            and (test := paired_test(values, accuracies[self._study.reference])) is not None
        }
        tested = dict(zip(tests, corrected(list(tests.values())), strict=True))
        return [
            {
                "method": method,
                "guarantee": resolve(method).guarantee,
                "lr": runs[0]["lr"],
                "noise_multiplier": runs[0]["noise_multiplier"],
                "epsilon": runs[0]["epsilon"],
                "accuracy": asdict(summarise([run["accuracy"] for run in runs])),
                "against_reference": asdict(tested[method]) if method in tested else None,
            }
            for method, runs in by_method.items()
            if runs
        ]

    def _cost(self) -> dict[str, Any]:
        """Epsilon of all runs together."""
        base = self._study.base
        exposed = [m for m in {run["method"] for run in self._runs} if not resolve(m).private]
        spent = accounting.epsilon(self._events, base.delta, base.accountant)
        finite_cost = math.isfinite(spent) and not exposed
        adjacencies = (resolve(run["method"]).adjacency for run in self._runs)
        on_ledger = None
        if self._ledger is not None and finite_cost and self._runs:
            everything = ledger_file.read(self._ledger).events
            on_ledger = finite(accounting.epsilon(everything, base.delta, base.accountant))
        return {
            "study_epsilon": spent if finite_cost else None,
            "ledger_epsilon": on_ledger,
            "study_runs": len(self._runs),
            "not_private": sorted(exposed),
            "guarantee": (
                accounting.guarantee(spent, common_adjacency(adjacencies))
                if finite_cost
                else "none"
            ),
        }


def _split(whole: Dataset) -> tuple[Dataset, Dataset]:
    """The records that all runs train on, with the test split and with validation records.

    A fifth of the training records, chosen by a public seed, is for validation; no run trains on
    it. The second dataset has nothing of the test split in it.
    """
    import torch

    count = len(whole.x_train)
    cut = count - count // VALIDATION_SHARE
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_SPLIT_SEED))
    kept, held_out = order[:cut].sort().values, order[cut:].sort().values
    if not len(held_out):
        raise ConfigError(
            f"{count} training records are too few to hold out a fifth for tuning: give more, or "
            "leave --tune out."
        )
    x, y = whole.x_train[kept], whole.y_train[kept]
    final = replace(whole, x_train=x, y_train=y)
    tuning = replace(final, x_test=whole.x_train[held_out], y_test=whole.y_train[held_out])
    return final, tuning
