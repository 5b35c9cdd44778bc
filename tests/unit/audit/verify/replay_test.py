"""The replay: what it compares, bit for bit."""

from __future__ import annotations

import math

import torch

from vestige.audit.verify import verify
from vestige.audit.verify.replay import same
from vestige.engine.run import Run


def test_a_run_that_stops_on_the_neighbour_alone_is_a_finding(monkeypatch):

    original = Run._release

    def short(self):
        original(self)
        if self.lots.size < self.plan.dataset_size:
            raise RuntimeError("there is a record less")

    monkeypatch.setattr(Run, "_release", short)
    (finding,) = verify("dp-sgd", checks=["replay"]).findings
    assert finding.what == "error on one side" and "there is a record less" in str(finding)


def test_same_is_bit_for_bit():
    one = torch.tensor([1.0, math.nan])
    assert same(one, one.clone()) and not same(one, torch.tensor([1.0, 2.0]))
    assert not same(torch.zeros(2), torch.zeros(3)) and not same(None, torch.zeros(1))
    assert same({"a": [1, math.nan, None]}, {"a": [1, math.nan, None]})
    assert not same({"a": 1}, {"b": 1}) and not same([1.0], [1.0, 2.0]) and not same(1, 1.0)
