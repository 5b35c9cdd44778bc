"""The plots of a run: how it went, what its memory was like, and the spectra of its weights."""

from __future__ import annotations

from collections.abc import Sequence

from vestige.lab.plots import Plot, line_panel, look, plot, reference
from vestige.lab.report.curves import mean_line, stage_panels
from vestige.lab.report.run_data import Run
from vestige.lab.spectrum_report import Layer, panels

_MOST_SPECTRA = 12
_HELD_OUT, _AVERAGED = "held out", "averaged weights"
_COURSES = {
    "accuracy": {"test_accuracy": _HELD_OUT, "averaged_test_accuracy": _AVERAGED},
    "loss": {
        "test_loss": _HELD_OUT,
        "averaged_test_loss": _AVERAGED,
        "train_loss_outside_guarantee": "training loss, outside the guarantee",
    },
    # One line that is no measurement: it needs no name beside the others.
    "epsilon": {"epsilon": ""},
}


def run_plots(run: Run, layers: Sequence[Layer]) -> dict[str, Plot]:
    """Every plot of a run, by name; those that would be empty are left out."""
    made = [_course(run), _memory(run), _spectra(layers)]
    return {one.name: one for one in made if one.svg or one.name == "training"}


def _course(run: Run) -> Plot:
    """Accuracy, loss and epsilon by epoch."""
    epochs = [line["epoch"] for line in run.lines]
    drawn = []
    for label, series in _COURSES.items():
        lines = []
        for number, (name, called) in enumerate(series.items()):
            values = [line.get(name) for line in run.lines]
            style = look(number) if called else reference()
            line = mean_line(called, style, [(epochs, epochs, values)])
            if line is not None:
                lines.append(line)
        if lines:
            title = "formal epsilon spent" if label == "epsilon" else label
            drawn.append(line_panel(title, ("epoch", label), lines))
    caption = (
        "Accuracy and loss are measured on the held-out split, whose records the guarantee does "
        "not cover. Epsilon is an upper bound at each epoch."
    )
    if run.result["epsilon"] is None:
        caption = (
            "Accuracy and loss are measured on the held-out split. There is no epsilon to draw: "
            "it is infinite."
        )
    if any("train_loss_outside_guarantee" in line for line in run.lines):
        caption += " The curve of the training loss, outside the guarantee, was asked for."
    empty = "There is nothing to draw: the run ended before its first epoch did."
    return plot("training", "How the run went", caption, drawn, empty)


def _memory(run: Run) -> Plot:
    row = {"diagnostics": run.memory, "settings": run.result.get("settings") or {}}
    caption = (
        "Means over the steps of each epoch. Where exponents are estimated, the shaded range is "
        "the interval within which memory is not tempered. All of it is made from releases and "
        "weights: it costs no privacy."
    )
    return plot("memory", "Spectrum and memory by group", caption, stage_panels([row]))


def _spectra(layers: Sequence[Layer]) -> Plot:
    """How many eigenvalues of each weight are at least x, with the fitted power law."""
    fitted = [layer for layer in layers if layer.fit is not None]
    caption = "Eigenvalues of W^T W of the trained weights; both axes are logarithmic."
    if len(fitted) > _MOST_SPECTRA:
        caption += f" The first {_MOST_SPECTRA} of {len(fitted)} layers; the table has all."
    return plot("spectra", "Spectra of the weights", caption, panels(fitted[:_MOST_SPECTRA]))
