"""Peak memory of one engine on one workload, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.workloads import CPU, CUDA, ENGINES, Workload

STEPS = 3


def peak_mebibytes(workload: Workload, device: str, engine: str) -> float | None:
    """What three steps add to a process that has its imports done; None if the engine failed."""
    command = [sys.executable, "-m", "benchmarks.memory", workload.model, device, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(json.loads(done.stdout)) if done.returncode == 0 else None


def _resident_peak() -> float:
    """VmHWM in MiB. (getrusage would also count the parent's size at the fork.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Runs in the child: prints the peak in MiB."""
    model, device, engine = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    workload = next(w for w in (CPU if device == "cpu" else CUDA) if w.model == model)
    torch.zeros(8, 8, device=device) @ torch.zeros(8, 8, device=device)  # libraries load here
    before = _resident_peak()
    loop = ENGINES[engine](workload, device)
    for _ in range(STEPS):
        next(loop)
        next(loop)
    used = _resident_peak() - before
    if device == "cuda":
        used = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(used))


if __name__ == "__main__":
    main()
