"""Deliberately broken copies: each is caught, and by the checks that are named for it.

The checks are those that `vestige verify` runs for anybody's method; the broken copies are in
tests/support/mutants.py. The engine as it is passes all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutants import MUTANTS
from vestige.audit import lots_check, noise_check
from vestige.audit.observation import observe
from vestige.audit.verify import CHECKS, verify
from vestige.methods import DPSGD, METHODS, Kalman, resolve

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
# Those that must be there, whatever else is.
DEMANDED = (
    "noise halved",
    "noise scaled by beta twice",
    "clipped after the sum",
    "divisor len(lot)",
    "an empty lot skipped",
    "a gate that reads the current sum (fo)",
    "a gate that reads the current sum (sma)",
    "history of raw sums (fo)",
    "history of raw sums (sma)",
    "marginal sigma/beta accounted for three groups",
    "noise seed reused after resume (dp-sgd)",
    "noise seed reused after resume (fo)",
    "per-layer C not split",
    "rows read batch-major, whatever their order is",
    "rows that were sorted or turned round not put back",
    "the self-check switched off",
)


def caught_by(mutant, monkeypatch, quick=True):
    """The checks that notice the mutant, with the kinds of their findings."""
    mutant.break_it(monkeypatch)
    found = verify(resolve(mutant.method), seed=1, quick=quick, clipping=mutant.clipping)
    return {r.check: {f.what for f in r.findings} for r in found.reports if r.findings}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_mutant_is_caught_by_the_checks_that_are_named_for_it(name, monkeypatch):
    mutant = BY_NAME[name]
    found = caught_by(mutant, monkeypatch)
    assert set(found) == set(mutant.caught)
    for check, what in mutant.caught.items():
        assert what in found[check]


@pytest.mark.parametrize("place", range(len({(str(m.method), str(m.clipping)) for m in MUTANTS})))
def test_what_is_not_broken_passes_every_check(place):
    different = {(str(m.method), str(m.clipping)): m for m in MUTANTS}
    mutant = list(different.values())[place]
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


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.private])
def test_noise_and_lots_of_every_private_method_are_as_charged(name):
    seen = noise_check.observations(resolve(name), steps=20, seed=2)
    assert [str(finding) for finding in noise_check.examine(seen).findings] == []
    assert [str(finding) for finding in lots_check.examine(seen[0]).findings] == []


def test_methods_without_a_guarantee_have_no_charge_to_measure_against():
    for name in (name for name, m in METHODS.items() if not m.private):
        seen = noise_check.observations(resolve(name), steps=4, seed=2)
        report = noise_check.examine(seen)
        assert report.passed and "no guarantee" in report.not_applicable


def test_noise_by_group_is_measured_where_there_are_groups():
    both = noise_check.observations(Kalman(), steps=6, seed=2)
    assert [one.setting.groups for one in both] == [0, 3]
    stds = both[1].whole.looks[0].stds
    assert len(set(stds)) == 3  # each group has its own
    assert len(noise_check.observations(DPSGD(), steps=6, seed=2)) == 1


def test_an_observation_repeats_with_its_seed_and_not_without():
    first, second, other = (observe(DPSGD(), steps=4, seed=s).whole.looks for s in (3, 3, None))
    assert first[3].values.equal(second[3].values)
    assert not first[3].values.equal(other[3].values)


def test_the_resumed_run_shares_its_past_and_nothing_else():
    seen = observe(DPSGD(), steps=8, seed=3)
    assert len(seen.whole.looks) == 8 and len(seen.resumed.looks) == 4
    later = [look for look in seen.whole.looks if look.step >= 4]
    for ours, theirs in zip(later, seen.resumed.looks, strict=True):
        assert (ours.step, ours.lot) == (theirs.step, theirs.lot)
        assert not ours.noise.equal(theirs.noise)
    assert seen.forgotten == 0


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


@pytest.mark.slow
def test_false_alarms_come_at_most_at_their_declared_rate():
    """At a rate of 0.2, of 120 right runs more than 44 alarms have a chance below 1e-4."""
    alarms = {"noise": 0, "lots": 0}
    for seed in range(120):
        seen = observe(DPSGD(), steps=40, seed=seed)
        alarms["noise"] += not noise_check.examine([seen], false_alarm=0.2).passed
        alarms["lots"] += not lots_check.examine(seen, false_alarm=0.2).passed
    assert max(alarms.values()) <= 44
    assert alarms["noise"] >= 5  # and the test is not asleep: fewer have a chance below 1e-4
