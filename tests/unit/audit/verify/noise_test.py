"""The law of the noise against the ledger, for every method."""

from __future__ import annotations

import pytest

from vestige.audit.verify import lots, noise
from vestige.audit.verify.runs import observe
from vestige.methods import (
    DPSGD,
    METHODS,
    Kalman,
    resolve,
)


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.private])
def test_noise_and_lots_of_every_private_method_are_as_charged(name):
    seen = noise.observations(resolve(name), steps=20, seed=2)
    assert [str(finding) for finding in noise.examine(seen).findings] == []
    assert [str(finding) for finding in lots.examine(seen[0]).findings] == []


def test_methods_without_a_guarantee_have_no_charge_to_measure_against():
    for name in (name for name, m in METHODS.items() if not m.private):
        seen = noise.observations(resolve(name), steps=4, seed=2)
        report = noise.examine(seen)
        assert report.passed and "no guarantee" in report.not_applicable


def test_noise_by_group_is_measured_where_there_are_groups():
    both = noise.observations(Kalman(), steps=6, seed=2)
    assert [one.setting.groups for one in both] == [0, 3]
    stds = both[1].whole.looks[0].stds
    assert len(set(stds)) == 3  # each group has its own
    assert len(noise.observations(DPSGD(), steps=6, seed=2)) == 1


@pytest.mark.slow
def test_false_alarms_come_at_most_at_their_declared_rate():
    """At a rate of 0.2, of 120 right runs more than 44 alarms have a chance below 1e-4."""
    alarms = {"noise": 0, "lots": 0}
    for seed in range(120):
        seen = observe(DPSGD(), steps=40, seed=seed)
        alarms["noise"] += not noise.examine([seen], false_alarm=0.2).passed
        alarms["lots"] += not lots.examine(seen, false_alarm=0.2).passed
    assert max(alarms.values()) <= 44
    assert alarms["noise"] >= 5  # and the test is not asleep: fewer have a chance below 1e-4
