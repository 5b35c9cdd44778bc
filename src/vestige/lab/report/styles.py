"""How each arm of an experiment is drawn: where there are many, a few in colour, the rest grey."""

from __future__ import annotations

from collections.abc import Sequence

from vestige.lab.arms import FairArm, MethodRuns
from vestige.lab.definition import Experiment
from vestige.lab.plots import Style, look, looks, quiet, reference

_IN_COLOUR = ("fo", "sma")  # besides the reference, where the experiment names no others
_MOST_COLOURED = 6
_MOST_NAMED = 12  # grey lines of a legend: there are no more markers


def crowded(arms: Sequence[MethodRuns]) -> bool:
    """Whether these are too many for a colour each."""
    return len(arms) > _MOST_COLOURED


def styles_of(experiment: Experiment) -> dict[str, Style]:
    """One look for each label of the published column."""
    styles: dict[str, Style] = {}
    colours = 0
    for arm in experiment.arms:
        if arm.label == experiment.reference:
            styles[arm.label] = reference()
        elif _stands_out(experiment, experiment.arms, arm):
            styles[arm.label] = look(colours)
            colours += 1
        else:
            styles[arm.label] = quiet(len(styles))
    return styles


def fair_styles_of(experiment: Experiment) -> dict[str, Style]:
    """One look for each label of the fair column.

    An arm looks like the published one that has the same method and settings, unless that is grey
    or another one does already.
    """
    published = styles_of(experiment)
    colours = {style["color"] for style in looks()}
    twins: dict[str, Style] = {}
    for known in experiment.arms:
        if published[known.label]["color"] in colours:
            twins.setdefault(_identity(known), published[known.label])
    styles: dict[str, Style] = {}
    arms = experiment.fair.arms if experiment.fair else ()
    for number, arm in enumerate(arms):
        twin, taken = twins.get(_identity(arm)), list(styles.values())
        if twin is not None and twin not in taken:
            styles[arm.label] = twin
        elif number == 0:
            styles[arm.label] = reference()
        elif _stands_out(experiment, arms, arm):
            styles[arm.label] = _unlike([*taken, *twins.values()])
        else:
            styles[arm.label] = quiet(number)
    return styles


def _unlike(taken: Sequence[Style]) -> Style:
    """A look that differs from those that are taken, in its colour if there is one left."""
    colours = {style["color"] for style in taken}
    unused = [style for style in looks()[1:] if style not in taken]
    return next((s for s in unused if s["color"] not in colours), [*unused, look(len(taken))][0])


def _stands_out(experiment: Experiment, arms: Sequence[MethodRuns], arm: MethodRuns) -> bool:
    """Whether an arm has a colour of its own among these."""
    if not crowded(arms):
        return True
    if not isinstance(arm, FairArm) and experiment.coloured:
        return arm.label in experiment.coloured
    own = [other for other in arms if other.method in _IN_COLOUR]
    return arm in own and not crowded(own)


def common_name(experiment: Experiment) -> str:
    """What all grey lines are called together, where they are too many for a legend; or ""."""
    others = [arm for arm in experiment.arms if arm.label != experiment.reference]
    grey = [arm for arm in others if not _stands_out(experiment, experiment.arms, arm)]
    return f"the other {len(grey)}" if len(grey) > _MOST_NAMED else ""


def _identity(arm: MethodRuns) -> str:
    settings = sorted(arm.settings.items())
    return repr((arm.method, settings, arm.values.get("momentum"), arm.averaged))
