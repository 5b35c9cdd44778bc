"""One panel of a direction study: its points, and its smaller copy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vestige.lab.sweeps import Sweep

FIXED = {"batch": 64, "sigma": 1.0}


def test_the_varied_setting_takes_each_value() -> None:
    sweep = Sweep(name="a", varied="dimension", values=[100, 200], fixed=FIXED)
    assert [point["dimension"] for point in sweep.points()] == [100, 200]
    assert all(point.items() >= FIXED.items() for point in sweep.points())


def test_a_smaller_copy_never_goes_below_two_and_has_each_value_once() -> None:
    sweep = Sweep(name="a", varied="dimension", values=[10, 20, 400], fixed=FIXED)
    small = sweep.quickened({"dimension": 100, "batch": 8}, {"sigma": 2.0})
    assert small.values == [2, 4]
    assert small.fixed == {"batch": 8, "sigma": 2.0}


def test_what_varies_is_not_fixed() -> None:
    with pytest.raises(ValidationError, match="'batch', which varies"):
        Sweep(name="a", varied="batch", values=[1, 2], fixed=FIXED)
