"""An experiment as data: what a TOML file says, as pydantic models.

A file has a header (name, title, paper, item, what the paper claims, what it leaves open and we
`assumed`), a `[protocol]` that all runs share, one `[[arm]]` for each curve or line of a table,
perhaps a `[grid]` of protocol values that every arm is run at, the methods that are `[[absent]]`
here, and a `[fair]` column. A study of directions has one `[[sweep]]` for each panel instead.
docs/experiments.md describes every key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, PrivateAttr, model_validator

from vestige.errors import ConfigError
from vestige.lab.fields import (
    MOST_SEEDS,
    AnyText,
    Model,
    Number,
    Numbers,
    Seeds,
    Span,
    Table,
    Text,
    Texts,
    Values,
    Whole,
    lists_of,
    numbers_of,
    one_of,
    refuse,
    some_of,
)
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
PRINTED = (
    *("accuracy", "std", "low", "high", "seconds", "relative", "depth", "memory_ratio"),
    "epsilon",
)
STUDY = (
    *("dimension", "batch", "sigma", "bounding", "signal", "trials", "seed", "examples"),
    "releases",
)
GRID = ("model", "clip", "noise_multiplier", "group_noise_multiplier", "lot", "lr", "delta")
Printed = Annotated[dict[str, Any], numbers_of(PRINTED)]
StudySettings = Annotated[dict[str, Any], numbers_of(STUDY)]
_NOISE = ("noise_multiplier", "group_noise_multiplier", "epsilon")


class RunValues(Model):
    """What a protocol or an arm says about its runs; RunSetting checks what these are."""

    model: Text | None = None
    lr: Number = None
    lot: Whole | None = None
    epochs: Whole | None = None
    train_range: Span | None = None
    test_range: Span | None = None
    noise_multiplier: Number = None
    group_noise_multiplier: Number = None
    clip: Number = None
    clipping: Text | None = None
    momentum: Number = None
    delta: Number = None
    accountant: Text | None = None

    @property
    def values(self) -> dict[str, Any]:
        """What is given, by the names that RunSetting has."""
        names = ("method", "settings", *RunValues.model_fields)
        given = self.model_fields_set | ({"settings"} if hasattr(self, "settings") else set())
        return {name: getattr(self, name) for name in names if name in given}


_Values = TypeVar("_Values", bound=RunValues)


class Protocol(RunValues):
    """What all runs share."""

    datasets: Texts


class Arm(RunValues):
    """One line of a table: a method with its settings, and what the paper prints for it."""

    label: Text
    method: Text
    settings: Table = Field(default_factory=dict)
    paper: Printed = Field(default_factory=dict)


class Absent(Model):
    """A line of the paper's table that is not run here, and why."""

    label: Text
    reason: Text
    paper: Printed = Field(default_factory=dict)


class FairArm(RunValues):
    """A method of the fair column: tuned over `rates`, or at the rate chosen for `follows`."""

    label: Text
    method: Text
    settings: Table = Field(default_factory=dict)
    rates: Numbers = ()
    follows: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> FairArm:
        if bool(self.rates) == bool(self.follows):
            raise refuse(
                f"the arm {self.label!r} has rates {list(self.rates)} and follows "
                f"{self.follows!r}: give either the key 'rates' or the key 'follows'."
            )
        return self


class Fair(Model):
    """The fair column: equal formal epsilon, equal tuning on images that no run trains on."""

    epsilons: Numbers
    validation_range: Span = (5000, 7000)
    tuning_seed: Whole = 100
    seeds: Seeds = 5
    datasets: Texts = ()
    protocol: RunValues = RunValues()
    arms: tuple[FairArm, ...] = Field((), alias="arm")

    @property
    def most_rates(self) -> int:
        """How many learning rates a method is tuned over."""
        return max(len(arm.rates) for arm in self.arms)

    @model_validator(mode="after")
    def _check(self) -> Fair:
        _check_labels("[[fair.arm]]", self.arms)
        tuned = [arm for arm in self.arms if not arm.follows]
        labels = [arm.label for arm in tuned]
        for arm in self.arms:
            if arm.follows and arm.follows not in labels:
                raise refuse(
                    f"the arm {arm.label!r} follows {arm.follows!r}, which is no tuned arm: choose "
                    f"one of {', '.join(labels)}."
                )
        if len({len(arm.rates) for arm in tuned}) > 1:
            raise refuse("the arms have different numbers of rates: tune all of them alike.")
        if self.tuning_seed < self.seeds:
            raise refuse(
                f"tuning_seed = {self.tuning_seed} is one of the {self.seeds} seeds that are "
                "reported: choose another."
            )
        return self


class Sweep(Model):
    """One panel of a direction study: the setting `varied` takes each of `values`."""

    name: Text
    varied: Annotated[str, one_of(STUDY)]
    values: Values
    fixed: StudySettings = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Sweep:
        if self.varied in self.fixed:
            raise refuse(f"fixed has {self.varied!r}, which varies: leave it out.")
        return self

    def points(self) -> list[dict[str, Any]]:
        """The configuration of every point."""
        return [
            {"kind": "direction-error", **self.fixed, self.varied: value} for value in self.values
        ]

    def quickened(self, quick: Quick) -> Sweep:
        """A smaller copy: settings divided down by whole numbers, and others set."""

        def smaller(name: str, value: Any) -> Any:
            value = quick.set.get(name, value)
            return max(2, int(value // quick.divide[name])) if name in quick.divide else value

        fixed = {name: smaller(name, value) for name, value in self.fixed.items()}
        values = tuple(dict.fromkeys(smaller(self.varied, value) for value in self.values))
        return self.model_copy(update={"fixed": fixed, "values": values})


class Quick(RunValues):
    """What a smoke run changes: values of the runs, or settings of a direction study."""

    seeds: Seeds = 2
    epsilons: Numbers = ()
    validation_range: Span | None = None
    divide: Annotated[dict[str, Any], numbers_of(STUDY, least=1)] = Field(default_factory=dict)
    set: StudySettings = Field(default_factory=dict)


class Experiment(Model):
    """A table or figure of a paper, as a grid of runs."""

    name: Text
    title: Text
    paper: Text
    item: AnyText = ""
    claim: AnyText = ""
    kind: Annotated[str, one_of(KINDS)] = "training"
    assumed: Texts = ()
    figures: Annotated[tuple[str, ...], some_of(FIGURES)] = ()
    seeds: Seeds = 5
    reference: AnyText = ""
    tables: Annotated[tuple[str, ...], some_of(TABLES)] = ("accuracy",)
    targets: Table = Field(default_factory=dict)
    device: AnyText = "cpu"
    protocol: Protocol = Protocol(datasets=())
    arms: tuple[Arm, ...] = Field((), alias="arm")
    absent: tuple[Absent, ...] = ()
    grid: Annotated[dict[str, Any], lists_of(GRID)] = Field(default_factory=dict)
    fair: Fair | None = None
    sweeps: tuple[Sweep, ...] = Field((), alias="sweep")
    quick_values: Quick = Field(Quick(), alias="quick")
    _path: Path = PrivateAttr(Path())
    _quick: bool = PrivateAttr(False)

    @property
    def path(self) -> Path:
        """The file that says this."""
        return self._path

    @property
    def quick(self) -> bool:
        """Whether this is a smoke run."""
        return self._quick

    @property
    def origin(self) -> str:
        """The paper, and its item."""
        return ", ".join(part for part in (self.paper, self.item) if part)

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data of the published column."""
        return self.protocol.datasets

    @property
    def fair_datasets(self) -> tuple[str, ...]:
        """The data of the fair column: its own, or those of the published one."""
        return (self.fair.datasets or self.datasets) if self.fair else ()

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        study = self.kind == "direction-error"
        _check_kind(self, study)
        if study:
            if not self.sweeps:
                raise refuse("there is no [[sweep]]: give at least one.")
            return self
        if not self.datasets:
            raise refuse("the table [protocol] names no datasets: name at least one.")
        _check_labels("[[arm]]", self.arms)
        labels = [arm.label for arm in self.arms]
        if self.reference and self.reference not in labels:
            raise refuse(
                f"reference = {self.reference!r} is the label of no arm: choose one of "
                f"{', '.join(labels)}."
            )
        for dataset, value in self.targets.items():
            if dataset not in self.datasets:
                raise refuse(f"targets has {dataset!r}, none of the experiment's datasets.")
            if not isinstance(value, float) or not 0 < value < 1:
                raise refuse(f"targets, {dataset} = {value!r} is wrong: it must be an accuracy.")
        return self

    def variants(self) -> Iterator[dict[str, Any]]:
        """Every combination of the grid's values; one empty one without a grid."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def run(self, arm: Arm, dataset: str, variant: Mapping[str, Any], seed: int) -> RunSetting:
        """A run of the published column."""
        values = _merged(self.protocol.values, arm.values, variant)
        return RunSetting(dataset=dataset, seed=seed, **values)

    def fair_run(
        self, arm: FairArm, dataset: str, epsilon: float, rate: float, seed: int, tuning: bool
    ) -> RunSetting:
        """A run of the fair column, measured on the validation images if it is for tuning."""
        assert self.fair is not None
        values = _merged(self.protocol.values, self.fair.protocol.values, arm.values)
        values = {name: value for name, value in values.items() if name not in _NOISE}
        if tuning:
            values |= {"test_range": None, "validation_range": self.fair.validation_range}
        values |= {"epsilon": epsilon, "lr": rate}
        return RunSetting(dataset=dataset, seed=seed, **values)

    def with_seeds(self, seeds: int | None) -> Experiment:
        """The experiment with another number of seeds in both columns."""
        if seeds is None:
            return self
        if type(seeds) is not int or not 1 <= seeds <= MOST_SEEDS:
            raise ConfigError(f"seeds {seeds!r} must be a whole number from 1 to {MOST_SEEDS}.")
        fair = self.fair and self.fair.model_copy(update={"seeds": seeds})
        return self.model_copy(update={"seeds": seeds, "fair": fair})

    def quickened(self) -> Experiment:
        """A smoke run: few epochs and seeds, one epsilon, two learning rates."""
        quick = self.quick_values
        if self.kind == "direction-error":
            changes: dict[str, Any] = {"sweeps": tuple(s.quickened(quick) for s in self.sweeps)}
        else:
            values = {"epochs": 2} | quick.values
            changes = {
                "seeds": quick.seeds,
                "protocol": self.protocol.model_copy(update=values),
                "arms": tuple(_without(arm, values) for arm in self.arms),
                "fair": self.fair and _quick_fair(self, self.fair, values),
            }
        copy = self.model_copy(update=changes)
        copy._quick = True
        return copy


def _quick_fair(experiment: Experiment, fair: Fair, values: Mapping[str, Any]) -> Fair:
    quick = experiment.quick_values
    arms = (_without(arm, values).model_copy(update={"rates": arm.rates[:2]}) for arm in fair.arms)
    return fair.model_copy(
        update={
            "seeds": quick.seeds,
            "epsilons": quick.epsilons or fair.epsilons[-1:],
            "datasets": experiment.fair_datasets[:1],
            "validation_range": quick.validation_range or fair.validation_range,
            "protocol": _without(fair.protocol, values),
            "arms": tuple(arms),
        }
    )


def _check_kind(experiment: Experiment, study: bool) -> None:
    """Keys of the one kind mean nothing in a file of the other."""
    header = ("name", "title", "paper", "item", "claim", "kind", "assumed", "figures")
    divided = {"divide", "set"}
    foreign = experiment.model_fields_set - {*header, "sweeps", "quick_values"}
    if not study:
        foreign = experiment.model_fields_set & {"sweeps"}
    given = experiment.quick_values.model_fields_set
    foreign |= given - divided if study else given & divided
    if foreign:
        raise refuse(
            f"the key {min(foreign)!r} has no meaning in an experiment of the kind "
            f"{experiment.kind!r}: leave it out."
        )


def _check_labels(what: str, arms: tuple[Arm, ...] | tuple[FairArm, ...]) -> None:
    if not arms:
        raise refuse(f"there is no {what}: give at least one.")
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise refuse(f"two arms have the label {label!r}: give each its own.")


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Later values win. A form of the noise takes the place of another."""
    merged: dict[str, Any] = {}
    for part in parts:
        if any(form in part for form in _NOISE):
            merged = {name: value for name, value in merged.items() if name not in _NOISE}
        merged |= part
    return merged


def _without(arm: _Values, names: Mapping[str, Any]) -> _Values:
    kept = {name: getattr(arm, name) for name in arm.model_fields_set if name not in names}
    return type(arm).model_construct(**kept)
