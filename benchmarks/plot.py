"""Draws ratios as bars on a logarithmic axis, as SVG without a library, so that a diff is small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

LEFT, WIDTH, ROW, BAR = 290, 800, 46, 15
INK, PALE, OURS, THEIRS = "#1f2a37", "#cbd5e1", "#0f766e", "#b45309"
TICKS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Bar:
    """A case, and private over ordinary of either."""

    name: str
    ours: float
    theirs: float


def drawing(bars: Sequence[Bar]) -> str:
    """The picture."""
    most = max([2.0, *(max(bar.ours, bar.theirs) for bar in bars)])
    ticks = [tick for tick in TICKS if tick <= most * 1.3]
    scale = (WIDTH - LEFT - 60) / math.log(most * 1.3)
    bottom = 56 + ROW * len(bars)

    def at(ratio: float) -> float:
        return LEFT + scale * math.log(max(ratio, 1.0))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        "<title>A private step over an ordinary one: Vestige and Opacus</title>",
        f'<rect width="{WIDTH}" height="{bottom + 34}" fill="white"/>',
        f'<rect x="{LEFT}" y="14" width="12" height="12" fill="{OURS}"/>',
        f'<text x="{LEFT + 18}" y="25">Vestige</text>',
        f'<rect x="{LEFT + 90}" y="14" width="12" height="12" fill="{THEIRS}"/>',
        f'<text x="{LEFT + 108}" y="25">Opacus, its fastest mode</text>',
    ]
    for tick in ticks:
        x = at(tick)
        parts.append(f'<path d="M{x:.1f} 40V{bottom}" stroke="{PALE}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick}x</text>')
    for i, bar in enumerate(bars):
        y = 50 + ROW * i
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + BAR + 4}" text-anchor="end">{escape(bar.name)}</text>'
        )
        for ratio, colour, top in ((bar.ours, OURS, y), (bar.theirs, THEIRS, y + BAR + 2)):
            wide = max(at(ratio) - LEFT, 1)
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>'
            )
            x = LEFT + wide + 5
            parts.append(f'<text x="{x:.1f}" y="{top + 12}">{ratio:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
