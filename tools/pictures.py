"""The two pictures of docs/architecture.md: the rooms and their imports, and one traced step.

    python tools/pictures.py        writes docs/rooms.svg and docs/step.svg

The first is read from the source, the second from a training step that really runs
(benchmarks/walk.py), so neither can go stale without a diff.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vestige"
WIDTH, ROW, BOX = 760, 46, 30
INK, PALE, LINE, ACCENT = "#1f2a37", "#eef2f7", "#94a3b8", "#b45309"
FONT = "font-family='system-ui, sans-serif'"
STEP = 7
MOMENTS = {
    "draw_lot": "a lot is drawn",
    "Run.hand_out": "and handed out",
    "Capture._enter_forward": "forward",
    "Collector.arrive": "the loss is read; backward: clipped and summed",
    "Run._before_step": "optimizer.step()",
    "Door.release": "charged, then noise",
    "Run._after_step": "the weights have moved",
}
SUBJECTS = {
    "cli": "one file per command",
    "integrations": "trainers of other libraries",
    "compat": "Opacus' names over the engine",
    "lab": "the papers' experiments, tables, pages",
    "train": "runs of `vestige train`",
    "audit": "attacks and checks of the engine",
    "engine": "the order of events",
    "statement": "what a run promises",
    "methods": "one row and one class per method",
    "updates": "filters, Adam, ascents, averages",
    "memory": "recall before you look",
    "release": "the door: noise, and only here",
    "gradients": "from a lot to a clipped sum",
    "geometry": "directions instead of sums",
    "sampling": "private lots, secret streams",
    "privacy": "what it costs: ledger, accountants",
    "plan": "the public facts, frozen",
    "checks": "numbers, rounding, states",
    "files": "files that appear whole",
    "errors": "errors that name a remedy",
}


def rooms() -> list[str]:
    """The rooms from the top down, as the import contract has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    return [room for layer in layers if "__main__" not in layer for room in layer.split(" | ")]


def room_of(path: Path) -> str:
    """The room of a source file."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports() -> Counter[tuple[str, str]]:
    """How many modules of one room import from another."""
    found: Counter[tuple[str, str]] = Counter()
    for path in SOURCE.rglob("*.py"):
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vestige."):
                targets.add(str(node.module).split(".")[1])
        for target in targets - {room_of(path)}:
            found[room_of(path), target] += 1
    return found


def text(x: float, y: float, words: str, size: int = 13, more: str = "") -> str:
    """One line of text."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f"<text x='{x}' y='{y}' {FONT} font-size='{size}' fill='{INK}' {more}>{words}</text>"


def picture(height: int, title: str, body: list[str]) -> str:
    """A whole SVG with a white ground, for light and dark pages alike."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' "
        f"aria-label='{title}'>\n<title>{title}</title>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def draw_rooms() -> str:
    """Rooms as a stack; every import points down, and a thicker line is more modules."""
    order, edges = rooms(), imports()
    place = {room: 20 + i * ROW for i, room in enumerate(order)}
    body = []
    for (source, target), count in sorted(edges.items()):
        if source not in place or target not in place:
            continue
        top, bottom = place[source] + BOX, place[target]
        bend = 430 + 16 * (place[target] - place[source]) / ROW
        body.append(
            f"<path d='M420 {top - BOX / 2} C {bend} {top}, {bend} {bottom}, 420 "
            f"{bottom + BOX / 2}' fill='none' stroke='{LINE}' "
            f"stroke-width='{min(4, 0.4 + count / 6):.1f}' opacity='0.55'/>"
        )
    for room, y in place.items():
        colour = ACCENT if room == "release" else LINE
        body.append(
            f"<rect x='20' y='{y}' width='400' height='{BOX}' rx='5' fill='{PALE}' "
            f"stroke='{colour}' stroke-width='{2 if room == 'release' else 1}'/>"
        )
        body.append(text(32, y + 20, room, 14, "font-weight='600'"))
        body.append(text(140, y + 20, SUBJECTS.get(room, "")))
    return picture(20 + len(order) * ROW, "Rooms of the library: imports point down", body)


def draw_step() -> str:
    """One step of DP-SGD as a line that goes from room to room, in order."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from benchmarks.walk import walk

    calls = [(Path(file).parts[0].removesuffix(".py"), name) for file, name in walk("dp-sgd")]
    stages = [(room, [name for _, name in group]) for room, group in groupby(calls, lambda c: c[0])]
    columns = [room for room in rooms() if any(room == stage for stage, _ in stages)]
    spread = (WIDTH - 120) / max(1, len(columns) - 1)
    x_of = {room: 60 + i * spread for i, room in enumerate(columns)}
    body = [text(x_of[room], 24, room, 12, "text-anchor='middle'") for room in columns]
    height = 44 + STEP * len(stages)
    for room in columns:
        body.append(f"<path d='M{x_of[room]:.0f} 34 V{height}' stroke='{PALE}' stroke-width='6'/>")
    points = [(x_of[room], 40 + STEP * i) for i, (room, _) in enumerate(stages)]
    line = " ".join(f"{x:.0f},{y}" for x, y in points)
    told: set[str] = set()
    body.append(f"<polyline points='{line}' fill='none' stroke='{LINE}' stroke-width='0.8'/>")
    for (x, y), (room, names) in zip(points, stages, strict=True):
        colour = ACCENT if room == "release" and "Door.release" in names else INK
        size = 4 if colour == ACCENT else 1.6
        body.append(f"<circle cx='{x:.0f}' cy='{y}' r='{size}' fill='{colour}'/>")
        for name, words in MOMENTS.items():
            if name in names and name not in told:
                told.add(name)
                body.append(text(x + 8, y + 4, words, 11, "font-weight='600'"))
    return picture(height + 10, "One step of DP-SGD, from the loader to the optimizer", body)


if __name__ == "__main__":
    (ROOT / "docs" / "rooms.svg").write_text(draw_rooms())
    (ROOT / "docs" / "step.svg").write_text(draw_step())
