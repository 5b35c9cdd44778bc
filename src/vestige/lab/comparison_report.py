"""What a comparison says: a table, sentences, a page, and the files that are kept of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vestige.checks import round_up
from vestige.files import write_whole
from vestige.lab import rendering
from vestige.lab.kept_runs import RUNS
from vestige.lab.report.downloads import download
from vestige.statement.table import Table


def table(report: dict[str, Any]) -> Table:
    """The comparison as a table that fits into eighty characters."""
    lines = []
    for line in report["methods"]:
        accuracy, test = line["accuracy"], line["against_reference"] or {}
        low, noise = accuracy["low"], line["noise_multiplier"]
        chances = [test.get(name) for name in ("p", "p_holm")]
        lines.append(
            [
                line["method"],
                f"{line['lr']:.3g}",
                f"{noise:.3g}" if isinstance(noise, int | float) else "varies",
                round_up(line["epsilon"]),
                f"{accuracy['mean']:.3f}",
                "" if low is None else f"{max(low, 0):.3f} to {min(accuracy['high'], 1):.3f}",
                f"{test['difference']:+.3f}" if test else "",
                *("" if p is None else f"{p:.2g}" for p in chances),
            ]
        )
    headings = ("method", "lr", "sigma", "eps", "acc", "95 % interval", "diff", "p", "p (Holm)")
    name = Path(report["dataset"]).name
    return Table(headings, lines, f"{name}, {report['model']}: accuracy on the held-out split")


def page(report: dict[str, Any]) -> str:
    """The comparison as a page that loads nothing and runs no script."""
    return rendering.html(
        "comparison.html.j2",
        kind="Vestige report: a comparison of methods",
        title=f"{', '.join(line['method'] for line in report['methods'])}",
        lead=f"{Path(report['dataset']).name}, {report['model']}, {report['study_runs']} runs",
        parts={"table": "Accuracy", "cost": "What it costs", "numbers": "Numbers"},
        table=table(report),
        words=words(report),
        files=[download("comparison.json", "the whole report", _json(report))],
    )


def _json(report: dict[str, Any]) -> bytes:
    shown = report | {"dataset": Path(report["dataset"]).name}  # not where its file lay
    return f"{json.dumps(shown, indent=2, allow_nan=False)}\n".encode()


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """The report in a folder: comparison.json and report.html."""
    contents = {"comparison.json": _json(report), "report.html": page(report).encode()}
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]


def words(report: dict[str, Any], folder: str = "OUT") -> Sequence[str]:
    """What a reader of the table must know, in sentences; `folder` has the runs that are kept."""
    runs, delta = report["study_runs"], report["delta"]
    said = []
    if report["study_epsilon"] is None:
        who = ", ".join(report["not_private"]) or "a run"
        said.append(f"The whole study has no guarantee: {who} has an infinite epsilon.")
    else:
        cost = round_up(report["study_epsilon"])
        said.append(
            f"The whole study, all {runs} runs together, tuning included, costs (epsilon "
            f"{cost}, delta {delta:g}); publishing one run's model alone still costs the "
            "whole study where results of the others were looked at."
        )
    if report["ledger_epsilon"] is not None:
        said.append(
            f"Everything on the ledger, this study and what was there before, has epsilon "
            f"{round_up(report['ledger_epsilon'])}."
        )
    if report["validation_records"]:
        said.append(
            f"Learning rates were chosen on {report['validation_records']} training records that "
            "no run trained on; the guarantee does not cover them."
        )
    if any(run["folder"] for run in report["runs"]):
        first = f"{folder}/{report['runs'][0]['folder']}"
        said.append(
            f"The folder of each run, with its model and its statement, is in {RUNS}: "
            f"vestige.load({first!r})."
        )
    said.append("Accuracies are exact figures of held-out records, which no guarantee covers.")
    said.append(
        f"p: paired t test against {report['reference']}. Initial weights and splits are paired "
        "seed by seed; the noise is not."
    )
    return said
