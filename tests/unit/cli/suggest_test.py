"""`vestige suggest`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_tables import rows, write_table
from tests.support.program import check_refused, plain, run, run_json

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_every_setting_has_its_reason_and_there_is_a_command() -> None:
    write_table(Path("t.csv"), rows(400))
    text = plain(run("suggest --data t.csv --target ill --epsilon 3").stdout)
    for word in ("delta 0.0001", "lot 16", "epochs 30", "clip 1", "noise multiplier", "lr 0."):
        assert word in text
    assert "vestige train --data t.csv --target ill --epsilon 3" in text
    found = run_json("suggest --data t.csv --target ill --epsilon 3")
    assert found["lot"] == 16 and found["facts"]["declared"] is False
    check_refused(run("suggest --data t.csv --epsilon 0"), "epsilon 0.0 is out of range")
