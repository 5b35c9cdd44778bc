"""SIGKILL at random moments, inside writes too: nothing is lost, nothing is understated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# One of each kind: memory, spectrum, two looks, measured normaliser, moments, correlated noise.
KINDS = ("fo", "sma", "dp-sam", "dp-is", "dp-adambc", "fractional-noise")


def kill_and_resume(folder, kills, seed, *methods):
    command = [
        sys.executable,
        "-m",
        "tests.support.crashes",
        str(folder),
        str(kills),
        str(seed),
        *methods,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_three_kills_are_survived(tmp_path):
    """Weights equal to the uninterrupted run's, epsilon not below, the ledger never damaged."""
    (found,) = kill_and_resume(tmp_path, 3, 0, "fo")
    assert found["problems"] == []
    assert found["kills"] == 3


@pytest.mark.slow
@pytest.mark.audit
def test_thirty_kills_are_survived(tmp_path):
    found = kill_and_resume(tmp_path, 5, 1, *KINDS)
    print(*found, sep="\n")
    assert [f["problems"] for f in found] == [[]] * len(KINDS)
    assert sum(f["kills"] for f in found) == 30
    assert sum(f["torn"] for f in found) > 0, "no kill fell into a write of the ledger"
