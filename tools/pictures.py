"""The pictures of the docs: the idea, a memory's weights and flow, the rooms, one traced step.

    python tools/pictures.py        writes idea, flows, kernels, rooms and step as docs/NAME.svg

The rooms are read from the source, the step from a training step that really runs
(benchmarks/walk.py), and a memory's weights from its rule, so none can go stale without a diff.
The idea and the flows are drawn by hand.
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
# The boxes of the idea: x, y, width, title, what it says below.
IDEA = {
    "records": (24, 72, 108, "records", "private"),
    "lot": (166, 72, 108, "a lot", "drawn in secret"),
    "sum": (308, 72, 116, "clipped sum", "never leaves"),
    "door": (458, 72, 112, "the door", "charge, then noise"),
    "release": (616, 72, 120, "release", "public for ever"),
    "memory": (430, 190, 168, "memory of releases", "recalled before the lot"),
    "step": (616, 190, 120, "optimizer", "your own step"),
}
ARROWS = [  # from, to: corners of a line
    [(132, 95), (166, 95)],
    [(274, 95), (308, 95)],
    [(424, 95), (458, 95)],
    [(570, 95), (616, 95)],
    [(676, 118), (676, 190)],
    [(640, 118), (640, 154), (560, 154), (560, 190)],
    [(500, 190), (500, 118)],
]
# The steps of one release from the top down: DP-SGD, and FO where it differs.
FLOW = [
    ("a lot", "drawn in secret", None),
    ("clipped sum", "each record at most C", None),
    ("the query", "the sum", "beta * sum + (1 - beta) * memory"),
    ("+ noise", "standard deviation sigma * C", None),
    ("release", "public for ever", None),
    ("optimizer", "one step", None),
]
COSTS = (
    "one record moves the query by C: noise multiplier sigma",
    "one record moves the query by beta * C: sigma / beta",
)
LAGS = 15
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


TIP = (
    "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
    f"markerHeight='7' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{INK}'/></marker></defs>"
)


def arrow(corners: list[tuple[float, float]]) -> str:
    """A line through these corners, with a tip."""
    line = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return (
        f"<polyline points='{line}' fill='none' stroke='{INK}' stroke-width='1.4' "
        "marker-end='url(#tip)'/>"
    )


def box(x: float, y: float, width: float, accent: bool = False) -> str:
    """A box for two lines of text."""
    colour, stroke = (ACCENT, 2.5) if accent else (LINE, 1)
    return (
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='46' rx='6' fill='white' "
        f"stroke='{colour}' stroke-width='{stroke}'/>"
    )


def picture(height: int, title: str, body: list[str]) -> str:
    """A whole SVG with a white ground, for light and dark pages alike."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' "
        f"aria-label='{title}'>\n<title>{title}</title>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def draw_idea() -> str:
    """What is private, what is public, and the one door between them."""
    body = [
        TIP,
        f"<rect x='10' y='22' width='500' height='116' rx='8' fill='{PALE}' stroke='{LINE}' "
        "stroke-dasharray='5 4'/>",
        text(24, 46, "private: looked at here, and nowhere else", 13, "font-weight='600'"),
        text(736, 46, "public from here on", 13, "font-weight='600' text-anchor='end'"),
    ]
    body += map(arrow, ARROWS)
    for name, (x, y, width, title, below) in IDEA.items():
        body.append(box(x, y, width, name == "door"))
        middle = f"{x + width / 2:g}"
        centred = "text-anchor='middle'"
        body.append(text(float(middle), y + 20, title, 14, f"{centred} font-weight='600'"))
        body.append(text(float(middle), y + 37, below, 11, centred))
    body.append(text(24, 204, "release = beta * sum + (1 - beta) * memory + noise", 13))
    body.append(text(24, 226, "without memory (beta = 1) it is DP-SGD", 13))
    return picture(252, "Only noisy releases leave the door, and only they are remembered", body)


def draw_flows() -> str:
    """DP-SGD and FO side by side: what flows into a release, and what it costs."""
    body = [TIP]
    for column, (title, cost) in enumerate(zip(("DP-SGD", "FO-DP-SGD"), COSTS, strict=True)):
        left, width = 24 + 380 * column, 230
        centre = left + width / 2
        body.append(text(left, 26, title, 16, "font-weight='600'"))
        for number, (name, plain, mixed) in enumerate(FLOW):
            y = 44 + 68 * number
            below = mixed if column and mixed else plain
            accent = name == "+ noise"
            body.append(box(left, y, width, accent))
            body.append(text(centre, y + 20, name, 14, "text-anchor='middle' font-weight='600'"))
            body.append(text(centre, y + 37, below, 11, "text-anchor='middle'"))
            if number:
                body.append(arrow([(centre, y - 22), (centre, y)]))
        if column:
            body.append(arrow([(left + width, 339), (left + 291, 339), (left + 291, 272)]))
            body.append(box(left + 240, 226, 102))
            body.append(
                text(left + 291, 246, "memory", 14, "text-anchor='middle' font-weight='600'")
            )
            body.append(text(left + 291, 263, "K releases", 11, "text-anchor='middle'"))
            body.append(arrow([(left + 291, 226), (left + 291, 203), (left + width, 203)]))
            body.append(text(left + 236, 194, "before the lot", 11))
        body.append(text(left, 468, cost, 12))
    return picture(484, "DP-SGD forgets each release; FO mixes earlier ones into the query", body)


def draw_kernels() -> str:
    """The weights of a memory by lag, by the library's own rule."""
    sys.path[:0] = [str(ROOT / "src")]
    import numpy as np

    from vestige.memory.rules import power_law

    lags = np.arange(1, LAGS + 1)
    decayed = 0.7 ** (lags - 1)
    kernels = {
        "exponential, 0.7 a step: an ablation": (LINE, decayed / decayed.sum()),
        "power, alpha 0.7, tempered: SMA, a layer 0.1 outside its interval": (
            ACCENT,
            power_law(lags, 0.7, 1 - np.exp(-0.1)),
        ),
        "power, alpha 0.8: FO": (INK, power_law(lags, 0.8, 0.0)),
    }
    right, bottom, high = 730, 300, 0.35
    body = [f"<path d='M60 30 V{bottom} H{right}' fill='none' stroke='{INK}'/>"]
    for share in (0.1, 0.2, 0.3):
        y = bottom - 270 * share / high
        body.append(f"<path d='M60 {y:.0f} H{right}' stroke='{PALE}'/>")
        body.append(text(52, y + 4, f"{share:.0%}", 12, "text-anchor='end'"))
    for lag in lags:
        body.append(text(60 + 44 * lag, bottom + 18, str(lag), 12, "text-anchor='middle'"))
    body.append(text(right, bottom + 38, "lag: how many steps ago", 12, "text-anchor='end'"))
    body.append(text(60, 20, "share of the memory", 12))
    for number, (name, (colour, weights)) in enumerate(kernels.items()):
        points = [
            (60 + 44 * j, bottom - 270 * w / high) for j, w in zip(lags, weights, strict=True)
        ]
        line = " ".join(f"{x},{y:.1f}" for x, y in points)
        body.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
        body += [f"<circle cx='{x}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in points]
        body.append(f"<path d='M250 {48 + 24 * number} h24' stroke='{colour}' stroke-width='3'/>")
        body.append(text(282, 52 + 24 * number, name, 13))
    return picture(
        350, "Weights of a memory by lag: a power falls slower than an exponential", body
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
    for draw in (draw_idea, draw_flows, draw_kernels, draw_rooms, draw_step):
        name = draw.__name__.removeprefix("draw_")
        (ROOT / "docs" / f"{name}.svg").write_text(draw())
