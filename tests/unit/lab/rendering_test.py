"""Templates show whatever they are given and never obey it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vestige.lab import rendering


def test_pages_escape_everything_that_is_not_markup() -> None:
    page = rendering.html(
        "page.html.j2", kind="<&\"'>", title="a\x00b\ud800", parts={}, lead="`<i>`"
    )
    assert "&lt;&amp;&#34;&#39;&gt;" in page and "<code>&lt;i&gt;</code>" in page
    assert "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}" in page
    assert rendering.prose("see `a<b` and arXiv 2605.09890.") == (
        'see <code>a&lt;b</code> and <a href="https://arxiv.org/abs/2605.09890" rel="noreferrer">'
        "arXiv 2605.09890</a>."
    )


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_texts_have_enough_contrast() -> None:
    sheet = rendering.html("page.html.j2", kind="kind", title="title", parts={}, lead="")
    light, dark = re.findall(r":root \{([^}]*)\}", sheet)
    for scheme in (light, dark):
        colours: Mapping[str, str] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))
        for ground in ("paper", "shade"):
            for ink in ("ink", "muted", "accent", "warning"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground, scheme)
