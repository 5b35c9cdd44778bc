"""Lots against the rate that they are charged at."""

from __future__ import annotations

from tests.support.audits import Repeating
from vestige.audit.verify.lots import examine
from vestige.audit.verify.runs import observe


def test_lots_that_come_again_much_later_are_caught():
    seen = observe(Repeating(period=10), steps=60, seed=1)
    found = {finding.what: finding for finding in examine(seen).findings}
    assert "0 charges apart" in str(found["overlap of lots"])  # 10, 20 or 30
