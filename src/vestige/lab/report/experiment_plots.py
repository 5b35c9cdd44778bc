"""The plots of an experiment: those that its TOML names under `figures`, from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vestige.lab.definition import Experiment
from vestige.lab.report import curve_plots, value_plots
from vestige.lab.report.direction_plots import direction_plots
from vestige.lab.report.material import Material, Row
from vestige.lab.report.panels import Plot
from vestige.lab.summary import Numbers

_MAKERS: dict[str, Callable[[Material], Plot]] = {
    "accuracy-by-epoch": curve_plots.accuracy_by_epoch,
    "accuracy-by-epsilon": curve_plots.accuracy_by_epsilon,
    "epsilon-by-epoch": curve_plots.epsilon_by_epoch,
    "stages": curve_plots.stages,
    "final-accuracy": value_plots.final_accuracy,
    "runtime": value_plots.runtime,
    "depth-by-interval": value_plots.depth_by_interval,
}


def plots(experiment: Experiment, rows: Sequence[Row], numbers: Numbers) -> list[Plot]:
    """The plots that the experiment asks for, after that of its fair column."""
    if experiment.kind == "direction-error":
        return direction_plots(numbers)
    material = Material(experiment, rows, numbers)
    wanted = [name for name in experiment.figures if name in _MAKERS] or ["accuracy-by-epoch"]
    fair = [value_plots.fair_accuracy(material)] if experiment.fair is not None else []
    return [*fair, *(_MAKERS[name](material) for name in wanted)]
