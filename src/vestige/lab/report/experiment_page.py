"""The page of an experiment: guarantee, settings, plots, memory, tables, raw rows, commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vestige.lab.definition import Experiment
from vestige.lab.grid import count_of
from vestige.lab.report import wording
from vestige.lab.report.experiment_guarantee import guarantee, study_guarantee
from vestige.lab.report.experiment_settings import settings
from vestige.lab.report.experiment_tables import fair_tables, panel_tables, published_tables
from vestige.lab.report.markup import Column, Html, bullets, details, element, pairs, prose, table
from vestige.lab.report.page import Section, card, download, figure, page
from vestige.lab.report.panels import Plot
from vestige.lab.report.raw_rows import as_csv, as_lines
from vestige.lab.report.stages import MEASURES
from vestige.lab.summary import Numbers

Row = Mapping[str, Any]


def experiment_page(
    experiment: Experiment,
    rows: Sequence[Row],
    numbers: Numbers,
    plots: Sequence[Plot],
    made_by: str,
) -> str:
    """The page as text; `made_by` is the command that makes it again."""
    lead = ", ".join(part for part in (experiment.paper, experiment.item) if part)
    drawn = [figure(plot, made_by) for plot in plots]
    study = experiment.kind == "direction-error"
    sections = [
        Section("guarantee", "Guarantee", study_guarantee() if study else guarantee(rows, numbers)),
        Section("settings", "Settings", settings(experiment)),
        Section("plots", "Plots", drawn),
    ]
    memory = _memory(rows)
    if memory:
        sections.append(Section("memory", "Spectrum and memory", memory))
    if study:
        sections.append(Section("tables", "Tables", panel_tables(numbers)))
    else:
        sections.append(Section("published", "As published", published_tables(experiment, numbers)))
        if experiment.fair is not None:
            sections.append(Section("fair", "Fair", fair_tables(experiment, numbers)))
    sections.append(Section("rows", "Rows and commands", _origin(experiment, rows, made_by)))
    kind = f"Vestige report: experiment {experiment.name}"
    return page(kind, experiment.title, prose(lead), _notices(experiment, rows), sections)


def _notices(experiment: Experiment, rows: Sequence[Row]) -> list[Html]:
    shown = []
    if experiment.quick:
        smoke = (
            "This is a smoke run: few epochs and seeds. Its numbers only show that everything runs."
        )
        shown.append(card(element("p", element("strong", smoke)), warning=True))
    if experiment.claim:
        label = element("span", "The paper says: ", class_="soft")
        shown.append(element("p", label, prose(experiment.claim), class_="claim"))
    # A control may share its rows with another arm of the fair column, which counts both.
    apart = {
        (row["hash"], row["role"], row["label"] if row["column"] == "fair" else "") for row in rows
    }
    finished, expected = len(apart), sum(count_of(experiment).values())
    if finished < expected:
        shown.append(
            element(
                "p",
                f"Unfinished: {finished:,} of {expected:,} rows are there. Tables say how many "
                "seeds stand behind each number.",
                class_="note",
            )
        )
    return shown


def _memory(rows: Sequence[Row]) -> list[Html]:
    """What the groups were like at the end, method by method."""
    shown: list[Html] = []
    seen: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("diagnostics") and row["column"] == "published":
            seen.setdefault(f"{row['label']}, {wording.cell(row['cell'])}", []).append(row)
    for label, own in seen.items():
        facts = own[0]["diagnostics"]
        names = [name for name in MEASURES if name in facts]
        body = []
        for i, group in enumerate(facts["groups"]):
            values = [_last_mean([row["diagnostics"] for row in own], name, i) for name in names]
            body.append([group, *(wording.number(value, ".4g") for value in values)])
        columns = [Column("group", number=False), *(Column(MEASURES[name]) for name in names)]
        shown.append(
            details(label, table("Means over the last epochs and the seeds", columns, body))
        )
    if shown:
        sentence = (
            "Group by group, over the last block of epochs that a row keeps. All of it is made "
            "from releases and weights: it costs no privacy."
        )
        return [element("p", sentence, class_="note"), *shown]
    return []


def _last_mean(facts: Sequence[Mapping[str, Any]], name: str, group: int) -> float | None:
    known = [one[name][-1][group] for one in facts if one.get(name) and group < len(one[name][-1])]
    values = [value for value in known if value is not None]
    return sum(values) / len(values) if values else None


def _origin(experiment: Experiment, rows: Sequence[Row], made_by: str) -> list[Html]:
    name = experiment.name
    files = [
        download(f"{name}.csv: one line for each run", f"{name}.csv", as_csv(rows)),
        download(
            f"{name}.jsonl.gz: all rows with their curves",
            f"{name}.jsonl.gz",
            as_lines(rows),
            packed=True,
        ),
    ]
    quick = " --quick" if experiment.quick else ""
    machines = list(dict.fromkeys(_machine(row) for row in rows))
    versions = list(dict.fromkeys(wording.settings(row.get("versions", {})) for row in rows))
    return [
        bullets(files, class_="downloads"),
        element("p", "The rows, and the tables and plots from them:"),
        element("pre", f"vestige reproduce {name}{quick}\n{made_by}"),
        pairs([("machine", machine) for machine in machines] + [("versions", v) for v in versions]),
    ]


def _machine(row: Row) -> str:
    known = row.get("hardware", {})
    device = known.get("device", "cpu")
    where = known.get("processor", "unknown") if device == "cpu" else device
    workers = known.get("workers", 1)
    return f"{where}, {known.get('threads', '?')} thread(s), {workers} run(s) at a time"
