"""The model is checked once for every way in which gradients are taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.small_runs import private
from vestige.engine import ways


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()

    def forward(self, x, scale=1.0):
        return self.layer(x) * scale


@pytest.mark.parametrize("options", [{}, {"self_check": False}])
def test_each_way_is_checked_once(monkeypatch, options):
    real, checked = ways.self_check, []
    monkeypatch.setattr(ways, "self_check", lambda *a: checked.append(a[1:3]) or real(*a))
    engine, model, optimizer, loader = private("dp-sgd", model=Two(), **options)
    for step, (x, y) in enumerate(loader):
        out = model(x) if step % 2 else model(x, scale=2.0)
        torch.nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
    assert [list(kwargs) for _, kwargs in checked] == ([] if options else [["scale"], []])
    said = any("not checked" in sentence for sentence in engine.caveats())
    assert said == bool(options)
