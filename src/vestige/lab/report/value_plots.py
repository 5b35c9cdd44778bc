"""Plots of single values with their intervals: accuracies, times, and the memory's depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vestige.audit.palette import REFERENCE, Style
from vestige.lab.report import wording
from vestige.lab.report.material import Material, Row
from vestige.lab.report.panels import Dot, DotPanel, Line, LinePanel, Panel, Plot
from vestige.lab.statistics import summarise

_INTERVALS = "Bars are two-sided 95 % Student-t intervals over the seeds."


def final_accuracy(material: Material) -> Plot:
    """Accuracy at the last epoch, the paper's beside ours."""
    panels: list[Panel] = []
    reference = material.experiment.reference
    for cell in material.numbers["published"]:
        dots, base = [], None
        for line in cell["lines"]:
            found, paper = line.get("accuracy"), line["paper"]
            if found is None and "accuracy" not in paper:
                continue
            dots.append(
                Dot(
                    line["label"],
                    material.styles.get(line["label"], REFERENCE),
                    found and found["mean"],
                    found and found["low"],
                    found and found["high"],
                    paper.get("accuracy"),
                    paper.get("low"),
                    paper.get("high"),
                )
            )
            if line["label"] == reference and found:
                base = found["mean"]
        if dots:
            panels.append(
                DotPanel(wording.cell(cell["cell"]), "final test accuracy", dots, reference=base)
            )
    caption = (
        f"{_INTERVALS} The dashed line is the reference, {reference}." if reference else _INTERVALS
    )
    return Plot("final-accuracy", "Final test accuracy, ours and the paper's", caption, panels)


def runtime(material: Material) -> Plot:
    """Seconds of a run, relative to the reference where there is one."""
    panels: list[Panel] = []
    reference = material.experiment.reference
    for cell in material.numbers["published"]:
        lines = [line for line in cell["lines"] if line.get("count")]
        base = next((l["seconds"]["mean"] for l in lines if l["label"] == reference), None)
        scale = base or 1.0
        dots = []
        for line in lines:
            seconds, std = line["seconds"], line["seconds"]["std"] or 0.0
            low, high = seconds["mean"] - std, seconds["mean"] + std
            dots.append(
                Dot(
                    line["label"],
                    material.styles[line["label"]],
                    seconds["mean"] / scale,
                    low / scale if std else None,
                    high / scale if std else None,
                    line["paper"].get("relative") if base else None,
                    note=f"{seconds['mean']:.1f} s",
                )
            )
        label = f"time relative to {reference}" if base else "seconds"
        if dots:
            panels.append(DotPanel(wording.cell(cell["cell"]), label, dots, bars=True))
    return Plot(
        "runtime",
        "Time of a run",
        "Bars are means over the seeds, with one sample standard deviation; numbers are seconds on "
        "our machine, which is not the papers': compare the ratios.",
        panels,
    )


def depth_by_interval(material: Material) -> Plot:
    """Mean depth and ratio of the memory, the paper's beside ours."""
    panels: list[Panel] = []
    measures = (("depth", "mean memory depth, steps"), ("memory_ratio", "mean memory ratio"))
    for heading, arms in material.cells():
        for name, label in measures:
            dots = [
                dot
                for arm, rows in arms
                if (dot := _memory_dot(material, arm, rows, name)) is not None
            ]
            if dots:
                panels.append(DotPanel(heading, label, dots))
    caption = (
        "Unweighted means over matrix groups and the steps from window - 1 on. "
        f"{_INTERVALS} Memory ratio: norm of the memory branch over norm of the release."
    )
    if not panels:
        caption = "There is nothing to draw: no run has recorded its memory."
    return Plot("depth-by-interval", "Memory depth and ratio by interval", caption, panels)


def _memory_dot(material: Material, label: str, rows: Sequence[Row], name: str) -> Dot | None:
    facts = [row["diagnostics"]["mean"].get(name) for row in rows if row["diagnostics"]]
    known = [value for value in facts if value is not None]
    if not known:
        return None
    found = summarise(known)
    arm = next(arm for arm in material.experiment.arms if arm.label == label)
    own = material.styles[label]
    return Dot(label, own, found.mean, found.low, found.high, arm.paper.get(name))


def fair_accuracy(material: Material) -> Plot:
    """The fair column: accuracy of every method at equal formal epsilon."""
    fair = material.experiment.fair
    assert fair is not None
    panels: list[Panel] = []
    for dataset in fair.datasets:
        cells = [c for c in material.numbers["fair"] if c["cell"]["dataset"] == dataset]
        ticks = [f"epsilon {cell['cell']['epsilon']:g}" for cell in cells]
        lines = []
        for arm in fair.arms:
            found = [
                (place, line["accuracy"])
                for place, cell in enumerate(cells)
                for line in cell["lines"]
                if line["label"] == arm.label and line.get("count")
            ]
            if found:
                lines.append(_points(arm.label, material.styles[arm.label], found))
        if lines:
            title = wording.dataset(dataset)
            panels.append(
                LinePanel(
                    title, "formal epsilon of every method", "test accuracy", lines, ticks=ticks
                )
            )
    caption = (
        f"The same formal epsilon for every method, learning rates chosen on images that no run "
        f"trains on. {_INTERVALS}"
    )
    if not panels:
        caption = "The fair column has not been run yet."
    return Plot("fair-accuracy", "The fair comparison: accuracy at equal epsilon", caption, panels)


def _points(label: str, own: Style, found: Sequence[tuple[int, Mapping[str, Any]]]) -> Line:
    low, high = ([stats[end] for _, stats in found] for end in ("low", "high"))
    bars = all(end is not None for end in [*low, *high])
    return Line(
        label,
        own,
        [place for place, _ in found],
        [stats["mean"] for _, stats in found],
        low if bars else None,
        high if bars else None,
    )
