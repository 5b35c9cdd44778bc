"""Findings and reports."""

from __future__ import annotations

import json

from vestige.audit.verify import Finding, Report


def test_findings_are_strict_json():
    finding = Finding("what", "It is.", 3, float("inf"), 1.0)
    report = Report("noise", (finding,), {"a": float("nan"), "b": {"c": -float("inf")}})
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False)) == {
        "check": "noise",
        "passed": False,
        "not_applicable": None,
        "findings": [
            {"what": "what", "sentence": "It is.", "step": 3, "figure": "inf", "bound": 1.0}
        ],
        "figures": {"a": "nan", "b": {"c": "-inf"}},
    }
    assert str(finding) == "It is." and Report("noise").passed
