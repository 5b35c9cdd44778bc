"""docs/scaling.md has the table that its command prints, and the table is its own formula."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import scaling

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_page_has_the_table_of_its_command():
    assert scaling.table() in PAGE.read_text()


def test_a_sum_as_long_as_the_step_halves_what_ranks_give():
    """Eight ranks send 2 * 7 / 8 of the sum at 0.8 of 450 GB/s."""
    seconds = 1.75 * 4 * 1e9 / (0.8 * 450e9)
    assert scaling.efficiency(8, 1e9, seconds) == pytest.approx(0.5)
