"""The plots of a run: those that there is something for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vestige.lab.report.run_data import read_run, trained_layers
from vestige.lab.report.run_plots import run_plots


def test_plots_of_a_run(folder: Path) -> None:
    run = read_run(folder)
    layers = trained_layers(folder, {})
    plots = run_plots(run, layers)
    assert list(plots) == ["training", "memory", "spectra"]
    assert "held out" in plots["training"].words and "exponent" in plots["spectra"].words
    bare = run_plots(replace(run, memory=None, lines=()), ())
    assert list(bare) == ["training"] and not bare["training"].svg
    assert "before its first epoch" in bare["training"].caption


def test_a_training_loss_is_called_outside_the_guarantee(folder: Path) -> None:
    run = read_run(folder)
    lines = tuple(line | {"train_loss_outside_guarantee": 1.0} for line in run.lines)
    plot = run_plots(replace(run, lines=lines), ())["training"]
    assert "outside the guarantee" in plot.caption and "outside the guarantee" in plot.svg
