"""The first part of an experiment's page: what its runs guarantee, and what they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vestige.checks import round_up
from vestige.lab.report import wording
from vestige.lab.report.markup import Column, Html, bullets, details, element, table
from vestige.lab.report.page import card
from vestige.lab.summary import Numbers
from vestige.methods import METHODS

Row = Mapping[str, Any]


def study_guarantee() -> list[Html]:
    """Of a direction study: nothing is trained."""
    sentence = (
        "Nothing is trained and no record is read: these are errors of directions on synthetic "
        "gradients, so there is no guarantee to state. GeoDP as published is not private."
    )
    return [card(element("p", sentence))]


def guarantee(rows: Sequence[Row], numbers: Numbers) -> list[Html]:
    """Formal epsilon of every method beside the papers' figure, with what limits it."""
    stated = list(dict.fromkeys(str(row.get("guarantee", "none")) for row in rows))
    adjacency = " / ".join(g.partition("-DP, ")[2] for g in stated if g != "none") or "none stated"
    used = dict.fromkeys(str(row["config"].get("accountant", "pld")) for row in rows)
    deltas = ", ".join(dict.fromkeys(f"{row['delta']:g}" for row in rows))
    finite = [row["epsilon"] for row in rows if row["epsilon"] is not None]
    head = "No guarantee"
    if finite:
        ends = dict.fromkeys(round_up(end) for end in (min(finite), max(finite)))
        head = f"epsilon {' to '.join(ends)} at delta {deltas}"
    shown = [
        element("strong", head, class_="figure"),
        element(
            "p",
            "Of one run, towards whoever sees all that it releases. Neighbouring data: "
            f"{adjacency}. Accountant: {', '.join(used).upper()}, joint over all clipping groups.",
        ),
    ]
    notes = [
        "Each epsilon is that of one run. All runs of this page together cost more.",
        "The papers' figure is their RDP value at sigma/beta of one group alone. It is a "
        "diagnostic, not a guarantee: a reader of the model sees every group.",
    ]
    warning = wording.weak(max(finite, default=None))
    if warning is not None:
        notes.append(warning)
    for label, method in {
        row["label"]: row["method"] for row in rows if row["epsilon"] is None
    }.items():
        known = METHODS.get(method)
        why = known.guarantee if known is not None and not known.private else "without noise"
        notes.append(f"No guarantee for {label}: its epsilon is infinite ({why}).")
    if any(row["config"].get("repeatable_noise") for row in rows):
        notes.append(
            "The runs are in test mode, on public benchmark data: their noise can be repeated by "
            "whoever knows the seed. The figures are those of the same runs with secret noise."
        )
    tables = element("div", *_epsilon_tables(numbers))
    split = element("div", tables, bullets(notes, class_="note"), class_="split")
    return [card(*shown, split, warning=not finite)]


def _epsilon_tables(numbers: Numbers) -> list[Html]:
    """Formal epsilon and the papers' figure of every method; cells that agree share columns."""
    groups: dict[str, tuple[list[str], Numbers]] = {}
    for cell in numbers["published"]:
        lines = [line for line in cell["lines"] if line.get("count")]
        if not lines:
            continue
        key = json.dumps([[l["label"], l["epsilon"], l["epsilon_marginal"]] for l in lines])
        groups.setdefault(key, ([], cell))[0].append(wording.cell(cell["cell"]))
    tables = []
    for titles, cell in groups.values():
        lines = [line for line in cell["lines"] if line.get("count")]
        body = [
            [
                line["label"],
                _formal(line["epsilon"]),
                wording.NONE
                if line["epsilon_marginal"] is None
                else element("span", round_up(line["epsilon_marginal"]), class_="soft"),
            ]
            for line in lines
        ]
        where = "" if len(groups) == 1 else f" ({'; '.join(titles)})"
        columns = [
            Column("method", number=False),
            Column("formal epsilon"),
            Column("papers' figure (diagnostic)"),
        ]
        tables.append(table(f"As published{where}", columns, body))
    if len(tables) > 2:
        return [tables[0], details(f"{len(tables) - 1} other settings", *tables[1:])]
    return tables


def _formal(epsilon: float | None) -> Html:
    if epsilon is None:
        return element("span", "no guarantee", class_="warn")
    return element("strong", round_up(epsilon))
