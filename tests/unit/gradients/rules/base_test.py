"""The table of rules: what is registered, and that the zoo of models has tests for all of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.zoo import BY_RULE, zoo
from vestige.gradients.rules import RULES
from vestige.gradients.rules.base import rule


def test_a_rule_is_registered_for_every_function_that_it_names(monkeypatch):
    monkeypatch.setattr("vestige.gradients.rules.base.RULES", table := {})

    @rule(torch.sin, torch.cos)
    def wave(capture, function, x):
        return NotImplemented

    assert table == {torch.sin: wave, torch.cos: wave}


def test_the_common_layers_are_covered():
    covered = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.group_norm, F.embedding}
    assert covered | {torch.matmul, torch.einsum, torch.lstm, torch.Tensor.expand} <= set(RULES)


def test_every_model_of_the_zoo_is_held_against_the_loop_once():
    assert sorted(name for names in BY_RULE.values() for name in names) == sorted(zoo())
