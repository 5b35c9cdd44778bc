"""The plots of a run: how it went, what its memory was like, and the spectra of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vestige.audit.palette import REFERENCE, style
from vestige.lab.report.panels import Line, LinePanel, Panel, Plot
from vestige.lab.report.run_data import Run
from vestige.lab.report.seeds import Series, mean_line
from vestige.lab.report.stages import stage_panels

if TYPE_CHECKING:
    from vestige.lab.spectrum_report import Layer

_MOST_SPECTRA = 12
OUTSIDE = "training loss, outside the guarantee"


def run_plots(run: Run) -> list[Plot]:
    """Accuracy, loss and epsilon by epoch, and the memory by group where there is one."""
    made = [_course(run)]
    if run.memory is not None:
        row = {"diagnostics": run.memory, "settings": run.result.get("settings") or {}}
        panels = stage_panels([row])
        if panels:
            made.append(
                Plot(
                    "memory",
                    "Spectrum and memory by group",
                    "Means over the steps of each epoch. Where exponents are estimated, the shaded "
                    "range is the interval within which memory is not tempered. All of it is made "
                    "from releases and weights: it costs no privacy.",
                    panels,
                )
            )
    return made


def _course(run: Run) -> Plot:
    wanted = (
        ("accuracy", {"test_accuracy": "held out", "averaged_test_accuracy": "averaged weights"}),
        (
            "loss",
            {
                "test_loss": "held out",
                "averaged_test_loss": "averaged weights",
                "train_loss_outside_guarantee": OUTSIDE,
            },
        ),
        ("epsilon", {"epsilon": "held out"}),
    )
    looks = {"held out": style(0), "averaged weights": style(2), OUTSIDE: style(1)}
    panels: list[Panel] = []
    epochs = [line["epoch"] for line in run.lines]
    for label, names in wanted:
        lines = []
        for name, series in names.items():
            values = [line.get(name) for line in run.lines]
            drawn = mean_line(series, looks[series], [Series(epochs, epochs, values)])
            if drawn is not None:
                lines.append(drawn)
        if label == "epsilon":
            # One line that is no measurement: it needs no name beside the others.
            lines = [Line("", REFERENCE, line.x, line.y) for line in lines]
        if lines:
            title = {"epsilon": "formal epsilon spent"}.get(label, label)
            panels.append(LinePanel(title, "epoch", label, lines))
    caption = (
        "Accuracy and loss are measured on the held-out split, whose records the guarantee does "
        "not cover. Epsilon is an upper bound at each epoch."
    )
    if run.result["epsilon"] is None:
        caption = (
            "Accuracy and loss are measured on the held-out split. There is no epsilon to draw: "
            "it is infinite."
        )
    if not panels:
        caption = "There is nothing to draw: the run ended before its first epoch did."
    return Plot("training", "How the run went", caption, panels)


def spectrum_plots(layers: Sequence[Layer]) -> list[Plot]:
    """How many eigenvalues of each weight are at least x, with the fitted power law."""
    import numpy as np

    panels: list[Panel] = []
    fitted = [(layer, layer.fit) for layer in layers if layer.fit is not None]
    for layer, fit in fitted[:_MOST_SPECTRA]:
        values, count = fit.eigenvalues, len(fit.eigenvalues)
        share = 1 - np.arange(count) / count
        keep = np.unique(np.linspace(0, count - 1, min(count, 100)).round().astype(int))
        start = count - fit.tail_size
        x = np.geomspace(fit.xmin, values[-1], 20)
        law = share[start] * (x / fit.xmin) ** (1 - fit.exponent)
        shown = law >= 0.3 / count
        panels.append(
            LinePanel(
                f"{layer.name.removesuffix('.weight')}: exponent {fit.exponent:.2f}",
                "eigenvalue x",
                "share of eigenvalues from x on",
                [
                    Line("eigenvalues", style(0), values[keep].tolist(), share[keep].tolist()),
                    Line("fitted power law", style(1), x[shown].tolist(), law[shown].tolist()),
                ],
                x_log=True,
                y_log=True,
            )
        )
    if not panels:
        return []
    caption = "Eigenvalues of W^T W of the trained weights; both axes are logarithmic."
    if len(fitted) > _MOST_SPECTRA:
        caption += f" The first {_MOST_SPECTRA} of {len(fitted)} layers; the table has all."
    return [Plot("spectra", "Spectra of the weights", caption, panels)]
