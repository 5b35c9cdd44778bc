"""The catalogue: one row per method, complete, and free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vestige.methods import METHODS, MethodInfo, register, resolve
from vestige.methods.method import Method


def test_reading_it_imports_no_torch():
    program = (
        "import sys\n"
        "from vestige.methods import METHODS\n"
        "print(len(METHODS), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["30", "False"]


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_complete_and_leads_to_its_class(name):
    row = METHODS[name]
    method = resolve(name)
    assert row.name == name and issubclass(row.load(), Method)
    assert method.info is row and method.name == name
    assert row.summary and row.paper and row.guarantee
    assert (row.proof or not row.private) and row.touches in (1, 2) and row.default_lr > 0
    assert row.guarantee.startswith("proven" if row.private else "not private")
    assert row.load().__doc__


def test_a_proof_survives_without_docstrings():
    program = "from vestige.methods import METHODS; print(METHODS['fo'].proof)"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == METHODS["fo"].proof


def test_a_method_is_registered_by_its_row(monkeypatch):
    class Mine(Method):
        info = MethodInfo(name="mine", guarantee="proven: elsewhere")

    monkeypatch.setattr("vestige.methods.catalogue.METHODS", dict(METHODS))
    register(MethodInfo(name="mine", home=Mine))
    from vestige.methods import catalogue

    assert catalogue.METHODS["mine"].load() is Mine and "mine" not in METHODS
