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
from vestige.gradients.capture import Batch, Capture, changed_by_forward
from vestige.gradients.collector import Collector

# Far below any gradient, so that every row is clipped and the sum shows how rows were told apart.
_BOUND = 1e-12

Outputs = list[tuple[Tensor, Tensor]]  # output and its random cotangent


def self_check(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> bool:
    """Whether rows were shown to be independent; PrivacyError if they were shown not to be.

    False (with a warning) where the model does not run on synthetic rows.
    """
    rows = _row_count((args, kwargs))
    with _aside(capture), _own_randomness(capture):
        torch.manual_seed(seed)
        inputs = _synthetic((args, kwargs), capture, rows)
        if inputs is None:
            return _skipped("the model's inputs have no batch rows")
        try:
            capture.learning = True
            with _no_dropout(capture):
                together, outputs = _run(capture, inputs, rows, slice(None), None)
        except VestigeError:
            raise
        except Exception as error:
            return _skipped(f"the model does not run on synthetic rows: {error!r}")
        finally:
            capture.learning = False
        if not outputs:
            return _skipped("the model returns nothing with batch rows, such as a loss alone")
        with _no_dropout(capture):
            _compare_with_alone(capture, inputs, rows, together, outputs)
        _compare_with_other_company(capture, inputs, rows, seed)
    return True


def _skipped(reason: str) -> bool:
    warnings.warn(
        f"the self-check was skipped because {reason}. That the examples do not mix is unchecked.",
        UserWarning,
        stacklevel=2,
    )
    return False


def _compare_with_alone(
    capture: Capture, inputs: Any, rows: int, together: Tensor, outputs: Outputs
) -> None:
    """Each row gives the same output and gradient by itself; dropout is off."""
    alone = torch.zeros_like(together)
    for i in range(rows):
        total, single = _run(capture, inputs, rows, slice(i, i + 1), outputs)
        alone += total
        for (out, _), (one, _) in zip(outputs, single, strict=True):
            _compare(out.narrow(capture.axis, i, 1), one, "output", _rounding(one))
    # Rounding may flip a max or a relu near zero, which moves a gradient a little.
    _compare(together, alone, "gradient", 0.05)


def _compare_with_other_company(capture: Capture, inputs: Any, rows: int, seed: int) -> None:
    """In the model's own mode, with the same random numbers, replacing row 0 moves no other row."""
    axis = capture.axis

    def other_first_row(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == rows:
            value = value.clone()
            value.select(axis, 0).copy_(value.select(axis, 1).clone())
        return value

    results = []
    given: Outputs | None = None
    for change in (lambda value: value, other_first_row):
        torch.manual_seed(seed + 1)
        total, outputs = _run(
            capture, pytree.tree_map(change, inputs), rows, slice(None), given, mute_first=True
        )
        given = given or outputs
        results.append((total, [o.narrow(axis, 1, rows - 1) for o, _ in outputs]))
    (total, outs), (total_other, outs_other) = results
    for one, other in zip(outs, outs_other, strict=True):
        _compare(other, one, "output", _rounding(one))
    _compare(total_other, total, "gradient", 0.05)


@contextmanager
def _own_randomness(capture: Capture) -> Iterator[None]:
    """Leave the generators that the user seeded as they were."""
    device = capture.collector.total.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def _no_dropout(capture: Capture) -> Iterator[None]:
    training = [(module, module.training) for module in capture.module.modules()]
    for module, _ in training:
        module.training = False
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag


@contextmanager
def _aside(capture: Capture) -> Iterator[None]:
    """Run with a collector of its own, and put everything back. A state that the model itself
    wrote to (also through .data, which leaves no version behind) is put back and refused."""
    kept = (capture.collector, capture.batch, capture.mean_loss, capture.unfold)
    groups = capture.groups
    capture.collector = Collector(groups, Clip((_BOUND,) * groups.count))
    capture.mean_loss, capture.unfold = False, True
    before = {name: value.detach().clone() for name, value in capture.state_tensors()}
    try:
        yield
    finally:
        capture.stop_watching()
        capture.collector, capture.batch, capture.mean_loss, capture.unfold = kept
        changed = [
            (name, value)
            for name, value in capture.state_tensors()
            if name in before and not torch.equal(value, before[name])
        ]
        for name, value in changed:
            value.data.copy_(before[name])
        if changed:  # also in place of another refusal, which may only be its consequence
            raise changed_by_forward(changed[0][0])


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
        # Pixels take every value; of other integers (tokens, classes) only 0 and 1 surely exist.
        return torch.randint(0, 256 if value.dtype == torch.uint8 else 2, shape).to(value)

    faked = pytree.tree_map(fake, inputs)
    return faked if found else None


def _run(
    capture: Capture,
    inputs: Any,
    whole: int,
    rows: slice,
    given: Outputs | None,
    mute_first: bool = False,
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
        if mute_first:
            for _, cotangent in outputs:
                cotangent.select(axis, 0).zero_()
        torch.autograd.backward(leaves, [g for _, g in outputs])
    return capture.collector.total.clone(), outputs


def _rounding(output: Tensor) -> float:
    """What the order of additions may change in an output of this precision, generously."""
    return max(1e-3, 4 * torch.finfo(output.dtype).eps)


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
