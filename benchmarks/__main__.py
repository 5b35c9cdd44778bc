"""`python -m benchmarks`: step times of every engine, interleaved in one process, and peak memory.

A round runs one step of each engine in turn, so that a slow moment of the machine hits all of them;
figures are medians over the rounds. Memory is measured in a process of its own per engine: the peak
resident size over three steps, less the size after imports (on a GPU, the allocator's peak).
Batches are drawn outside the timed region.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import peak_mebibytes
from benchmarks.workloads import CPU, CUDA, ENGINES, SAME_CLIPPING, Workload


def time_engines(
    workload: Workload, device: str, rounds: int, names: list[str]
) -> dict[str, list[float]]:
    """Seconds of every timed step, engine by engine, interleaved."""
    loops = {name: ENGINES[name](workload, device) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds + 2):  # two rounds of warming up
        for name, loop in loops.items():
            next(loop)
            _wait(device)
            start = time.perf_counter()
            next(loop)
            _wait(device)
            if r >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    workload: Workload, device: str, rounds: int, names: list[str], memory: bool
) -> list[dict[str, Any]]:
    """One row per engine."""
    seconds = time_engines(workload, device, rounds, names)
    plain = statistics.median(seconds["plain"])
    rows = []
    for name in names:
        median = statistics.median(seconds[name])
        base = SAME_CLIPPING.get(name)
        rows.append(
            {
                "model": workload.model,
                "lot": workload.lot,
                "engine": name,
                "milliseconds": 1e3 * median,
                "ratio": _ratio(seconds[name], seconds["plain"]),
                "over_dp_sgd": _ratio(seconds[name], seconds[base]) if base in seconds else None,
                "ratio_of_medians": median / plain,
                "rounds": rounds,
                "peak_mib": peak_mebibytes(workload, device, name) if memory else None,
            }
        )
    return rows


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Each round compares neighbours in time; the median ignores slow moments."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model, lot | engine | step, ms | over plain | over DP-SGD | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        extra = "" if row["over_dp_sgd"] is None else f"{row['over_dp_sgd']:.3f}"
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        lines.append(
            f"| {row['model']}, {row['lot']} | {row['engine']} | {row['milliseconds']:.2f} "
            f"| {row['ratio']:.2f} | {extra} | {peak} |"
        )
    return "\n".join(lines)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Parse, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="*", help="only these models")
    parser.add_argument("--engines", nargs="*", help="only these engines (plain is always run)")
    parser.add_argument("--rounds", type=int, help="rounds per model (default: by size)")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: benchmarks/results/DEVICE.json)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    names = [n for n in ENGINES if not options.engines or n in ("plain", *options.engines)]
    rows: list[dict[str, Any]] = []
    for workload in CPU if options.device == "cpu" else CUDA:
        if options.models and workload.model not in options.models:
            continue
        default = {"mlp": 150, "cnn": 15, "resnet18": 15} if options.device == "cpu" else {}
        rounds = options.rounds or default.get(workload.model, 40)
        print(f"{workload.model}, lot {workload.lot}: {rounds} rounds ...", file=sys.stderr)
        rows += measure(workload, options.device, rounds, names, not options.no_memory)
    print(table(rows))
    out = options.out or Path(__file__).parent / "results" / f"{options.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(options.device), "rows": rows}, indent=1) + "\n")
    print(f"\nwritten to {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
