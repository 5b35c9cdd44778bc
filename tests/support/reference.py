"""Independent references: per-example gradients by a plain loop over single examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.zoo import cast, zoo
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import Groups, Partition, partition
from vestige.sampling.loader import Batch

Loss = Callable[[Any, Tensor], Tensor]


def squared_error(out: Any, target: Tensor) -> Tensor:
    """One loss per row, whatever the shape of the output."""
    return (out - target).square().flatten(1).sum(1)


def take(x: Tensor | tuple[Tensor, ...], rows: Any, axis: int = 0) -> Any:
    """Some rows of an input or of a tuple of inputs."""
    if isinstance(x, tuple):
        return tuple(take(t, rows, axis) for t in x)
    return x[rows] if axis == 0 else x[:, rows]


def call(model: nn.Module, x: Tensor | tuple[Tensor, ...]) -> Any:
    return model(*x) if isinstance(x, tuple) else model(x)


def loop_gradients(
    model: nn.Module,
    x: Tensor | tuple[Tensor, ...],
    cotangent: Tensor,
    groups: Groups,
    axis: int = 0,
    pick: Callable[[Any], Tensor] = lambda out: out,
) -> Tensor:
    """(n, P): row i's gradient of <cotangent_i, output_i>, one example at a time, by autograd."""
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    rows = []
    for i in range(cotangent.shape[axis]):
        one = slice(i, i + 1)
        out = pick(call(twin, take(x, one, axis)))
        wanted = [parameters[s.name] for s in groups.slots]
        grads = torch.autograd.grad(
            (out * take(cotangent, one, axis)).sum(), wanted, allow_unused=True
        )
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for g, p in zip(grads, wanted, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def clip_and_sum(gradients: Tensor, groups: Groups, clip: Clip) -> Tensor:
    """Clip each row of (n, P) group by group with a Python loop, and add up."""
    total = torch.zeros_like(gradients[0])
    for row in gradients:
        for segment, bound in zip(groups.segments(), clip.bounds, strict=True):
            part = row[segment]
            if torch.isfinite(part).all():
                total[segment] += part / max(1.0, float(part.norm()) / bound)
    return total


def captured_sum(
    model: nn.Module,
    x: Tensor | tuple[Tensor, ...],
    cotangent: Tensor,
    clipping: Partition = "flat",
    bounds: float | Sequence[float] = 1.0,
    physical: int | None = None,
    axis: int = 0,
    pick: Callable[[Any], Tensor] = lambda out: out,
    reduction: str = "sum",
    stability: float | None = None,
    unit_rows: int = 1,
    weights: Tensor | None = None,
) -> tuple[Tensor, Capture]:
    """The clipped sum that the engine computes, the lot arriving in physical batches."""
    groups = partition(model, clipping)
    clip = Clip.over(bounds, groups.names, stability)
    watch = Capture(model, groups, clip, batch_first=axis == 0)
    watch.mean_loss = reduction == "mean"
    watch.attach()
    n = cotangent.shape[axis]
    step = physical or n
    try:
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            of_batch = None if weights is None else weights[rows]
            count = rows.stop - rows.start
            watch.start(Batch(count, unit_rows=unit_rows, weights=of_batch))
            out = pick(call(model, take(x, rows, axis)))
            loss = (out * take(cotangent, rows, axis)).sum()
            if reduction == "mean":
                loss = loss / (rows.stop - rows.start)
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
    finally:
        watch.detach()
    return watch.collector.total.clone(), watch


def check_sum_of_zoo(name: str, clipping: Partition, physical: int | None) -> None:
    """The clipped sum of a model of the zoo equals that of a loop over single examples."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        model, x, pick = zoo()[name]
        model, x = model.to(dtype), cast(x, dtype)
        groups = partition(model, clipping)
        cotangent = torch.randn_like(pick(call(model, x)))
        gradients = loop_gradients(model, x, cotangent, groups, pick=pick)
        bound = float(gradients.norm(dim=1).median())  # about half of the examples are clipped
        expected = clip_and_sum(gradients, groups, Clip.over(bound, groups.names))
        got, _ = captured_sum(model, x, cotangent, clipping, bound, physical, pick=pick)
        assert got.dtype == dtype
        assert (got - expected).norm() <= tolerance * expected.norm()
