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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vestige.clipping import Clip
from vestige.errors import PrivacyError, VestigeError
from vestige.gradients.capture import Batch, Capture, changed_by_forward
from vestige.gradients.collector import Collector

# Every row counts alike, so that the sum shows how rows were told apart.
_BOUND = 1.0

# Output and its random cotangent, by the place among all that the model returns.
Outputs = dict[int, tuple[Tensor, Tensor]]


def self_check(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> bool:
    """Whether rows were shown to be independent; PrivacyError if they were shown not to be.

    False (with a warning) where the model does not run on synthetic rows, or makes nothing of them
    that could be compared.
    """
    counts = _row_counts((args, kwargs))
    with _aside(capture), _own_randomness(capture):
        first = _trial((args, kwargs), capture, counts, seed, positive=False)
        trial = first
        if isinstance(first, str):  # a logarithm or a mask may need the other kind of rows
            trial = _trial((args, kwargs), capture, counts, seed, positive=True)
        if isinstance(trial, str):
            return _skipped(str(first))
        with _no_dropout(capture):
            _compare_with_alone(capture, trial)
        _compare_with_other_company(capture, trial, seed)
    return True


@dataclass(frozen=True)
class Trial:
    """Synthetic rows, what the model makes of all of them, and inputs of another row count."""

    inputs: Any
    rows: int
    more: tuple[Any, int]
    together: Tensor
    outputs: Outputs


def _trial(
    real: Any, capture: Capture, counts: tuple[int, int], seed: int, positive: bool
) -> Trial | str:
    """The model on synthetic rows, without dropout; or why that says nothing."""
    torch.manual_seed(seed)
    inputs, others = (_synthetic(real, capture, count, positive) for count in counts)
    if inputs is None:
        return "the model's inputs have no batch rows"
    rows, more = counts[0], (others, counts[1])
    capture.learning = True
    try:
        with _no_dropout(capture):
            together, outputs = _run(capture, inputs, rows, slice(None), more=more)
    except VestigeError:
        raise
    except Exception as error:
        return f"the model does not run on synthetic rows: {error!r}"
    finally:
        capture.learning = False
    if not outputs:
        return "the model returns nothing with batch rows, such as a loss alone"
    # What is not a number equals nothing, so that a comparison would find no difference.
    if not together.any() or any(bool(out.isnan().any()) for out, _ in outputs.values()):
        return "the model's outputs or gradients for synthetic rows are not numbers, or all zero"
    return Trial(inputs, rows, more, together, outputs)


def _skipped(reason: str) -> bool:
    warnings.warn(
        f"the self-check was skipped because {reason}. That the examples do not mix is unchecked.",
        UserWarning,
        stacklevel=2,
    )
    return False


def _compare_with_alone(capture: Capture, trial: Trial) -> None:
    """Each row gives the same output and gradient by itself; dropout is off."""
    alone = torch.zeros_like(trial.together)
    for i in range(trial.rows):
        one_row = slice(i, i + 1)
        total, single = _run(capture, trial.inputs, trial.rows, one_row, trial.outputs)
        alone += total
        for at, (one, _) in single.items():
            out = trial.outputs[at][0]
            _compare(out.narrow(capture.axis, i, 1), one, "output", _rounding(one))
    # Rounding may flip a max or a relu near zero, which moves a gradient a little.
    _compare(trial.together, alone, "gradient", 0.05)


def _compare_with_other_company(capture: Capture, trial: Trial, seed: int) -> None:
    """In the model's own mode, with the same random numbers, replacing row 0 moves no other row."""
    axis, rows, more = capture.axis, trial.rows, trial.more

    def other_first_row(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == rows:
            value = value.clone()
            value.select(axis, 0).copy_(value.select(axis, 1).clone())
        return value

    results = []
    given: Outputs | None = None
    for change in (lambda value: value, other_first_row):
        torch.manual_seed(seed + 1)
        inputs = pytree.tree_map(change, trial.inputs)
        total, outputs = _run(capture, inputs, rows, slice(None), given, more, mute_first=True)
        given = given or outputs
        results.append((total, [o.narrow(axis, 1, rows - 1) for o, _ in outputs.values()]))
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
    # Without the stability, a gradient that is zero but for rounding would count like any other.
    stability = 100 * _precision(capture)
    capture.collector = Collector(groups, Clip((_BOUND,) * groups.count, stability))
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
            if name in before and not _same(value, before[name])
        ]
        for name, value in changed:
            value.data.copy_(before[name])
        if changed:  # also in place of another refusal, which may only be its consequence
            raise changed_by_forward(changed[0][0])


def _precision(capture: Capture) -> float:
    """The rounding unit of the model's arithmetic."""
    dtypes = {slot.parameter.dtype for slot in capture.groups.slots}
    device = capture.collector.total.device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _same(value: Tensor, before: Tensor) -> bool:
    """Equal, where what is not a number equals itself."""
    if torch.equal(value, before):
        return True
    return bool(torch.isclose(value, before, rtol=0, atol=0, equal_nan=True).all())


def _row_counts(inputs: Any) -> tuple[int, int]:
    """Two small numbers that no axis of the inputs has, so that no shape agrees by chance."""
    sizes = {s for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) for s in t.shape}
    free = (n for n in itertools.count(3) if n not in sizes)
    return next(free), next(free)


def _synthetic(inputs: Any, capture: Capture, count: int, positive: bool) -> Any:
    """The inputs with their rows replaced by `count` random ones, None if they have no rows.

    Numbers are normal, or uniform in (0, 1) with `positive`; masks are all False, or all True.
    """
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
            return (torch.rand(shape) * 0.98 + 0.01 if positive else torch.randn(shape)).to(value)
        if value.dtype == torch.bool:  # a mask: one of the two masks nothing
            return torch.full(shape, positive).to(value)
        # Pixels take every value; of other integers (tokens, classes) only 0 and 1 surely exist.
        return torch.randint(0, 256 if value.dtype == torch.uint8 else 2, shape).to(value)

    faked = pytree.tree_map(fake, inputs)
    return faked if found else None


def _run(
    capture: Capture,
    inputs: Any,
    whole: int,
    rows: slice,
    given: Outputs | None = None,
    more: tuple[Any, int] | None = None,
    mute_first: bool = False,
) -> tuple[Tensor, Outputs]:
    """The clipped sum of some of the synthetic rows, and the outputs with their cotangents.

    `more` are inputs of another number of rows: an output is what follows that number. (The first
    axis of a hidden state may be as long as there are rows by chance.)
    """
    axis, count = capture.axis, len(range(whole)[rows])

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == whole:
            return value[rows] if axis == 0 else value[:, rows]
        return value

    args, kwargs = pytree.tree_map(take, inputs)
    capture.collector.clear()
    capture.start(Batch(count))
    with torch.enable_grad():
        found = pytree.tree_leaves(capture.module(*args, **kwargs))
        if given is None:
            assert more is not None
            places = [at for at in _following(capture, more) if at < len(found)]
            leaves = {at: found[at] for at in places if _is_output(found[at], axis, count)}
            outputs = {at: (t.detach(), torch.randn(t.shape).to(t)) for at, t in leaves.items()}
        else:
            if len(found) <= max(given, default=-1) or not all(
                _is_output(found[at], axis, count) for at in given
            ):
                raise PrivacyError(
                    f"the model gives other outputs for {count} rows than for {whole}: it must "
                    "treat every example on its own."
                )
            leaves = {at: found[at] for at in given}
            outputs = {at: (found[at].detach(), take(g)) for at, (_, g) in given.items()}
        if not leaves:
            return capture.collector.total, {}
        if mute_first:
            for _, cotangent in outputs.values():
                cotangent.select(axis, 0).zero_()
        torch.autograd.backward(list(leaves.values()), [g for _, g in outputs.values()])
    return capture.collector.total.clone(), outputs


def _following(capture: Capture, more: tuple[Any, int]) -> list[int]:
    """The places of what the model returns where the batch axis has the given number of rows."""
    (args, kwargs), rows = more
    with torch.no_grad():
        found = pytree.tree_leaves(capture.module(*args, **kwargs))
    axis = capture.axis
    return [
        at
        for at, value in enumerate(found)
        if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == rows
    ]


def _is_output(value: Any, axis: int, rows: int) -> bool:
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and value.ndim > axis
        and value.shape[axis] == rows
        and value.is_floating_point()
    )


def _rounding(output: Tensor) -> float:
    """What the order of additions may change in an output of this precision, generously."""
    return max(1e-3, 4 * torch.finfo(output.dtype).eps)


def _compare(together: Tensor, alone: Tensor, what: str, tolerance: float) -> None:
    difference = 1.0
    if together.shape == alone.shape:
        one, other = together.double(), alone.double()
        apart = torch.where(one == other, 0.0, one - other)  # also where both are infinite
        difference = float(apart.norm()) / (float(other[other.isfinite()].norm()) + 1e-30)
    if not difference <= tolerance:
        raise PrivacyError(
            f"an example's {what} depends on the other examples of its batch (self-check on "
            f"synthetic rows: relative difference {difference:.2g}). The clip bound would not "
            "hold. Look for an operation across the batch (batch statistics, attention over the "
            "batch, a contrastive term), a batch axis that is not the first (batch_first=False if "
            "it is the second), or rows flattened in another order."
        )
