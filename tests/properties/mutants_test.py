"""Deliberately broken copies: each is caught, and by the checks that are named for it.

The checks are those that `vestige verify` runs for anybody's method; the broken copies are in
tests/support/mutants.py. The engine as it is passes all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutants import MUTANTS
from vestige.audit.verify import CHECKS, verify
from vestige.methods import resolve

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
UNBROKEN = {f"{mutant.method} {mutant.clipping}": mutant for mutant in MUTANTS}
# Those that must be there, whatever else is.
DEMANDED = (
    "noise halved",
    "noise scaled by beta twice",
    "clipped after the sum",
    "divisor len(lot)",
    "an empty lot skipped",
    "as many physical batches as a lot needs",
    "a gate that reads the current sum (fo)",
    "a gate that reads the current sum (sma)",
    "history of raw sums (fo)",
    "history of raw sums (sma)",
    "marginal sigma/beta accounted for three groups",
    "noise seed reused after resume (dp-sgd)",
    "noise seed reused after resume (fo)",
    "per-layer C not split",
    "norms made exact for the whole batch where one is doubtful",
    "rows read batch-major, whatever their order is",
    "rows that were sorted or turned round not put back",
    "the self-check switched off",
)


def caught_by(mutant, monkeypatch, checks=CHECKS, quick=True):
    """The checks that notice the mutant, with the kinds of their findings."""
    mutant.break_it(monkeypatch)
    found = verify(
        resolve(mutant.method), checks=checks, seed=1, quick=quick, clipping=mutant.clipping
    )
    return {r.check: {f.what for f in r.findings} for r in found.reports if r.findings}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_mutant_is_caught_by_the_checks_that_are_named_for_it(name, monkeypatch):
    mutant = BY_NAME[name]
    found = caught_by(mutant, monkeypatch, tuple(mutant.caught))
    assert set(found) == set(mutant.caught)
    for check, what in mutant.caught.items():
        assert what in found[check]


@pytest.mark.parametrize("name", BY_NAME)
def test_no_other_check_notices_the_mutant(name, monkeypatch):
    mutant = BY_NAME[name]
    others = tuple(check for check in CHECKS if check not in mutant.caught)
    assert caught_by(mutant, monkeypatch, others) == {}


@pytest.mark.parametrize("kind", UNBROKEN)
def test_what_is_not_broken_passes_every_check(kind):
    mutant = UNBROKEN[kind]
    found = verify(resolve(mutant.method), seed=1, quick=True, clipping=mutant.clipping)
    assert [str(f) for report in found.reports for f in report.findings] == []
    assert found.passed


def test_the_demanded_mutants_are_there_and_every_check_catches_some():
    assert len(BY_NAME) == len(MUTANTS)
    assert set(DEMANDED) <= set(BY_NAME)
    assert {check for mutant in MUTANTS for check in mutant.caught} == set(CHECKS)


def test_the_table_in_the_docs_is_this_list():
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    rows = [f"| {m.name} | {', '.join(c for c in CHECKS if c in m.caught)} |" for m in MUTANTS]
    assert [line for line in page.splitlines() if line in rows] == rows
    assert f"{len(MUTANTS)} of {len(MUTANTS)} caught" in page


@pytest.mark.slow
@pytest.mark.audit
def test_all_are_caught_at_full_length():
    """What `make audit` prints: every mutant, and the checks that catch it."""
    lines, missed = [], []
    for mutant in MUTANTS:
        with pytest.MonkeyPatch.context() as patch:
            found = caught_by(mutant, patch, quick=False)
        if any(what not in found.get(check, ()) for check, what in mutant.caught.items()):
            missed.append(mutant.name)
        lines.append(f"{mutant.name:60} {', '.join(found)}")
    print("\n".join(lines))
    print(f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} caught")
    assert missed == []
