"""How numbers are written."""

from __future__ import annotations

from vestige.lab.wording import cell, images, number, plain_cell, settings, weak


def test_a_large_epsilon_is_said_to_protect_little() -> None:
    assert weak(9.99) is None and weak(None) is None and "protects little" in str(weak(17.44))


def test_names_and_values() -> None:
    values = {"dataset": "cifar10", "noise_multiplier": 1.5, "lot": 2000}
    assert cell(values) == "CIFAR-10, sigma 1.5, lot 2,000"
    assert plain_cell(values) == "cifar10, sigma 1.5, lot 2,000"
    notes = {"cifar10": "half of it", "svhn": "cut again"}
    assert cell(values, notes) == "CIFAR-10 (half of it), sigma 1.5, lot 2,000"
    assert plain_cell({"dataset": "svhn"}, notes) == "svhn (cut again)"
    assert settings({"a": True, "b": [1, 2.5], "c": None}) == "a yes, b [1, 2.5], c -"
    assert settings({}) == "-" and number(None) == "-" and number(0.25, ".1f") == "0.2"
    assert images((5000, 7000)) == "5,000 to 6,999"
