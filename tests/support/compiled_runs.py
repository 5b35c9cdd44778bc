"""Runs of one model with and without compile=True, lot by lot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.gradients.compiled import Compiled

N, LOT = 48, 8


class Lots(NamedTuple):
    """What a run has done: the sums of its lots, the last weights, and which lots ran compiled."""

    sums: list[Tensor]
    weights: Tensor
    by_graph: list[bool]
    rows: list[int]
    compiled: Compiled | None


def private(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Any:
    """The engine, the model, its optimizer and the loader, with repeatable lots and noise."""
    engine = PrivacyEngine("rdp", **{"noise_seed": options.pop("noise_seed", 4)})
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=LOT),
        noise_multiplier=0.8,
        max_grad_norm=0.5,
        **options,
    )
    return engine, *made


def lots(
    make: Callable[[], nn.Module],
    x: Tensor,
    steps: int = 5,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
    **options: Any,
) -> Lots:
    """Train the model for a few steps; `before(model, step)` is called before every lot."""
    torch.manual_seed(1)
    model = make()
    y = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2)).to(x.device)
    engine, model, optimizer, loader = private(model, x, y, **options)
    capture, sums, by_graph, rows = engine._run.capture, [], [], []
    while len(sums) < steps:
        for inputs, targets in loader:
            before(model, len(sums))
            loss = F.cross_entropy(model(inputs), targets)
            by_graph.append(bool(capture.numbered))
            rows.append(len(inputs))
            loss.backward()
            sums.append(capture.collector.total.clone())
            optimizer.step()
            if len(sums) == steps:
                break
    compiled = engine._run.ways.compiled
    engine.detach()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Lots(sums, weights, by_graph, rows, compiled)


def apart(one: Lots, other: Lots) -> float:
    """The largest relative difference of two runs' sums and weights."""
    pairs = [*zip(one.sums, other.sums, strict=True), (one.weights, other.weights)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)
