"""Figures of docs/tune.md and docs/units.md that follow from public numbers, computed again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vestige.privacy import accounting
from vestige.privacy.events import Event
from vestige.privacy.selection import Law, Selection
from vestige.statement.curves import of_several_records

DOCS = Path(__file__).parents[2] / "docs"


def cells(page: str, first: str) -> list[list[str]]:
    """The lines of a page's table whose first cell matches."""
    lines = (DOCS / page).read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in rows if re.fullmatch(first, row[0])]


def test_what_a_search_costs() -> None:
    """240 steps at sampling rate 0.089: whatever noise gives one trial epsilon 1.03."""
    rate, steps = 0.089, 240
    noise, _ = accounting.noise_for(1.03, 1e-5, {accounting.Charge(rate): steps}, "rdp")
    table = cells("tune.md", r"-?[\d.]+")
    assert [row[0] for row in table] == ["-0.5", "0", "0.5", "1"]
    for eta, *told, trials in table:
        for mean, said in zip((3, 10, 30), told, strict=True):
            law = Law.with_mean(mean, float(eta))
            search = Event.of(Selection(law, (((rate, noise, steps),),)))
            found = accounting.epsilon([search], 1e-5, "rdp")
            assert found == pytest.approx(float(said), abs=0.01), (eta, mean)
        assert trials == f"at most {Law.with_mean(10, float(eta)).most(0.99)}"


def test_what_several_records_cost_by_the_general_rule() -> None:
    (told,) = cells("units.md", "the general rule")
    found = of_several_records([Event(0.01, 1.5, 1000)], 1e-5)
    assert told[1] == ""  # one record has the figure of the line above
    said = [float(figure) for figure in told[2:]]
    assert [found[records] for records in (2, 5, 10)] == pytest.approx(said, rel=2e-3)
