"""`python -m benchmarks.mlp_step`: where the time of an MLP step goes, ordinary and private.

Both loops run in turn in one process; figures are medians in milliseconds over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import CPU
from vestige import PrivacyEngine
from vestige.release.door import Door

ROUNDS, WARM_UP = 500, 50


def main() -> None:
    """Time the sections of both loops and print one line for each."""
    torch.set_num_threads(2)
    spent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    release = Door.release

    def timed_release(self, *args, **kwargs):
        start = time.perf_counter()
        out = release(self, *args, **kwargs)
        spent["vestige per-layer"]["of which release"].append(time.perf_counter() - start)
        return out

    Door.release = timed_release
    plain, x, y = CPU[0].make("cpu")
    ordinary = torch.optim.SGD(plain.parameters(), lr=0.1)
    private, _, _ = CPU[0].make("cpu")
    private, optimizer, loader = PrivacyEngine().make_private(
        module=private,
        optimizer=torch.optim.SGD(private.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="per_layer",
    )
    for _ in range(ROUNDS):
        for a, b in loader:  # one lot of constant size
            step(spent["vestige per-layer"], private, optimizer, a, b)
        step(spent["plain"], plain, ordinary, x, y)
    for name, sections in spent.items():
        figures = [f"{k} {1e3 * statistics.median(v[WARM_UP:]):.2f}" for k, v in sections.items()]
        print(f"{name}: " + ", ".join(figures) + " ms")


def step(spent, model, optimizer, x, y) -> None:
    """One step of an ordinary loop, its sections added to `spent`."""
    times = [time.perf_counter()]
    optimizer.zero_grad()
    out = model(x)
    times.append(time.perf_counter())
    loss = nn.functional.cross_entropy(out, y)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    for name, start, end in zip(
        ("forward", "loss", "backward", "step"), times, times[1:], strict=False
    ):
        spent[name].append(end - start)


if __name__ == "__main__":
    main()
