"""Exponents, tempering and memory by stage of a network, over training.

A stage is a clipping group, or, where there are many groups, what their names begin with. The
blocks of a ResNet-18 come in four stages of two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vestige.audit.palette import style
from vestige.lab.report.panels import LinePanel, Panel
from vestige.lab.report.seeds import Series, mean_line

MEASURES = {
    "rho": "exponent rho",
    "tempering": "tempering lambda",
    "depth": "memory depth, steps",
    "memory_ratio": "memory ratio",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_MOST_GROUPS = 8  # more lines than that are told apart by nobody


def stages_of(groups: Sequence[str]) -> list[str]:
    """The stage of each group."""
    if len(groups) <= _MOST_GROUPS:
        return list(groups)
    if any(_BLOCK.match(group) for group in groups):
        return [_residual_stage(group) for group in groups]
    return [group.partition(".")[0] for group in groups]


def _residual_stage(group: str) -> str:
    block = _BLOCK.match(group)
    if block:
        return f"stage {int(block[1]) // 2 + 1}"
    return "head" if group.startswith(("out", "fc", "head")) else "stem"


def stage_panels(rows: Sequence[Mapping[str, Any]], of: str = "") -> list[Panel]:
    """One panel for each measure that the rows of one method have recorded; `of` names them."""
    facts = [row["diagnostics"] for row in rows if row["diagnostics"]]
    if not facts:
        return []
    stages = list(dict.fromkeys(stages_of(facts[0]["groups"])))
    interval = rows[0]["settings"].get("interval")
    panels: list[Panel] = []
    for name, label in MEASURES.items():
        lines = []
        for number, stage in enumerate(stages):
            runs = [by_stage(one, name, stage) for one in facts if name in one]
            line = mean_line(stage, style(number), runs)
            if line is not None:
                lines.append(line)
        if lines:
            shaded = (interval[0], interval[1]) if name == "rho" and interval else None
            floor = None if name == "rho" else 0.0
            title = f"{label}: {of}" if of else label
            panels.append(LinePanel(title, "epoch", label, lines, shaded=shaded, floor=floor))
    return panels


def by_stage(facts: Mapping[str, Any], name: str, stage: str) -> Series:
    """A measure of one run over its epochs: the mean over the matrix groups of a stage."""
    own = [i for i, found in enumerate(stages_of(facts["groups"])) if found == stage]
    values: list[float | None] = []
    for block, numbers in enumerate(facts[name]):
        known = [numbers[i] for i in own if numbers[i] is not None and _has_matrix(facts, block, i)]
        values.append(sum(known) / len(known) if known else None)
    return Series(facts["epoch"], facts["epoch"], values)


def _has_matrix(facts: Mapping[str, Any], block: int, group: int) -> bool:
    """Groups without an exponent have no matrix, wherever exponents are estimated at all."""
    exponents = facts.get("rho")
    if exponents is None or all(value is None for value in exponents[block]):
        return True
    return exponents[block][group] is not None
