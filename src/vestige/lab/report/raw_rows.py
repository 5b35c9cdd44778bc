"""Rows for those who want to compute with them: all of a row, or a line of a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vestige.lab.report import wording

Row = Mapping[str, Any]
_CSV = (
    "hash",
    "column",
    "role",
    "label",
    "cell",
    "method",
    "seed",
    "lr",
    "final_accuracy",
    "best_accuracy",
    "final_loss",
    "epsilon",
    "epsilon_marginal",
    "delta",
    "noise_multiplier",
    "steps",
    "seconds",
)


def as_lines(rows: Sequence[Row]) -> bytes:
    """The rows as JSON lines."""
    written = (json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    return "".join(f"{line}\n" for line in written).encode()


def as_csv(rows: Sequence[Row]) -> bytes:
    """One line for each run, without its curves."""
    study = any("errors" in row for row in rows)
    errors = list(dict.fromkeys(name for row in rows for name in row.get("errors", {})))
    columns = ["hash", "label", "cell", *errors, "seconds"] if study else list(_CSV)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        values = dict(row) | row.get("errors", {}) | {"cell": wording.cell(row["cell"])}
        writer.writerow([_in_csv(values.get(column)) for column in columns])
    return buffer.getvalue().encode()


def _in_csv(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula is quoted."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value
