"""Criterions that are handed over are walked to their parts."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.loss_runs import (
    WEIGHTS,
    Temperature,
    Tokens,
    clipped_sum,
    data,
    of_first_position,
)
from vestige import ConfigError
from vestige.engine.validation import check_criterion


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.ModuleDict({"loss": inner})

    def forward(self, scores, y):
        return self.inner["loss"](scores, y)


def closure(inner):
    return lambda scores, y: inner(scores, y)


CRITERIONS = {
    "wrapped": (Wrapped(nn.CrossEntropyLoss(weight=WEIGHTS)), "class weights"),
    "twice": (Wrapped(Wrapped(nn.NLLLoss(weight=WEIGHTS))), "class weights"),
    "ignored": (Wrapped(nn.CrossEntropyLoss(ignore_index=0)), "ignore_index=0"),
    "partial": (functools.partial(F.cross_entropy, weight=WEIGHTS), "class weights"),
    "partial, ignored": (functools.partial(F.nll_loss, ignore_index=0), "ignore_index=0"),
    "closure": (closure(nn.CrossEntropyLoss(weight=WEIGHTS)), "class weights"),
    "method": (Wrapped(nn.CrossEntropyLoss(weight=WEIGHTS)).forward, "class weights"),
    "trained": (Temperature(), "trains parameters of its own"),
    "trained inside": (Wrapped(Temperature()), "trains parameters of its own"),
    "trained tensor": (closure(functools.partial(torch.mul, torch.ones(3, requires_grad=True))),
                       "trains a tensor"),
    "adaptive": (nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4]), "trains parameters of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRITERIONS)
def test_a_criterion_is_walked_to_its_parts(name):
    criterion, said = CRITERIONS[name]
    with pytest.raises(ConfigError, match=said):
        clipped_sum(data(), of_first_position, criterion=criterion)


def test_harmless_criterions_pass():
    model = Tokens()
    for criterion in (
        Wrapped(nn.CrossEntropyLoss()),
        Wrapped(nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none")),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        Temperature().requires_grad_(False),
        closure(model),
    ):
        check_criterion(criterion, "mean", model)
