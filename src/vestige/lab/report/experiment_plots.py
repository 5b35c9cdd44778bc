"""The plots of an experiment: those that its TOML names under `figures`, from its rows alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vestige.lab import wording
from vestige.lab.definition import Experiment
from vestige.lab.grid import Row
from vestige.lab.plots import (
    Dot,
    Line,
    Panel,
    Plot,
    Style,
    dot_panel,
    from_zero,
    hollow,
    levels,
    line_panel,
    look,
    looks,
    plot,
    reference,
)
from vestige.lab.report.curves import BAND, mean_line, stage_panels
from vestige.lab.report.styles import common_name, crowded, fair_styles_of, styles_of
from vestige.lab.statistics import summarise
from vestige.lab.summary import Numbers, matching

_INTERVALS = "Bars are two-sided 95 % Student-t intervals over the seeds."
_SHORT = {"bounding": "beta", "dimension": "d", "batch": "B", "sigma": "sigma"}
_LONG = {
    "bounding": "bounding factor beta",
    "dimension": "dimension d",
    "batch": "batch size B",
    "sigma": "noise multiplier sigma",
    "signal": "signal: length of the mean gradient over C",
}
_STUDIED = {
    "dp_sgd": "DP-SGD",
    "geodp": "GeoDP as published (not private)",
    "averaged": "DP-SGD, averaged over releases",
    "box": "GeoDP box",
    "tangent": "GeoDP tangent",
}
_ERRORS = {
    "direction_mse": ("direction-error", "mean squared error of the direction"),
    "gradient_mse": ("gradient-error", "mean squared error of the gradient"),
}


def plots(experiment: Experiment, rows: Sequence[Row], numbers: Numbers) -> list[Plot]:
    """The plots that the experiment asks for, after that of its fair column."""
    if experiment.kind == "direction-error":
        return [_errors(numbers, measure, *names) for measure, names in _ERRORS.items()]
    material = _Material(experiment, rows, numbers)
    wanted = [name for name in experiment.figures if name in _MAKERS] or ["accuracy-by-epoch"]
    fair = [_fair_accuracy(material)] if experiment.fair is not None else []
    return [*fair, *(_MAKERS[name](material) for name in wanted)]


class _Material:
    """What the plots of one experiment share: its rows by cell and label, a look for each label."""

    def __init__(self, experiment: Experiment, rows: Sequence[Row], numbers: Numbers) -> None:
        self.experiment, self.numbers = experiment, numbers
        self.rows = [row for row in rows if row["column"] == "published"]
        self.styles = styles_of(experiment)
        self.common_name = common_name(experiment)
        self.crowded = crowded(experiment.arms)
        self.coloured = {style["color"] for style in looks()}

    def title(self, cell: Mapping[str, Any]) -> str:
        """What a panel of the cell is called."""
        return wording.cell(cell, self.experiment.notes)

    def levels(self, dataset: str) -> dict[str, float]:
        """What other models reach on the images of a dataset."""
        known: Mapping[str, Mapping[str, float]] = self.numbers["levels"]
        return {label: by[dataset] for label, by in known.items() if dataset in by}

    def cells(self) -> list[tuple[Mapping[str, Any], list[tuple[str, list[Row]]]]]:
        """Every cell with its labels and their rows, in the experiment's order."""
        cells = []
        for cell in (one["cell"] for one in self.numbers["published"]):
            labels = [arm.label for arm in self.experiment.arms]
            arms = [(label, matching(self.rows, cell, label)) for label in labels]
            if any(rows for _, rows in arms):
                cells.append((cell, [(label, rows) for label, rows in arms if rows]))
        return cells


def _by_epoch(row: Row, x: str, y: str) -> tuple[Any, Any, Any]:
    curve = row["curve"]
    nothing = [None] * len(curve["epoch"])
    return curve["epoch"], curve.get(x, nothing), curve.get(y, nothing)


def _accuracy_by(x: str, label: str, title: str, material: _Material) -> Plot:
    """Test accuracy over training, cell by cell; infinite epsilons are named instead."""
    panels: list[Panel] = []
    without: dict[str, None] = {}
    for cell, arms in material.cells():
        lines = []
        for name, rows in arms:
            runs = [_by_epoch(row, x, "accuracy") for row in rows]
            line = mean_line(name, material.styles[name], runs)
            if line is None:
                without[name] = None
            elif material.crowded and line.style["color"] not in material.coloured:
                # Bands would hide each other.
                lines.append(replace(line, low=None, high=None, key=material.common_name))
            else:
                lines.append(line)
        if lines:
            finish = partial(levels, known=material.levels(cell["dataset"]))
            labels = (label, "test accuracy")
            panels.append(line_panel(material.title(cell), labels, lines, finish=finish))
    caption = BAND
    if material.crowded:
        caption += " Grey lines are drawn without their bands."
    if without:
        caption += f" Not drawn, since their epsilon is infinite: {', '.join(without)}."
    empty = "There is no curve to draw: no run has these numbers."
    return plot(f"accuracy-by-{x.removeprefix('epsilon_')}", title, caption, panels, empty)


def _epsilon_by_epoch(material: _Material) -> Plot:
    """Formal epsilon over training, with the papers' figure at the end as a hollow mark."""
    panels: dict[str, tuple[list[str], Panel]] = {}
    for cell, arms in material.cells():
        # One run is enough: epsilon does not depend on the seed, nor on the images.
        firsts = [(material.styles[label], label, rows[0]) for label, rows in arms]
        lines = [
            line
            for style, label, row in firsts
            if (line := mean_line(label, style, [_by_epoch(row, "epoch", "epsilon")]))
        ]
        marks = [
            (float(row["curve"]["epoch"][-1]), row["epsilon_marginal"], style["color"])
            for style, _, row in firsts
            if row["epsilon_marginal"] is not None
        ]

        def finish(axes: Any, marks: Sequence[tuple[float, float, Any]] = marks) -> None:
            for mark in marks:
                hollow(axes, *mark, wording.PAPERS_FIGURE)
            from_zero(axes)

        if lines:
            titles, _ = panels.get(repr((lines, marks)), ([], None))
            titles.append(material.title(cell))
            labels = ("epoch", "formal epsilon (joint)")
            panel = line_panel("; ".join(titles), labels, lines, finish=finish)
            panels[repr((lines, marks))] = (titles, panel)
    caption = (
        "Formal epsilon of all that is released, by the joint accountant. Hollow diamonds at the "
        "last epoch: the papers' figure of one group alone, a diagnostic, not a guarantee."
    )
    empty = "There is nothing to draw: epsilon is infinite for every method."
    drawn = [panel for _, panel in panels.values()]
    return plot("epsilon-by-epoch", "Formal epsilon by epoch", caption, drawn, empty)


def _marginal_by_epoch(material: _Material) -> Plot:
    """The papers' figure of one group alone, over training."""
    panels = []
    for cell, arms in material.cells():
        lines = [
            line
            for label, rows in arms
            if "epsilon_marginal" in rows[0]["curve"]
            and (
                line := mean_line(
                    label,
                    material.styles[label],
                    [_by_epoch(rows[0], "epoch", "epsilon_marginal")],
                )
            )
        ]
        if lines:
            labels = ("epoch", wording.PAPERS_FIGURE)
            panels.append(line_panel(material.title(cell), labels, lines, finish=from_zero))
    title = "Epsilon of one group alone by epoch (no guarantee)"
    caption = "At sigma/beta, by RDP: a diagnostic of one group alone, not a guarantee."
    return plot("marginal-by-epoch", title, caption, panels, "No run has it.")


def _stages(material: _Material) -> Plot:
    """Exponents, tempering and memory by stage of the network."""
    arms = [arm for _, inside in material.cells() for arm in inside]
    each = [stage_panels(rows, label if len(arms) > 1 else "") for label, rows in arms]
    # One measure on a line, the methods side by side.
    panels = [panel for line in itertools.zip_longest(*each) for panel in line if panel]
    caption = (
        "Means over the matrix groups of a stage. The shaded range is the interval within which "
        "memory is not tempered; lambda is 1 - exp(-distance to it)."
    )
    empty = "There is nothing to draw: no run has recorded exponents."
    return plot("stages", "Spectrum and memory by stage over training", caption, panels, empty)


def _ends(values: Mapping[str, Any]) -> tuple[float | None, float | None]:
    return values.get("low"), values.get("high")


def _final_accuracy(material: _Material) -> Plot:
    """Accuracy at the last epoch, the paper's beside ours."""
    panels = []
    compared = material.experiment.reference
    for cell in material.numbers["published"]:
        dots, base = [], None
        for line in cell["lines"]:
            ours, paper = line.get("accuracy", {}), line["paper"]
            if ours or "accuracy" in paper:
                style = material.styles.get(line["label"], reference())
                shown = (ours.get("mean"), _ends(ours), paper.get("accuracy"), _ends(paper))
                dots.append(Dot(line["label"], style, *shown))
                base = ours.get("mean") if line["label"] == compared else base
        if dots:
            title, known = material.title(cell["cell"]), material.levels(cell["cell"]["dataset"])
            panels.append(dot_panel(title, "final test accuracy", dots, base=base, known=known))
    dashed = f" The dashed line is the reference, {compared}." if compared else ""
    printed = any("accuracy" in arm.paper for arm in material.experiment.arms)
    title = "Final test accuracy" + (", ours and the paper's" if printed else "")
    return plot("final-accuracy", title, f"{_INTERVALS}{dashed}", panels)


def _best_accuracy(material: _Material) -> Plot:
    """Accuracy at the best epoch of each run: higher than any that is chosen before."""
    panels = []
    for cell in material.numbers["published"]:
        lines = [line for line in cell["lines"] if line.get("count")]
        values = [(line["label"], line["best_accuracy"]) for line in lines]
        dots = [Dot(name, material.styles[name], v["mean"], _ends(v)) for name, v in values]
        if dots:
            title, known = material.title(cell["cell"]), material.levels(cell["cell"]["dataset"])
            panels.append(dot_panel(title, "best test accuracy", dots, known=known))
    caption = f"The best epoch on the test images, which nobody may choose by. {_INTERVALS}"
    return plot("best-accuracy", "Best test accuracy of each run", caption, panels)


def _runtime(material: _Material) -> Plot:
    """Seconds of a run, relative to the reference where there is one."""
    panels = []
    compared = material.experiment.reference
    for cell in material.numbers["published"]:
        lines = [line for line in cell["lines"] if line.get("count")]
        base = next((l["seconds"]["mean"] for l in lines if l["label"] == compared), None)
        scale = base or 1.0
        dots = []
        for line in lines:
            mean, std = line["seconds"]["mean"], line["seconds"]["std"]
            ends = ((mean - std) / scale, (mean + std) / scale) if std else (None, None)
            printed = line["paper"].get("relative") if base else None
            style, note = material.styles[line["label"]], f"{mean:.1f} s"
            dots.append(Dot(line["label"], style, mean / scale, ends, printed, note=note))
        if dots:
            label = f"time relative to {compared}" if base else "seconds"
            panels.append(dot_panel(material.title(cell["cell"]), label, dots, bars=True))
    caption = (
        "Bars are means over the seeds, with one sample standard deviation; numbers are seconds on "
        "our machine, which is not the papers': compare the ratios."
    )
    return plot("runtime", "Time of a run", caption, panels)


def _depth_by_interval(material: _Material) -> Plot:
    """Mean depth and ratio of the memory, the paper's beside ours."""
    panels = []
    printed = {arm.label: arm.paper for arm in material.experiment.arms}
    measures = (("depth", "mean memory depth, steps"), ("memory_ratio", "mean memory ratio"))
    for cell, arms in material.cells():
        for name, label in measures:
            dots = []
            for arm, rows in arms:
                means = [row["diagnostics"]["mean"].get(name) for row in rows if row["diagnostics"]]
                known = [value for value in means if value is not None]
                if known:
                    ours = summarise(known)
                    style, paper = material.styles[arm], printed[arm].get(name)
                    dots.append(Dot(arm, style, ours.mean, (ours.low, ours.high), paper))
            if dots:
                panels.append(dot_panel(material.title(cell), label, dots))
    caption = (
        "Unweighted means over matrix groups and the steps from window - 1 on. "
        f"{_INTERVALS} Memory ratio: norm of the memory branch over norm of the release."
    )
    empty = "There is nothing to draw: no run has recorded its memory."
    return plot("depth-by-interval", "Memory depth and ratio by interval", caption, panels, empty)


def _fair_accuracy(material: _Material) -> Plot:
    """The fair column: accuracy of every method at equal formal epsilon."""
    fair = material.experiment.fair
    assert fair is not None
    panels, styles = [], fair_styles_of(material.experiment)
    for dataset in material.experiment.fair_datasets:
        cells = [c for c in material.numbers["fair"] if c["cell"]["dataset"] == dataset]
        lines = [
            line
            for arm in fair.arms
            if (line := _points(arm.label, styles[arm.label], cells)) is not None
        ]
        if lines:
            labels = ("formal epsilon of every method", "test accuracy")
            ticks = [f"epsilon {cell['cell']['epsilon']:g}" for cell in cells]
            most = partial(levels, known=material.levels(dataset))
            title = material.title({"dataset": dataset})
            panels.append(line_panel(title, labels, lines, ticks=ticks, finish=most))
    caption = (
        "The same formal epsilon for every method, learning rates chosen on images that no "
        f"tuning run trains on. {_INTERVALS}"
    )
    title = "The fair comparison: accuracy at equal epsilon"
    empty = "The fair column has not been run yet."
    return plot("fair-accuracy", title, caption, panels, empty)


def _points(label: str, style: Style, cells: Sequence[Numbers]) -> Line | None:
    """Accuracies of one method, one for each cell that has it."""
    found = [
        (place, line["accuracy"])
        for place, cell in enumerate(cells)
        for line in cell["lines"]
        if line["label"] == label and line.get("count") and "same_runs" not in line
    ]
    if not found:
        return None
    low, high = ([values[end] for _, values in found] for end in ("low", "high"))
    bars = None not in low + high
    x, y = [place for place, _ in found], [values["mean"] for _, values in found]
    return Line(label, style, x, y, low if bars else None, high if bars else None)


def _studied(method: str) -> str:
    return _STUDIED.get(method, method)


def _errors(numbers: Numbers, measure: str, name: str, label: str) -> Plot:
    """One measure of a direction study, panel by panel."""
    panels = []
    for panel in numbers["panels"]:
        points = panel["points"]
        methods = [key for key in (points or [{}])[0] if key.endswith(f"_{measure}")]
        lines = [
            Line(
                _studied(key.removesuffix(f"_{measure}")),
                reference() if key.startswith("dp_sgd") else look(number),
                [point["value"] for point in points],
                [point[key] for point in points],
            )
            for number, key in enumerate(methods)
        ]
        if lines:
            fixed = [
                f"{short} {panel['fixed'][name]:g}"
                for name, short in _SHORT.items()
                if name in panel["fixed"]
            ]
            title = f"{panel['panel']}: {', '.join(fixed)}"  # what varies is on the axis
            labels = (_LONG.get(panel["varied"], panel["varied"]), label)
            panels.append(line_panel(title, labels, lines, log=True))
    caption = "Synthetic gradients; both axes are logarithmic."
    return plot(name, label.capitalize(), caption, panels, "No point is done.")


_MAKERS: dict[str, Callable[[_Material], Plot]] = {
    "accuracy-by-epoch": partial(_accuracy_by, "epoch", "epoch", "Test accuracy by epoch"),
    "accuracy-by-epsilon": partial(
        _accuracy_by, "epsilon", "formal epsilon spent (joint)", "Test accuracy by formal epsilon"
    ),
    "accuracy-by-marginal": partial(
        _accuracy_by,
        "epsilon_marginal",
        wording.PAPERS_FIGURE,
        "Test accuracy by the epsilon of one group alone (no guarantee)",
    ),
    "marginal-by-epoch": _marginal_by_epoch,
    "epsilon-by-epoch": _epsilon_by_epoch,
    "stages": _stages,
    "final-accuracy": _final_accuracy,
    "best-accuracy": _best_accuracy,
    "runtime": _runtime,
    "depth-by-interval": _depth_by_interval,
}
