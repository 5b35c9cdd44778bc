"""What following the rows costs: the self-check once, the labels in every step.

    python -m benchmarks.watch --device cuda > benchmarks/results/watch-cuda.json

The self-check is the first step with it minus the first step without it, of the same model in one
process. The labels are the time inside the tracker, with the clock's own cost left in.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import CPU, CUDA, Workload
from vestige import PrivacyEngine
from vestige.gradients.tracker import Tracker

_PARTS = ("begin", "before", "follow", "check_kept")


def steps(workload: Workload, device: str, count: int, private: bool, check: bool) -> list[float]:
    """The seconds of `count` training steps."""
    model, x, y = workload.make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = [(x, y)]
    if private:
        _, _, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=1.0,
            clipping="per_layer",
            self_check=check,
        )
    seconds = []
    for _ in range(count):
        for inputs, labels in loader:
            _wait(device)
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_the_tracker(workload: Workload, device: str, count: int) -> float:
    """The seconds a step that labels take."""
    spent, originals = [0.0], {name: getattr(Tracker, name) for name in _PARTS}

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    try:
        for name, call in originals.items():
            setattr(Tracker, name, timed(call))
        steps(workload, device, count, private=True, check=False)
    finally:
        for name, call in originals.items():
            setattr(Tracker, name, call)
    return spent[0] / count


def measure(workload: Workload, device: str, count: int) -> dict[str, float]:
    """Both costs, in milliseconds and in steps."""
    for private in (False, True):  # kernels are loaded once for all
        steps(workload, device, 2, private, check=True)
    ordinary = median(steps(workload, device, count, private=False, check=False)[1:])
    unchecked = steps(workload, device, count, private=True, check=False)
    private = median(unchecked[1:])
    firsts = [steps(workload, device, 1, private=True, check=True)[0] for _ in range(3)]
    check = median(firsts) - unchecked[0]
    labels = in_the_tracker(workload, device, count)
    return {
        "lot": workload.lot,
        "ordinary_ms": 1e3 * ordinary,
        "private_ms": 1e3 * private,
        "self_check_ms": 1e3 * check,
        "self_check_in_ordinary_steps": check / ordinary,
        "self_check_in_private_steps": check / private,
        "labels_ms": 1e3 * labels,
        "labels_share": labels / private,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for workload in CUDA if given.device == "cuda" else CPU:
        found[workload.model] = measure(workload, given.device, given.steps)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
