"""An experiment as data: what a TOML file says, as pydantic models.

A file has a header (name, title, paper, item, what the paper claims, what it leaves open and we
`assumed`), a `[protocol]` that all runs share, perhaps `[ranges.NAME]` with images of one dataset,
one `[[arm]]` for each curve or line of a table, perhaps a `[grid]` of protocol values that every
arm is run at, the methods that are `[[absent]]` here, and a `[fair]` column. A study of directions
has one `[[sweep]]` for each panel instead.
docs/experiments.md describes every key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, PrivateAttr, model_validator

from vestige.errors import ConfigError
from vestige.lab.arms import (
    Absent,
    Arm,
    Candidate,
    Fair,
    FairArm,
    Protocol,
    Quick,
    Ranges,
    Runs,
    check_labels,
)
from vestige.lab.fields import MOST_SEEDS, Model, Seeds, Text, one_of, refuse
from vestige.lab.readings import Reading
from vestige.lab.setting import RunSetting
from vestige.lab.sweeps import Sweep

KINDS = ("training", "direction-error")
TABLES = ("accuracy", "runtime", "memory", "targets")
FIGURES = (
    *"accuracy-by-epoch accuracy-by-epsilon epsilon-by-epoch depth-by-interval stages".split(),
    *"runtime final-accuracy best-accuracy direction-error".split(),
    *"accuracy-by-marginal marginal-by-epoch".split(),
)
GRID = "model noise_multiplier group_noise_multiplier clip lot lr delta".split()
Grid = dict[Annotated[str, one_of(GRID)], Annotated[list[Any], Field(min_length=1)]]
_Runs = TypeVar("_Runs", bound=Runs)
_NOISE = ("noise_multiplier", "group_noise_multiplier", "epsilon")


class Experiment(Model):
    """A table or figure of a paper, as a grid of runs."""

    name: Text
    title: Text
    paper: Text
    item: str = ""
    claim: str = ""
    heading: Text = "As published"  # of the first column
    kind: Annotated[str, one_of(KINDS)] = "training"
    assumed: list[str] = Field(default=[])
    figures: list[Annotated[str, one_of(FIGURES)]] = Field(default=[])
    coloured: list[Text] = Field(default=[], max_length=3)  # labels, where there are many arms
    seeds: Seeds = 5
    reference: str = ""
    tables: list[Annotated[str, one_of(TABLES)]] = Field(default=["accuracy"])
    targets: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    device: str = "cpu"
    long: bool = False  # its rows have checkpoints, and go on where a command was stopped
    protocol: Protocol = Protocol(datasets=[])
    ranges: dict[str, Ranges] = Field(default_factory=dict)  # by dataset
    notes: dict[str, Text] = Field(default_factory=dict)  # said wherever the dataset is named
    arms: list[Arm] = Field(default=[], alias="arm")
    absent: list[Absent] = Field(default=[])
    grid: Grid = Field(default_factory=dict)
    fair: Fair | None = None
    sweeps: list[Sweep] = Field(default=[], alias="sweep")
    quick_values: Quick = Field(default=Quick(), alias="quick")
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
    def datasets(self) -> list[str]:
        """The data of the published column."""
        return self.protocol.datasets

    @property
    def fair_datasets(self) -> list[str]:
        """The data of the fair column: its own, or those of the published one."""
        return (self.fair.datasets or self.datasets) if self.fair else []

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
        if self.arms or not self.fair:
            check_labels("[[arm]]", self.arms)
        labels = [arm.label for arm in self.arms]
        if self.reference and self.reference not in labels:
            raise refuse(
                f"reference = {self.reference!r} is the label of no arm: choose one of "
                f"{', '.join(labels)}."
            )
        for label in self.coloured:
            if label not in labels:
                raise refuse(f"coloured has {label!r}, the label of no arm: choose one that is.")
        for table in ("targets", "ranges", "notes"):
            for dataset in getattr(self, table):
                if dataset not in (*self.datasets, *self.fair_datasets):
                    raise refuse(f"{table} has {dataset!r}, none of the experiment's datasets.")
        return self

    def variants(self) -> Iterator[dict[str, Any]]:
        """Every combination of the grid's values; one empty one without a grid."""
        names = [name for name in GRID if name in self.grid]
        for values in itertools.product(*(self.grid[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    def run(
        self, arm: Arm, dataset: str, variant: Mapping[str, Any], seed: int
    ) -> RunSetting | Reading:
        """A run of the published column."""
        images = self._images(dataset).of_runs
        values = _merged(self.protocol.values, images, arm.values, variant)
        if arm.plain is not None:
            names = Reading.model_fields.keys() & values.keys()
            values = {name: values[name] for name in names} | arm.plain
            return Reading(dataset=dataset, seed=seed, **values)
        return RunSetting(dataset=dataset, seed=seed, **values)

    def fair_run(
        self, arm: FairArm, dataset: str, epsilon: float, chosen: Candidate, seed: int, tuning: bool
    ) -> RunSetting:
        """A run of the fair column, measured on the validation images if it is for tuning."""
        assert self.fair is not None
        own, fair = self._images(dataset), self.fair
        values = _merged(self.protocol.values, own.of_runs, fair.protocol.values, arm.values)
        values = {name: value for name, value in values.items() if name not in _NOISE}
        if tuning:
            held_out = own.validation_range or fair.validation_range
            values |= {"test_range": None, "validation_range": held_out}
            values["train_range"] = own.tuning_range or fair.tuning_range or values["train_range"]
        values |= {"epsilon": epsilon, "lr": chosen.rate}
        values["settings"] = values["settings"] | chosen.settings
        return RunSetting(dataset=dataset, seed=seed, **values)

    def _images(self, dataset: str) -> Ranges:
        return self.ranges.get(dataset, Ranges())

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
            changes: dict[str, Any] = {
                "sweeps": [s.quickened(quick.divide, quick.set) for s in self.sweeps]
            }
        else:
            values = {"epochs": 2} | quick.values
            changes = {
                "seeds": quick.seeds,
                "ranges": {},
                "protocol": self.protocol.model_copy(update=values),
                "arms": [_without(arm, values) for arm in self.arms],
                "fair": self.fair and _quick_fair(self, self.fair, values),
            }
        copy = self.model_copy(update=changes)
        copy._quick = True
        return copy


def _quick_fair(experiment: Experiment, fair: Fair, values: Mapping[str, Any]) -> Fair:
    quick = experiment.quick_values
    arms = [
        _without(arm, values).model_copy(
            update={
                "rates": arm.rates[:2],
                "choices": {name: few[:1] for name, few in arm.choices.items()},
            }
        )
        for arm in fair.arms
    ]
    return fair.model_copy(
        update={
            "seeds": quick.seeds,
            "epsilons": quick.epsilons or fair.epsilons[-1:],
            "datasets": experiment.fair_datasets[:1],
            "validation_range": quick.validation_range or fair.validation_range,
            "tuning_range": None if quick.validation_range else fair.tuning_range,
            "tuning_seeds": 1,
            "protocol": _without(fair.protocol, values),
            "arms": arms,
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


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Later values win. A form of the noise takes the place of another."""
    merged: dict[str, Any] = {}
    for part in parts:
        if any(form in part for form in _NOISE):
            merged = {name: value for name, value in merged.items() if name not in _NOISE}
        merged |= part
    return merged


def _without(arm: _Runs, names: Mapping[str, Any]) -> _Runs:
    kept = {name: getattr(arm, name) for name in arm.model_fields_set if name not in names}
    return type(arm).model_construct(**kept)
