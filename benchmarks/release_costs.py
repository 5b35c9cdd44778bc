"""`python -m benchmarks.release_costs`: what a process group of one adds to a release.

ResNet-18's weights and a last release of their size are compared, and the sum goes through an
all_reduce: CPU milliseconds (the best of 30, one thread) and calls of torch's operations, each of
which is a kernel or more on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import Workload
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.groups import partition
from vestige.parallel.fingerprints import fingerprints
from vestige.parallel.ranks import Ranks


class Calls(TorchDispatchMode):
    """Counts the operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """One operation."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def milliseconds(act: Callable[[], object], rounds: int = 30) -> float:
    """The least CPU time of `act`."""
    took = []
    for _ in range(rounds):
        began = time.process_time()
        act()
        took.append(time.process_time() - began)
    return min(took) * 1e3


def main() -> None:
    """Print a line for the fingerprints, and one for all that the group does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    meeting = tempfile.mkdtemp()
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{meeting}/meeting", rank=0, world_size=1)
    model = Workload("resnet18", 16).make(device)[0]
    collector = Collector(partition(model, "flat"), Clip((1.0,)))
    weights, ranks = list(model.parameters()), Ranks.found()
    ranks.carry(collector)
    seen = (weights, [torch.randn_like(collector.total)], 3, 4)
    for name, act in {
        "fingerprints": lambda: fingerprints(seen, collector.total),
        "the group": lambda: ranks.add_up(collector, seen),
    }.items():
        with Calls() as calls:
            act()
        print(f"{name}: {milliseconds(act):.2f} ms, {calls.count} operations")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
