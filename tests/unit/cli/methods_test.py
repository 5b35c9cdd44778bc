"""`vestige methods`: every method with its guarantee."""

from __future__ import annotations

import json

from tests.support.program import run


def test_methods_are_listed_with_their_guarantees() -> None:
    from vestige.methods import METHODS

    report = json.loads(run("methods --json").stdout)["methods"]
    assert [row["name"] for row in report] == list(METHODS)
    assert all(row["paper"] for row in report)
    unproven = [row["name"] for row in report if not row["guarantee"].startswith("proven")]
    assert unproven == ["dp-adam-ac", "geodp"]
    assert next(row for row in report if row["name"] == "fo")["settings"]["window"] == 8
    text = run("methods").stdout
    assert "dp-sat-momentum" in text and "kalman" in text
