"""Peak memory of one engine on one case on a CPU, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.cases import sections
from benchmarks.engines import ENGINES

STEPS = 3


def peak_mebibytes(section: str, case: str, engine: str) -> float | None:
    """What three steps add to a process that has its imports done; None if the engine failed."""
    command = [sys.executable, "-m", "benchmarks.memory", section, case, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(json.loads(done.stdout)) if done.returncode == 0 else None


def _resident_peak() -> float:
    """VmHWM in MiB. (getrusage would also count the parent's size at the fork.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Runs in the child: prints the peak in MiB."""
    section, name, engine = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    case = next(case for case in sections("cpu")[section] if case.name == name)
    torch.zeros(8, 8) @ torch.zeros(8, 8)  # libraries load here
    before = _resident_peak()
    loop = ENGINES[engine].build(case.workload, "cpu")
    for _ in range(2 * STEPS):
        next(loop)
    print(json.dumps(_resident_peak() - before))


if __name__ == "__main__":
    main()
