"""`python -m benchmarks.page`: the tables of docs/benchmarks.md, docs/scaling.md and
docs/numerics.md from the JSONs, and the plot docs/benchmarks.svg.

What lies between `<!-- table: NAME -->` and `<!-- end -->` is made here, and nothing else. Every
table says which machine and commit it is of.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks import neighbours, scaling
from benchmarks.plot import Bar, drawing
from benchmarks.store import File, Row, files, newest

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "benchmarks.svg"
PAGES = tuple(DOCS / name for name in ("benchmarks.md", "scaling.md", "numerics.md"))
MARKED = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {
    "mlp": "MLP 200k",
    "cnn": "CNN 550k",
    "resnet18": "ResNet-18",
    "gpt2": "GPT-2 124M",
    "vit": "ViT-B/16",
    "wrn-16-4": "WRN-16-4",
    "llama-lora": "Llama-shaped 1B, LoRA",
    "perceptron": "perceptron",
}
PRECISIONS = {"fp32": "", "tf32": ", TF32", "bf16": ", bf16"}


# -- tables -----------------------------------------------------------------------------------


def table(device: str, section: str, before: int = 0) -> str:
    """A line for each engine of each case."""
    file = newest(device, section, before)
    if file is None:
        return f"Not measured yet: `python -m benchmarks --device {device} --section {section}`."
    lines = [
        "| model, lot | engine | step, ms | over ordinary | over its base | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for _, rows in groupby(file.section(section), key=lambda row: row["case"]):
        for i, row in enumerate(rows):
            lines.append(_line(row, title(row) if i == 0 else ""))
    return "\n".join([*lines, "", about(file, files(device)[-1])])


def about(file: File, last: File) -> str:
    """The line below a table: what it is of, and whether there are newer figures of the device."""
    machine, name = file.machine, file.path.name
    where = f"{machine['device']}, torch {machine['torch']}"
    old = "" if name == last.path.name else f"; the newest figures are those of {last.path.name}"
    link = f"[{name}](../benchmarks/results/{name})"
    line = f"Commit {machine['commit']}, {machine['measured'][:10]}, {where}: {link}{old}."
    return textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)


def title(row: Row) -> str:
    """Model, lot and precision; what a case varies is said by its name."""
    name = f"{NAMES[row['model']]}, {row['lot']}{PRECISIONS[row['precision']]}"
    return f"{name}, {row['case']}" if row["section"] == "growth" else name


def _line(row: Row, name: str) -> str:
    engine = shown(row["engine"])
    if "failed" in row:
        return f"| {name} | {engine} | did not run: {row['failed'].replace('|', '/')} | | | |"
    note = " (uncompiled)" if "note" in row else ""
    cells = (_number(row[key], 2) for key in ("ratio", "over_base"))
    return (
        f"| {name} | {engine}{note} | {_number(row['milliseconds'], 2)} | {' | '.join(cells)} "
        f"| {_number(row['peak_mib'], 0)} |"
    )


def shown(engine: str) -> str:
    """An engine's name on the page."""
    for name, word in (("plain", "ordinary"), ("vestige", "Vestige"), ("opacus", "Opacus")):
        engine = engine.replace(name, word)
    return engine


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def moved(device: str) -> str:
    """How far one more record moves a sum: the newest figures of neighbours.py."""
    found = files(f"neighbours-{device}")
    if not found:
        return f"Not measured yet: `python -m benchmarks.neighbours --device {device}`."
    return f"{neighbours.table(found[-1].rows)}\n\n{about(found[-1], found[-1])}"


TABLES: dict[str, Callable[[], str]] = {
    **{f"cpu {name}": partial(table, "cpu", name) for name in ("models", "updates", "twice")},
    **{
        f"cuda {name}": partial(table, "cuda", name)
        for name in ("models", "rows", "methods", "workloads", "growth", "group")
    },
    "cuda rows before": partial(table, "cuda", "rows", 1),
    "neighbours cpu": partial(moved, "cpu"),
    "neighbours cuda": partial(moved, "cuda"),
    "scaling": scaling.table,
}


def text(page: str) -> str:
    """The page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}\n{TABLES[name]()}\n\n{end}"

    return MARKED.sub(made, page)


# -- the plot ---------------------------------------------------------------------------------


def bars() -> list[Bar]:
    """The fastest private step over the ordinary one, ours and Opacus', where both were timed."""
    found = []
    for device in ("cpu", "cuda"):
        both = [file for file in files(device) if _rivals(file)]
        if both:
            file = both[-1]
            where = "CPU" if device == "cpu" else file.machine["device"].removeprefix("NVIDIA ")
            found += [
                Bar(f"{title(rows[0])} ({where})", ours, theirs)
                for rows, ours, theirs in _rivals(file)
            ]
    return found


def _rivals(file: File) -> list[tuple[list[Row], float, float]]:
    """The cases that have both, with the lowest ratio of each."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in file.rows:
        if row["section"] in ("models", "rows", "workloads") and row.get("ratio"):
            cases.setdefault((row["section"], row["case"]), []).append(row)
    found = []
    for rows in cases.values():
        ours = [r["ratio"] for r in rows if r["engine"].startswith(("vestige flat", "vestige per"))]
        theirs = [r["ratio"] for r in rows if r["engine"].startswith("opacus")]
        if ours and theirs:
            found.append((rows, min(ours), min(theirs)))
    return found


def main() -> None:
    """Write the pages and the plot."""
    for page in PAGES:
        page.write_text(text(page.read_text()))
    PICTURE.write_text(drawing(bars()))


if __name__ == "__main__":
    main()
