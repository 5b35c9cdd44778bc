"""Looks that can be told apart, and figures that come out the same whatever is configured."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from matplotlib.figure import Figure

from vestige.lab.plots import (
    Dot,
    Line,
    Panel,
    Style,
    columns_of,
    dot_panel,
    levels,
    line_panel,
    look,
    plot,
    quiet,
    reference,
    styled,
)

HOSTILE = "_<b>$\\frac{1"


def test_series_can_be_told_apart_without_colours() -> None:
    styles = [reference(), *(look(number) for number in range(12))]
    assert len({tuple(style.items()) for style in styles}) == 13
    for one, other in itertools.pairwise(styles):
        assert (one["linestyle"], one["marker"]) != (other["linestyle"], other["marker"])


def test_quiet_series_are_thinner_than_the_others_so_that_grey_print_tells_them() -> None:
    """What is coloured here may be as grey as they are on paper; their width still differs."""
    with styled():
        ordinary = matplotlib.rcParams["lines.linewidth"]
    for number in range(12):
        assert quiet(number)["linewidth"] <= 0.6 * ordinary
        assert (quiet(number)["linestyle"], quiet(number)["marker"]) == (
            look(number)["linestyle"],
            look(number)["marker"],
        )


def test_what_runs_together_is_seen() -> None:
    """Grey lines lie below coloured ones, whatever their turn, and dashes above full lines."""
    dashed = next(look(n) for n in range(12) if look(n)["linestyle"] != "-")
    drawn = [dashed, reference(), quiet(0), look(0)]
    lines = [Line(str(number), style, [1, 2], [0, 0]) for number, style in enumerate(drawn)]
    axes = Figure().subplots()
    line_panel("", ("x", "y"), lines).draw(axes)
    above = sorted(axes.lines, key=lambda line: line.zorder)
    assert [line.get_label() for line in above] == ["2", "1", "3", "0"]


def test_labels_are_shown_as_they_stand() -> None:
    lines = [Line(HOSTILE, look(0), [1, 2], [0.1, 0.2]), Line("b", look(1), [1, 2], [0.2, 0.3])]
    dots = [Dot(HOSTILE, look(0), 0.5, (0.4, 0.6), 0.7), Dot("c", look(1), None, paper=0.1)]
    panels = [line_panel(HOSTILE, ("x", "y"), lines), dot_panel("", "z", dots, base=0.5)]
    made = plot("name", HOSTILE, "caption", panels)
    shown = "".join(ET.fromstring(made.svg).itertext())
    assert shown.count(HOSTILE) >= 3 and "the paper's value" in shown
    assert "b: 0.3" in made.words and f"{HOSTILE}: 0.5 (paper 0.7)" in made.words
    assert "c: not run (paper 0.1)" in made.words
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None}):
        assert plot("name", HOSTILE, "caption", panels) == made


def test_a_level_has_its_name_beside_the_plot() -> None:
    """Also where no series needs one: a line that nothing explains is worse than none."""
    dots = [Dot("a", look(0), 0.5), Dot("b", look(1), 0.6)]
    one = Line("alone", look(0), [1, 2], [0.1, 0.2])
    level = {"another model": 0.55}
    for panel in (
        dot_panel("", "z", dots, known=level),
        line_panel("", ("x", "y"), [one], finish=lambda axes: levels(axes, level)),
    ):
        assert ">another model<" in plot("n", "t", "c", [panel]).svg
    alone = plot("n", "t", "c", [line_panel("", ("x", "y"), [one])])
    assert ">alone<" not in alone.svg  # one series needs no name


# What eyes without cones for green see (Machado, Oliveira and Fernandes 2009), in linear RGB.
DEUTERANOPIA = ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689))
GREY = ((0.2126, 0.7152, 0.0722),) * 3


@pytest.mark.parametrize("eyes", [DEUTERANOPIA, GREY], ids=["deuteranopia", "grey"])
def test_looks_differ_to_other_eyes_and_in_print(eyes: tuple[tuple[float, ...], ...]) -> None:
    """In colour and lightness, or else in dashes and markers both."""

    def seen(style: Style) -> list[float]:
        channels = [int(style["color"].strip("#")[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        mixed = [sum(a * b for a, b in zip(row, light, strict=True)) for row in eyes]
        return [max(0.0, value) ** (1 / 2.4) for value in mixed]

    for one, other in itertools.combinations([reference(), *map(look, range(6))], 2):
        apart = math.dist(seen(one), seen(other)) > 0.35
        assert apart or (
            one["linestyle"] != other["linestyle"] and one["marker"] != other["marker"]
        ), (one, other)


def test_neighbours_that_share_a_grey_differ_in_their_dashes() -> None:
    """The seventh look is as light as the third in grey print: its dashes are longer."""
    assert look(5)["linestyle"] != look(1)["linestyle"]


def test_a_plot_of_nothing_is_empty() -> None:
    assert plot("name", "title", "why", []).svg == ""


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (3, 3), (4, 4), (5, 3), (6, 3), (7, 4), (8, 4), (21, 7), (22, 6)]
)
def test_the_grid_of_small_panels(count: int, columns: int) -> None:
    assert columns_of([Panel("", "", lambda axes: None, 200, 260)] * count) == columns
