"""`vestige methods`: what can be trained with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vestige.cli.options import Json
from vestige.cli.render import print_json
from vestige.methods import METHODS


def methods(as_json: Json = False) -> None:
    """Print every method with its guarantee, its cost and its paper."""
    columns = ("summary", "guarantee", "touches", "extra_memory", "paper")
    rows = [
        {"name": name} | {column: getattr(method, column) for column in columns}
        for name, method in METHODS.items()
    ]
    if not as_json:
        Console().print(methods_table(rows))
        return
    for row, method in zip(rows, METHODS.values(), strict=True):
        home = method.load()
        row |= {"clipping": str(home.clipping), "settings": home().settings()}
    print_json({"methods": rows})


def methods_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Every method: what it does, its paper, its memory, its guarantee, its looks at a lot."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        title="touches: how often a step looks at its lot",
        title_justify="left",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("what it does, its paper, its extra memory")
    table.add_column("guarantee", max_width=14)
    table.add_column("touches", justify="right")
    for row in rows:
        kind = str(row["guarantee"]).partition(":")[0]
        small = f"{row['paper']}\nextra memory: {row['extra_memory']}"
        what = f"{escape(row['summary'])}\n[dim]{escape(small)}[/dim]"
        table.add_row(row["name"], what, kind, str(row["touches"]))
    return table
