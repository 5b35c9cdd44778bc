"""The examples run as they stand, and what they teach is true."""

from __future__ import annotations

import importlib
import math
import sys

import pytest

from tests.support.small_runs import SIGMA, private, run
from vestige.audit.verify.verdict import verify
from vestige.methods import METHODS


@pytest.fixture
def last_two():
    """The method of examples/own_method.py, registered for one test."""
    method = importlib.import_module("examples.own_method").LastTwo
    yield method
    METHODS.pop("last-two")
    sys.modules.pop("examples.own_method")


def test_a_method_of_ones_own_is_known_by_its_name_and_charged_like_every_memory(last_two):
    assert METHODS["last-two"].load() is last_two
    engine, *rest = private("last-two", steps=4)
    run(engine, *rest, 4)
    (event,) = engine.ledger.merged()
    assert math.isclose(event.noise_multiplier, SIGMA / 0.9) and event.count == 4
    assert engine.diagnostics()["weights"][0][:2] == pytest.approx([0.7, 0.3])
    assert "as for FO-DP-SGD" in engine.statement(1e-5)["mechanism"]["text"]


def test_it_passes_every_check(last_two):
    assert verify(last_two(), seed=1, quick=True).passed
