"""`python -m benchmarks.release_costs`: what a process group of one adds to a release.

ResNet-18's weights and a last release of their size are compared, and the sum goes through an
all_reduce: CPU milliseconds (the best of 30, one thread) and calls of torch's operations, each of
which is a kernel or more on a GPU. And how much noise ranks make of a model in shards, where it is
made in blocks.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import GPT2
from benchmarks.workloads import Workload
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.groups import partition
from vestige.gradients.shards import dealt
from vestige.parallel.fingerprints import fingerprints
from vestige.parallel.ranks import Ranks
from vestige.sampling.normals import Held


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


def excess(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Numbers of noise that the fullest rank makes on a CPU, over an equal part of a release."""
    total, made = sum(map(math.prod, shapes)), []
    for rank in range(world):
        ranges, start = [], 0
        for shape in shapes:
            row = math.prod(shape[1:])
            first, last = dealt(shape[0], world, rank)
            if first < last:
                ranges.append((start + first * row, start + last * row))
            start += math.prod(shape)
        blocks = {piece[1:3] for piece in Held(total, tuple(ranges)).blocks()}
        made.append(sum(size for _, size in blocks))
    return max(made) / (total / world)


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
    ranks.thorough = True
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
    for name, kind in {"ResNet-18": model, "GPT-2": GPT2()}.items():
        shapes = [tuple(p.shape) for p in kind.parameters()]
        more = ", ".join(f"{excess(shapes, world):.1f} on {world}" for world in (2, 8))
        print(f"noise of {name} in shards, times a rank's part: {more}")


if __name__ == "__main__":
    main()
