"""An experiment as data: what a TOML file in experiments/ says, checked key by key.

A file has a header (name, title, paper, item, what the paper claims, what it leaves open and we
`assumed`), a `[protocol]` that all runs share, one `[[arm]]` for each curve or line of a table,
perhaps a `[grid]` of protocol values that every arm is run at, the methods that are `[[absent]]`
here, and a `[fair]` column. docs/experiments.md describes every key.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.lab.directions import Sweep, read_sweeps
from vestige.lab.section import Section
from vestige.lab.setting import RunSetting

KINDS = ("training", "direction-error")
TABLES = ("accuracy", "runtime", "memory", "targets")
FIGURES = (
    "accuracy-by-epoch",
    "accuracy-by-epsilon",
    "epsilon-by-epoch",
    "depth-by-interval",
    "stages",
    "runtime",
    "final-accuracy",
    "direction-error",
)

# What an arm may change about the protocol. The order is that of RunSetting.
_ARM_KEYS = (
    "model",
    "lr",
    "lot",
    "epochs",
    "train_range",
    "test_range",
    "noise_multiplier",
    "group_noise_multiplier",
    "clip",
    "clipping",
    "momentum",
    "delta",
    "accountant",
)
_MOST_SEEDS = 1000  # every run of an experiment is listed before the first one starts
_NOISE = ("noise_multiplier", "group_noise_multiplier", "epsilon")
_GRID_KEYS = ("model", "clip", "noise_multiplier", "group_noise_multiplier", "lot", "lr", "delta")


@dataclass(frozen=True)
class Arm:
    """One line of a table: a method with its settings, and what the paper prints for it."""

    label: str
    values: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """A line of the paper's table that is not run here, and why."""

    label: str
    reason: str
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FairArm:
    """A method of the fair column: tuned over `rates`, or at the rate chosen for `follows`."""

    label: str
    values: Mapping[str, Any]
    rates: tuple[float, ...] = ()
    follows: str | None = None


@dataclass(frozen=True)
class Fair:
    """The fair column: equal formal epsilon, equal tuning on images that no run trains on."""

    epsilons: tuple[float, ...]
    validation_range: tuple[int, int]
    tuning_seed: int
    seeds: int
    datasets: tuple[str, ...]
    protocol: Mapping[str, Any]
    arms: tuple[FairArm, ...]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper, as a grid of runs. `quick` ones are smoke runs."""

    name: str
    title: str
    paper: str
    item: str
    claim: str
    path: Path
    kind: str = "training"
    assumed: tuple[str, ...] = ()
    seeds: int = 5
    reference: str = ""
    tables: tuple[str, ...] = ("accuracy",)
    figures: tuple[str, ...] = ()
    targets: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    datasets: tuple[str, ...] = ()
    protocol: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[Arm, ...] = ()
    absent: tuple[Absent, ...] = ()
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fair: Fair | None = None
    sweeps: tuple[Sweep, ...] = ()
    quick_values: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False

    def variants(self) -> Iterator[dict[str, Any]]:
        """Every combination of the grid's values; one empty one without a grid."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def run(self, arm: Arm, dataset: str, variant: Mapping[str, Any], seed: int) -> RunSetting:
        """A run of the published column."""
        values = _merged(self.protocol, arm.values, variant)
        return RunSetting(dataset=dataset, seed=seed, **values)

    def fair_run(
        self, arm: FairArm, dataset: str, epsilon: float, rate: float, seed: int, tuning: bool
    ) -> RunSetting:
        """A run of the fair column, measured on the validation images if it is for tuning."""
        assert self.fair is not None
        values = _merged(self.protocol, self.fair.protocol, arm.values)
        values = {k: v for k, v in values.items() if k not in _NOISE}
        if tuning:
            values |= {"test_range": None, "validation_range": self.fair.validation_range}
        values |= {"epsilon": epsilon, "lr": rate}
        return RunSetting(dataset=dataset, seed=seed, **values)

    def with_seeds(self, seeds: int | None) -> Experiment:
        """The experiment with another number of seeds in both columns."""
        if seeds is None:
            return self
        if type(seeds) is not int or not 1 <= seeds <= _MOST_SEEDS:
            raise ConfigError(f"seeds {seeds!r} must be a whole number from 1 to {_MOST_SEEDS}.")
        return replace(self, seeds=seeds, fair=self.fair and replace(self.fair, seeds=seeds))

    def quickened(self) -> Experiment:
        """A smoke run: few epochs and seeds, one epsilon, two learning rates."""
        if self.kind == "direction-error":
            sweeps = tuple(sweep.quickened(self.quick_values) for sweep in self.sweeps)
            return replace(self, quick=True, sweeps=sweeps)
        quick = dict(self.quick_values)
        seeds = int(quick.pop("seeds", 2))
        epsilons = quick.pop("epsilons", None)
        validation = quick.pop("validation_range", None)
        changes = {"epochs": 2} | quick
        arms = tuple(replace(a, values=_without(a.values, changes)) for a in self.arms)
        fair = self.fair
        if fair is not None:
            fair = replace(
                fair,
                seeds=seeds,
                epsilons=tuple(epsilons or fair.epsilons[-1:]),
                datasets=fair.datasets[:1],
                validation_range=tuple(validation or fair.validation_range),
                protocol=_without(fair.protocol, changes),
                arms=tuple(
                    replace(a, rates=a.rates[:2], values=_without(a.values, changes))
                    for a in fair.arms
                ),
            )
        return replace(
            self,
            quick=True,
            seeds=seeds,
            protocol=dict(self.protocol) | changes,
            arms=arms,
            fair=fair,
        )


def read(path: Path) -> Experiment:
    """The experiment that a TOML file describes. ConfigError names the file and the key."""
    top = Section(_values(path), str(path), "top level")
    name = top.text("name")
    if name != path.stem:
        raise top.refuse(f"name = {name!r} is not the file's name: it must be {path.stem!r}.")
    kind = top.choice("kind", KINDS, "training")
    header: dict[str, Any] = {
        "name": name,
        "title": top.text("title"),
        "paper": top.text("paper"),
        "item": top.text("item", ""),
        "claim": top.text("claim", ""),
        "path": path,
        "kind": kind,
        "assumed": top.texts("assumed"),
        "figures": _chosen(top, "figures", FIGURES),
        "quick_values": quick.items() if (quick := top.table("quick")) else {},
    }
    if kind == "direction-error":
        experiment = Experiment(**header, seeds=1, tables=(), sweeps=read_sweeps(top))
        top.finish()
        _check_sweeps(top, experiment)
        return experiment
    experiment = _read_training(top, header)
    _check_quick(top, experiment)
    return experiment


def _values(path: Path) -> dict[str, Any]:
    """What the file holds; ConfigError where it is no TOML, or holds what no experiment can."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the experiment {path} cannot be read ({error.strerror}): check the name."
        ) from error
    except ValueError as error:  # not TOML, or not UTF-8
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: this is no valid TOML ({reason}): mend it there.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: brackets are nested too deeply: mend it there.") from error
    _check_values(path, values, "top level")
    return values


def _check_values(path: Path, value: Any, place: str) -> None:
    """Numbers must be finite, and within what a computer counts with; nothing is a date."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not -(2**63) < value < 2**63:
        raise ConfigError(f"{path}: {place} = {str(value)[:40]} is wrong: it is out of range.")
    if not isinstance(value, int | float | str | list | dict):
        raise ConfigError(f"{path}: {place} = {value} is wrong: it is a date or a time.")
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value, start=1)
    for key, item in inner:
        _check_values(path, item, str(key) if place == "top level" else f"{place}, {key}")


def _check_sweeps(top: Section, experiment: Experiment) -> None:
    """The settings of a study are numbers; a study itself checks the rest when it is run."""
    quick = experiment.quick_values
    named = [
        *((name, value) for sweep in experiment.sweeps for name, value in sweep.fixed.items()),
        *((sweep.varied, value) for sweep in experiment.sweeps for value in sweep.values),
        *(pair for key in ("divide", "set") for pair in dict(quick.get(key, {})).items()),
    ]
    for name, value in named:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise top.refuse(f"{name} = {value!r} is wrong: it must be a number.")
    for name, value in dict(quick.get("divide", {})).items():
        if value < 1:
            raise top.refuse(f"quick, divide, {name} = {value!r} is wrong: it must be at least 1.")


def _read_training(top: Section, header: dict[str, Any]) -> Experiment:
    protocol = top.table("protocol")
    if protocol is None:
        raise top.refuse("the table [protocol] is missing: add it.")
    datasets = protocol.texts("datasets")
    if not datasets:
        raise protocol.refuse("datasets is empty: name at least one.")
    shared = _protocol_values(protocol)
    protocol.finish()
    arms = tuple(_arm(section) for section in top.tables("arm"))
    if not arms:
        raise top.refuse("there is no [[arm]]: give at least one.")
    labels = [arm.label for arm in arms]
    targets = top.table("targets")
    grid = top.table("grid")
    experiment = Experiment(
        **header,
        seeds=_seeds(top, 5),
        reference=top.text("reference", ""),
        tables=_chosen(top, "tables", TABLES) or ("accuracy",),
        targets=_targets(targets, datasets) if targets else {},
        device=top.text("device", "cpu"),
        datasets=datasets,
        protocol=shared,
        arms=arms,
        absent=tuple(_absent(section) for section in top.tables("absent")),
        grid=_grid(grid) if grid else {},
        fair=_fair(fair, datasets) if (fair := top.table("fair")) else None,
    )
    top.finish()
    _check_unique(top, "arm", labels)
    if experiment.reference and experiment.reference not in labels:
        raise top.refuse(
            f"reference = {experiment.reference!r} is the label of no arm: choose one of "
            f"{', '.join(labels)}."
        )
    _check_runs(top, experiment)
    return experiment


def _protocol_values(section: Section) -> dict[str, Any]:
    """The values of RunSetting that a protocol or an arm gives; RunSetting checks them."""
    values: dict[str, Any] = {}
    for key in _ARM_KEYS:
        if section.has(key):
            span = key in ("train_range", "test_range")
            values[key] = section.span(key) if span else section.raw(key)
    return values


def _arm(section: Section) -> Arm:
    arm = Arm(section.text("label"), _arm_values(section), _paper(section))
    section.finish()
    return arm


def _arm_values(section: Section) -> dict[str, Any]:
    settings = section.table("settings")
    return {
        "method": section.text("method"),
        "settings": settings.items() if settings else {},
        **_protocol_values(section),
    }


def _absent(section: Section) -> Absent:
    absent = Absent(section.text("label"), section.text("reason"), _paper(section))
    section.finish()
    return absent


def _paper(section: Section) -> dict[str, float]:
    """What the paper prints, by measure."""
    printed = section.table("paper")
    if printed is None:
        return {}
    keys = (
        "accuracy",
        "std",
        "low",
        "high",
        "seconds",
        "relative",
        "depth",
        "memory_ratio",
        "epsilon",
    )
    values = {key: printed.raw(key) for key in keys if printed.has(key)}
    for key, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise printed.refuse(f"{key} = {value!r} is wrong: it must be a number.")
    printed.finish()
    return values


def _grid(section: Section) -> dict[str, tuple[Any, ...]]:
    grid = {}
    for key in _GRID_KEYS:
        if section.has(key):
            value = section.raw(key)
            if not isinstance(value, list) or not value:
                raise section.refuse(f"{key} = {value!r} is wrong: it must be a list of values.")
            grid[key] = tuple(value)
    section.finish()
    return grid


def _targets(section: Section, datasets: tuple[str, ...]) -> dict[str, float]:
    targets = {}
    for dataset, value in section.items().items():
        if dataset not in datasets:
            raise section.refuse(f"{dataset!r} is none of the experiment's datasets.")
        if not isinstance(value, float) or not 0 < value < 1:
            raise section.refuse(f"{dataset} = {value!r} is wrong: it must be an accuracy.")
        targets[dataset] = value
    return targets


def _fair(section: Section, datasets: tuple[str, ...]) -> Fair:
    chosen = section.texts("datasets") or datasets
    arms = []
    for inner in section.tables("arm"):
        follows = inner.text("follows", "") or None
        rates = () if follows else inner.numbers("rates")
        arms.append(FairArm(inner.text("label"), _arm_values(inner), rates, follows))
        inner.finish()
    protocol = section.table("protocol")
    fair = Fair(
        epsilons=section.numbers("epsilons"),
        validation_range=section.span("validation_range", (5000, 7000)),
        tuning_seed=section.whole("tuning_seed", 100),
        seeds=_seeds(section, 5),
        datasets=chosen,
        protocol=_protocol_values(protocol) if protocol else {},
        arms=tuple(arms),
    )
    if protocol:
        protocol.finish()
    section.finish()
    if not fair.arms:
        raise section.refuse("there is no [[fair.arm]]: give at least one.")
    tuned = [arm.label for arm in fair.arms if not arm.follows]
    _check_unique(section, "arm", [arm.label for arm in fair.arms])
    for arm in fair.arms:
        if arm.follows and arm.follows not in tuned:
            raise section.refuse(
                f"the arm {arm.label!r} follows {arm.follows!r}, which is no tuned arm: choose "
                f"one of {', '.join(tuned)}."
            )
    if len({len(arm.rates) for arm in fair.arms if not arm.follows}) > 1:
        raise section.refuse("the arms have different numbers of rates: tune all of them alike.")
    if fair.tuning_seed < fair.seeds:
        raise section.refuse(
            f"tuning_seed = {fair.tuning_seed} is one of the {fair.seeds} seeds that are "
            "reported: choose another."
        )
    return fair


def _seeds(section: Section, default: int) -> int:
    seeds = section.whole("seeds", default, least=1)
    if seeds > _MOST_SEEDS:
        raise section.refuse(f"seeds = {seeds} is wrong: it must be at most {_MOST_SEEDS}.")
    return seeds


def _check_runs(top: Section, experiment: Experiment) -> None:
    """Make a run of every arm and value, which checks methods, datasets, settings and sizes."""
    first = next(experiment.variants())
    others = [
        first | {key: value} for key, values in experiment.grid.items() for value in values[1:]
    ]
    for dataset in experiment.datasets:
        for number, arm in enumerate(experiment.arms, start=1):
            for variant in (first, *others):
                place = f"arm {number} ({arm.label})"
                _checked(top, place, experiment.run, arm, dataset, variant, 0)
    fair = experiment.fair
    for dataset in fair.datasets if fair else ():
        for number, tuned in enumerate(fair.arms if fair else (), start=1):
            place = f"fair, arm {number} ({tuned.label})"
            rate = tuned.rates[0] if tuned.rates else 0.1
            _checked(top, place, experiment.fair_run, tuned, dataset, 1.0, rate, 0, True)


def _check_quick(top: Section, experiment: Experiment) -> None:
    quick = top.table("quick")
    if quick is None:
        return
    known = (*_ARM_KEYS, "seeds", "epsilons", "validation_range")
    for key in quick.items():
        if key not in known:
            raise quick.refuse(f"the key {key!r} is unknown: it may have {', '.join(known)}.")
    _seeds(quick, 2)
    quick.numbers("epsilons", ())
    for key in ("train_range", "test_range", "validation_range"):
        quick.span(key, (0, 1))
    _check_runs(top, experiment.quickened())


def _checked(top: Section, place: str, make: Any, *arguments: Any) -> None:
    try:
        make(*arguments).train_config()
    except (ConfigError, TypeError) as error:
        # A TypeError is a value of the wrong kind that a constructor tripped over.
        raise top.refuse(f"{place}: {error}") from error


def _check_unique(section: Section, what: str, labels: list[str]) -> None:
    for label in labels:
        if labels.count(label) > 1:
            raise section.refuse(f"two {what}s have the label {label!r}: give each its own.")


def _chosen(section: Section, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    values = section.texts(key)
    for value in values:
        if value not in known:
            raise section.refuse(f"{key} has {value!r}: choose from {', '.join(known)}.")
    return values


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Later values win. A form of the noise takes the place of another."""
    merged: dict[str, Any] = {}
    for part in parts:
        if any(form in part for form in _NOISE):
            merged = _without(merged, dict.fromkeys(_NOISE))
        merged |= part
    return merged


def _without(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}
