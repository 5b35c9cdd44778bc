"""Before training: does row i give the same gradient in a batch as alone?

The model runs on a few synthetic rows (random numbers of the right shape, never the data) and on
each of them by itself. If the outputs or the clipped sums differ, examples meet somewhere: a
cross-example operation, a batch axis in the wrong place, or rows flattened in an unexpected order.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vestige.clipping import Clip
from vestige.errors import PrivacyError, VestigeError
from vestige.gradients.capture import Batch, Capture
from vestige.gradients.collector import Collector

# Far below any gradient, so that every row is clipped and the sum shows how rows were told apart.
_BOUND = 1e-12


def self_check(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> bool:
    """Whether rows were shown to be independent; PrivacyError if they were shown not to be.

    False (with a warning) where the model does not run on synthetic rows.
    """
    with _aside(capture), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rows = _row_count((args, kwargs))
        inputs = _synthetic((args, kwargs), capture, rows)
        if inputs is None:
            return False
        try:
            capture.learning = True
            together, outputs = _run(capture, inputs, rows, slice(None), None)
        except VestigeError:
            raise
        except Exception as error:
            warnings.warn(
                "the self-check was skipped because the model does not run on synthetic rows "
                f"({type(error).__name__}: {error}). That its examples do not mix is unchecked.",
                UserWarning,
                stacklevel=2,
            )
            return False
        finally:
            capture.learning = False
        if not outputs:
            return False
        alone = torch.zeros_like(together)
        for i in range(rows):
            total, single = _run(capture, inputs, rows, slice(i, i + 1), outputs)
            alone += total
            for (out, _), (one, _) in zip(outputs, single, strict=True):
                _compare(out.narrow(capture.axis, i, 1), one, "output", 1e-3)
        # Rounding may flip a max or a relu near zero, which moves a gradient a little.
        _compare(together, alone, "gradient", 0.05)
    return True


@contextmanager
def _aside(capture: Capture) -> Iterator[None]:
    """Run with a collector of its own and without dropout, and put everything back."""
    kept = (capture.collector, capture.batch, capture.mean_loss, capture.unfold)
    training = [(m, m.training) for m in capture.module.modules()]
    groups = capture.groups
    capture.collector = Collector(groups, Clip((_BOUND,) * groups.count))
    capture.mean_loss, capture.unfold = False, True
    for module, _ in training:
        module.training = False
    try:
        yield
    finally:
        capture.stop_watching()
        capture.collector, capture.batch, capture.mean_loss, capture.unfold = kept
        for module, flag in training:
            module.training = flag


def _row_count(inputs: Any) -> int:
    """A small number that no axis of the inputs has, so that no shape agrees by chance."""
    sizes = {s for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) for s in t.shape}
    return next(n for n in itertools.count(3) if n not in sizes)


def _synthetic(inputs: Any, capture: Capture, count: int) -> Any:
    """The inputs with their rows replaced by `count` random ones, None if they have no rows."""
    rows = capture.count_rows(*inputs)
    found = False

    def fake(value: Any) -> Any:
        nonlocal found
        axis = capture.axis
        if not isinstance(value, Tensor) or value.ndim <= axis or value.shape[axis] != rows:
            return value
        found = True
        shape = list(value.shape)
        shape[axis] = count
        if value.is_floating_point():
            return torch.randn(shape).to(value)
        if value.dtype == torch.bool:  # a mask: nothing is masked
            return value.new_zeros(shape)
        return torch.randint(0, 2, shape).to(value)

    faked = pytree.tree_map(fake, inputs)
    return faked if found else None


Outputs = list[tuple[Tensor, Tensor]]  # output and its random cotangent


def _run(
    capture: Capture, inputs: Any, whole: int, rows: slice, given: Outputs | None
) -> tuple[Tensor, Outputs]:
    """The clipped sum of some of the synthetic rows, and the outputs with their cotangents."""
    axis, count = capture.axis, len(range(whole)[rows])

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == whole:
            return value[rows] if axis == 0 else value[:, rows]
        return value

    args, kwargs = pytree.tree_map(take, inputs)
    capture.collector.clear()
    capture.start(Batch(count))
    with torch.enable_grad():
        found = capture.module(*args, **kwargs)
        leaves = [
            t
            for t in pytree.tree_leaves(found)
            if isinstance(t, Tensor)
            and t.requires_grad
            and t.ndim > axis
            and t.shape[axis] == count
            and t.is_floating_point()
        ]
        if given is None:
            outputs = [(t.detach(), torch.randn(t.shape).to(t)) for t in leaves]
        else:
            if len(leaves) != len(given):
                raise PrivacyError(
                    "the model gives a different number of batched outputs for one row than for "
                    f"{whole}: it must treat every example on its own."
                )
            outputs = [(t.detach(), take(g)) for t, (_, g) in zip(leaves, given, strict=True)]
        if not leaves:
            return capture.collector.total, []
        torch.autograd.backward(leaves, [g for _, g in outputs])
    return capture.collector.total.clone(), outputs


def _compare(together: Tensor, alone: Tensor, what: str, tolerance: float) -> None:
    scale = float(alone.norm()) + 1e-30
    difference = float((together - alone).norm()) / scale if together.shape == alone.shape else 1.0
    if difference > tolerance:
        raise PrivacyError(
            f"an example's {what} depends on the other examples of its batch (self-check on "
            f"synthetic rows: relative difference {difference:.2g}). The clip bound would not "
            "hold. Look for an operation across the batch (batch statistics, attention over the "
            "batch, a contrastive term), a batch axis that is not the first (batch_first=False if "
            "it is the second), or rows flattened in another order."
        )
