"""Plots over training: accuracy by epoch and by epsilon, epsilon by epoch, stages of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vestige.lab.report import wording
from vestige.lab.report.material import Material
from vestige.lab.report.panels import LinePanel, Panel, Plot
from vestige.lab.report.seeds import BAND, curve, mean_line
from vestige.lab.report.stages import stage_panels


def _curves(material: Material, name: str, title: str, x: str, y: str, labels: list[str]) -> Plot:
    panels: list[Panel] = []
    without: dict[str, None] = {}
    for heading, arms in material.cells():
        lines = []
        for label, rows in arms:
            runs = [curve(row, x, y) for row in rows]
            line = mean_line(label, material.styles[label], runs)
            if line is None:
                without[label] = None
            else:
                lines.append(line)
        if lines:
            panels.append(LinePanel(heading, labels[0], labels[1], lines))
    caption = BAND
    if without:
        caption += f" Not drawn, since their epsilon is infinite: {', '.join(without)}."
    if not panels:
        caption = "There is no curve to draw: no run has these numbers."
    return Plot(name, title, caption, panels)


def accuracy_by_epoch(material: Material) -> Plot:
    """Test accuracy over training, cell by cell."""
    labels = ["epoch", "test accuracy"]
    title = "Test accuracy by epoch"
    return _curves(material, "accuracy-by-epoch", title, "epoch", "accuracy", labels)


def accuracy_by_epsilon(material: Material) -> Plot:
    """Test accuracy by the formal epsilon that was spent; infinite ones are named instead."""
    labels = ["formal epsilon spent (joint)", "test accuracy"]
    title = "Test accuracy by formal epsilon"
    return _curves(material, "accuracy-by-epsilon", title, "epsilon", "accuracy", labels)


def epsilon_by_epoch(material: Material) -> Plot:
    """Formal epsilon over training, with the papers' figure at the end as a hollow mark."""
    panels: list[LinePanel] = []
    for heading, arms in material.cells():
        lines, marks = [], []
        for label, rows in arms:
            look = material.styles[label]
            # One run is enough: epsilon does not depend on the seed.
            line = mean_line(label, look, [curve(rows[0], "epoch", "epsilon")])
            if line is not None:
                lines.append(line)
            figure = rows[0]["epsilon_marginal"]
            if figure is not None:
                last = float(rows[0]["curve"]["epoch"][-1])
                marks.append((wording.PAPERS_FIGURE, look, last, figure))
        if lines:
            panels.append(
                LinePanel(heading, "epoch", "formal epsilon (joint)", lines, marks=marks, floor=0.0)
            )
    caption = (
        "Formal epsilon of all that is released, by the joint accountant. Hollow diamonds at the "
        "last epoch: the papers' figure of one group alone, a diagnostic, not a guarantee."
    )
    if not panels:
        caption = "There is nothing to draw: epsilon is infinite for every method."
    return Plot("epsilon-by-epoch", "Formal epsilon by epoch", caption, _different(panels))


def _different(panels: Sequence[LinePanel]) -> list[Panel]:
    """Panels that show the same are drawn once: epsilon does not depend on the images."""
    kept: list[LinePanel] = []
    for panel in panels:
        for i, other in enumerate(kept):
            if (other.lines, other.marks) == (panel.lines, panel.marks):
                kept[i] = replace(other, title=f"{other.title}; {panel.title}")
                break
        else:
            kept.append(panel)
    return list(kept)


def stages(material: Material) -> Plot:
    """Exponents, tempering and memory by stage of the network."""
    panels: list[Panel] = []
    cells = material.cells()
    several = len(cells) > 1 or sum(len(arms) for _, arms in cells) > 1
    for heading, arms in cells:
        for label, rows in arms:
            panels += stage_panels(rows, f"{label}, {heading}" if several else "")
    caption = (
        "Means over the matrix groups of a stage. The shaded range is the interval within which "
        "memory is not tempered; lambda is 1 - exp(-distance to it)."
    )
    if not panels:
        caption = "There is nothing to draw: no run has recorded exponents."
    return Plot("stages", "Spectrum and memory by stage over training", caption, panels)
