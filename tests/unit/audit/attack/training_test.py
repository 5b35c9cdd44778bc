"""The attacked run is the one that it would be without the attack."""

from __future__ import annotations

import torch

from tests.support.audits import (
    observed,
)
from vestige.audit.attack.canaries import Canaries
from vestige.audit.attack.training import attack, coins
from vestige.audit.options import AuditOptions
from vestige.audit.tape import Tape


def test_the_attack_changes_nothing_and_leaves_nobody_at_the_door(monkeypatch):
    def weights():
        options = AuditOptions(method="fo", noise_multiplier=1.0, trials=100, steps=4, seed=2)
        target = Canaries.tossed(100, coins(options), False).target(options)
        run = attack(options, target, 1.0)
        assert run.engine.door.observers == []
        return len(run.recording.looks), torch.cat([p.flatten() for p in target.model.parameters()])

    looks, heard = weights()
    monkeypatch.setattr(Tape, "__enter__", lambda tape: tape)
    monkeypatch.setattr(Tape, "__exit__", lambda tape, *_: None)
    none, unheard = weights()
    assert (looks, none) == (4, 0)
    assert torch.equal(heard, unheard)


def test_an_attacker_has_no_sums():
    _, _, run = observed("fo", 1.0, trials=100, steps=2)
    assert [look.total.numel() for look in run.recording.looks] == [0, 0]
    look = run.recording.looks[1]
    assert torch.equal(look.without_branch, look.values - look.branch)
