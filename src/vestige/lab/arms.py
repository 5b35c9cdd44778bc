"""The parts of an experiment's file that say which runs there are: protocol, arms, fair column."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, model_validator

from vestige.lab.fields import Model, Number, Numbers, Seeds, Span, Text, Whole, one_of, refuse
from vestige.lab.sweeps import StudySetting, StudySettings

PRINTED = "accuracy std low high seconds relative depth memory_ratio epsilon".split()
RUN_KEYS = (
    *"model lr lot epochs train_range test_range noise_multiplier group_noise_multiplier".split(),
    *"clip clipping momentum delta accountant averaging views precision features epsilon".split(),
)
Printed = dict[Annotated[str, one_of(PRINTED)], Number]


class Runs(Model):
    """What a part of the file says about its runs, by the names that RunSetting has for it.

    RunSetting checks the values when the runs are made.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def values(self) -> dict[str, Any]:
        """What is given, as arguments of RunSetting."""
        given = self.model_extra or {}
        return {name: given[name] for name in RUN_KEYS if name in given}

    @model_validator(mode="after")
    def _check_names(self) -> Runs:
        for name in self.model_extra or ():
            if name not in RUN_KEYS:
                known = ", ".join((*type(self).model_fields, *RUN_KEYS))
                raise refuse(f"the key {name!r} is unknown: it may have {known}.")
        return self


class Protocol(Runs):
    """What all runs share."""

    datasets: list[Text]


class Ranges(Model):
    """The images of one dataset, where they are others than the protocol's and the fair column's.

    A smoke run has the protocol's for every dataset.
    """

    train_range: Span | None = None
    test_range: Span | None = None
    tuning_range: Span | None = None
    validation_range: Span | None = None

    @property
    def of_runs(self) -> dict[str, Any]:
        """What is given of all runs, as arguments of RunSetting."""
        given = {"train_range": self.train_range, "test_range": self.test_range}
        return {name: span for name, span in given.items() if span}


class MethodRuns(Runs):
    """A method with its settings, under a label; `averaged`: its averaged weights are measured."""

    label: Text
    method: Text
    settings: dict[str, Any] = Field(default_factory=dict)
    averaged: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """What is given, as arguments of RunSetting."""
        return {"method": self.method, "settings": self.settings, **super().values}


class Arm(MethodRuns):
    """One line of a table, and what the paper prints for it; `plain`: it runs in plain_loop.py."""

    paper: Printed = Field(default_factory=dict)
    plain: dict[str, Any] | None = None


class Absent(Model):
    """A line of the paper's table that is not run here, and why."""

    label: Text
    reason: Text
    paper: Printed = Field(default_factory=dict)


class Candidate(NamedTuple):
    """What tuning chooses: a learning rate, and settings beside it."""

    rate: float
    settings: dict[str, Any]


class FairArm(MethodRuns):
    """A method of the fair column: tuned over `rates`, or at the rate chosen for `follows`.

    `choices` are values of its settings that are tuned with the rate, in all combinations.
    """

    rates: Numbers = Field(default=[])
    follows: Text | None = None
    choices: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)

    def candidates(self) -> list[Candidate]:
        """All that tuning tries."""
        combined = itertools.product(self.rates, *self.choices.values())
        return [
            Candidate(rate, dict(zip(self.choices, values, strict=True)))
            for rate, *values in combined
        ]

    @model_validator(mode="after")
    def _check(self) -> FairArm:
        if self.follows and self.choices:
            raise refuse(f"the arm {self.label!r} follows another: leave its choices out.")
        if bool(self.rates) == bool(self.follows):
            raise refuse(
                f"the arm {self.label!r} has rates {self.rates} and follows {self.follows!r}: give "
                "either the key 'rates' or the key 'follows'."
            )
        return self


class Fair(Model):
    """The fair column: equal formal epsilon, equal tuning on images that no such run trains on.

    Tuning trains on `tuning_range`, or else on what final runs train on.
    """

    epsilons: Numbers
    validation_range: Span = Field(default=[5000, 7000])
    tuning_range: Span | None = None
    tuning_seed: Whole = 100
    tuning_seeds: Seeds = 1
    first_seed: Whole = 0
    seeds: Seeds = 5
    margin: Annotated[float, Field(gt=0, lt=1)] | None = None
    datasets: list[Text] = Field(default=[])
    protocol: Runs = Runs()
    arms: list[FairArm] = Field(default=[], alias="arm")

    @property
    def reported(self) -> range:
        """The seeds of the final runs."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def tuned_with(self) -> range:
        """The seeds of the runs that tune."""
        return range(self.tuning_seed, self.tuning_seed + self.tuning_seeds)

    @property
    def most_rates(self) -> int:
        """How many learning rates a method is tuned over."""
        return max(len(arm.rates) for arm in self.arms)

    @model_validator(mode="after")
    def _check(self) -> Fair:
        check_labels("[[fair.arm]]", self.arms)
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
        if set(self.reported) & set(self.tuned_with):
            raise refuse(
                f"tuning_seed = {self.tuning_seed} is one of the {self.seeds} seeds that are "
                "reported: choose another."
            )
        return self


class Quick(Runs):
    """What a smoke run changes: values of the runs, or settings of a direction study."""

    seeds: Seeds = 2
    epsilons: Numbers = Field(default=[])
    validation_range: Span | None = None
    divide: dict[StudySetting, Annotated[float, Field(ge=1)]] = Field(default_factory=dict)
    set: StudySettings = Field(default_factory=dict)


def check_labels(what: str, arms: Sequence[MethodRuns]) -> None:
    if not arms:
        raise refuse(f"there is no {what}: give at least one.")
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise refuse(f"two arms have the label {label!r}: give each its own.")
