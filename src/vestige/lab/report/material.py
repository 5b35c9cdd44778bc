"""What the plots of an experiment share: rows by cell and label, and a look for each label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vestige.audit.palette import REFERENCE, SERIES, Style, style
from vestige.lab.definition import Experiment
from vestige.lab.report import wording
from vestige.lab.summary import Numbers

Row = Mapping[str, Any]


class Material:
    """What the plots of one experiment are made of."""

    def __init__(self, experiment: Experiment, rows: Sequence[Row], numbers: Numbers) -> None:
        self.experiment, self.numbers = experiment, numbers
        self.rows = [row for row in rows if row["column"] == "published"]
        self.styles = _styles(experiment)

    def cells(self) -> list[tuple[str, list[tuple[str, list[Row]]]]]:
        """Title of every cell with its labels and their rows, in the experiment's order."""
        found = []
        for cell in self.numbers["published"]:
            here = [row for row in self.rows if row["cell"] == cell["cell"]]
            labels = [
                (arm.label, own)
                for arm in self.experiment.arms
                if (own := [row for row in here if row["label"] == arm.label])
            ]
            if labels:
                found.append((wording.cell(cell["cell"]), labels))
        return found


def _styles(experiment: Experiment) -> dict[str, Style]:
    """One look for each label. An arm of the fair column looks like the published one that has
    the same method and settings."""
    chosen: dict[str, Style] = {}
    free = iter(range(10_000))
    looks: dict[str, Style] = {}  # by method and settings
    for arm in experiment.arms:
        own = REFERENCE if arm.label == experiment.reference else style(next(free))
        chosen[arm.label] = own
        looks.setdefault(_identity(arm.values), own)
    fair_arms = experiment.fair.arms if experiment.fair else ()
    taken: set[Style] = {chosen[arm.label] for arm in fair_arms if arm.label in chosen}
    for fair in fair_arms:
        if fair.label in chosen:
            continue
        own = looks.get(_identity(fair.values)) or style(next(free))
        colours = {look.colour for look in taken}
        left = set(SERIES) - colours
        while own in taken or (own.colour in colours and left):
            own = style(next(free))
        chosen[fair.label] = own
        taken.add(own)
    return chosen


def _identity(values: Mapping[str, Any]) -> str:
    return repr((values["method"], sorted(values["settings"].items()), values.get("momentum")))
