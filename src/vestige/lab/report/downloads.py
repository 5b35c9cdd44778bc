"""Files inside a page: what a reader may save from it, as links that hold their own content."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vestige.lab import wording

Row = Mapping[str, Any]
_COLUMNS = (
    *("hash", "column", "role", "label", "cell", "method", "seed", "lr", "final_accuracy"),
    *("best_accuracy", "final_loss", "epsilon", "epsilon_marginal", "delta", "noise_multiplier"),
    *("steps", "seconds"),
)


def download(name: str, what: str, content: bytes, packed: bool = False) -> dict[str, str]:
    """A file in a page. `packed` is gzip, without a time, so that the page stays the same."""
    data = gzip.compress(content, 9, mtime=0) if packed else content
    kind = "application/gzip" if packed else "text/plain;charset=utf-8"
    return {
        "name": name,
        "label": f"{name}: {what}" if what else name,
        "size": f"{max(1, round(len(data) / 1024)):,}",  # kilobytes
        "address": f"data:{kind};base64,{base64.b64encode(data).decode()}",
    }


def rows_of(name: str, rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows of an experiment: as a spreadsheet without their curves, and whole."""
    lines = (json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    whole = "".join(f"{line}\n" for line in lines).encode()
    return [
        download(f"{name}.csv", "one line for each run", _csv(rows)),
        download(f"{name}.jsonl.gz", "all rows with their curves", whole, packed=True),
    ]


def _csv(rows: Sequence[Row]) -> bytes:
    errors = list(dict.fromkeys(name for row in rows for name in row.get("errors", {})))
    columns = ["hash", "label", "cell", *errors, "seconds"] if errors else list(_COLUMNS)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        values = {**row, **row.get("errors", {}), "cell": wording.cell(row["cell"])}
        writer.writerow([_in_csv(values.get(column)) for column in columns])
    return buffer.getvalue().encode()


def _in_csv(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula is quoted."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value
