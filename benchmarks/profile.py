"""Where the time of an engine's step goes: the longest operations, and how much is launched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.engines import Engine
from benchmarks.timing import wait
from benchmarks.workloads import Workload

STEPS = 3


def profile(workload: Workload, device: str, engine: Engine) -> str:
    """The operations of three steps that take longest, on the device and on the host."""
    with workload.products():
        loop = engine.build(workload, device)
        for _ in range(2 * engine.warm_up):
            next(loop)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as seen:
            for _ in range(2 * STEPS):
                next(loop)
            wait(device)
    averages = seen.key_averages()
    host = averages.table("self_cpu_time_total", row_limit=25, max_name_column_width=50)
    if device == "cpu":
        return f"{host}"
    on_device = averages.table("self_cuda_time_total", row_limit=30, max_name_column_width=60)
    return f"{on_device}\n{host}\n{launches(averages)} launches in {STEPS} steps"


def launches(averages: Iterable[Any]) -> int:
    """How often something was launched: kernels by either interface, together or in a graph."""
    return sum(e.count for e in averages if e.key.startswith("cu") and "Launch" in e.key)
