"""How many functions of the library one training step goes through, and in how many files.

    python -m benchmarks.walk            dp-sgd
    python -m benchmarks.walk sma        another method
    python -m benchmarks.walk --list     and the walk itself, in order

The step is one lot of a two-layer network, from the loader to the end of optimizer.step(), in the
middle of a run. Comprehensions and lambdas count with the function that they stand in.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from vestige import PrivacyEngine
from vestige.methods import resolve

ROOT = str(Path(vestige.__file__).parent)
INNER = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


def walk(method: str, before: int = 5) -> list[tuple[str, str]]:
    """The calls of one step as (file, function), in order, after `before` others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 4, (64,)))
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=resolve(method).make_optimizer(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        steps=100,
    )
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in INNER:
            calls.append((code.co_filename[len(ROOT) + 1 :], code.co_qualname))

    batches = iter(loader)
    for _ in range(before):
        step(model, optimizer, *next(batches))
    sys.setprofile(note)
    try:
        step(model, optimizer, *next(batches))
    finally:
        sys.setprofile(None)
    return calls


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
    """What the user's loop does with a batch."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("methods", nargs="*", default=["dp-sgd", "sma"])
    parser.add_argument("--list", action="store_true", help="print the functions, in order")
    options = parser.parse_args()
    for method in options.methods:
        calls = walk(method)
        files = {file for file, _ in calls}
        changes = sum(a[0] != b[0] for a, b in itertools.pairwise(calls))
        print(
            f"{method}: {len(set(calls))} functions in {len(files)} files, {len(calls)} calls, "
            f"{changes} changes of file"
        )
        if options.list:
            for file, function in dict.fromkeys(calls):
                print(f"  {file:<36}{function}")


if __name__ == "__main__":
    main()
