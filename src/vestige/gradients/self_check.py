"""Before gradients are taken in a new way: is every row's gradient its own, to the last digit?

The model runs on a few synthetic rows (random numbers of the right shape, never the data) that
differ in sign, scale and length, in the mode that it is in, with random numbers fixed and, where it
can, in float64. It is asked whether

    one row's cotangent gives every other row a norm of zero, and the row itself the gradient that
        plain autograd gives it alone
    all of that row stays the same in other company: as many rows as another axis is long, one of
        them a million times larger, and all rows' cotangents at once

At last one row is repeated as often as the batch at hand has rows (up to 32 times), and once more:
every copy must come out as the row alone does.
Where units have several rows, two units are made of the same rows: a cotangent of the first gives
the second a norm of zero, and the first the norm of the sum over its rows.
Where the model returns a loss instead of rows, the norms of its rows and of its units are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vestige.errors import ConfigError, VestigeError
from vestige.gradients.capture import Capture
from vestige.gradients.precision import exact
from vestige.gradients.recompute import without_checkpoints
from vestige.gradients.rows import Meeting
from vestige.gradients.synthetic import KINDS, RowMaker, own_randomness
from vestige.gradients.tracker import kept_by_forward, same_contents
from vestige.gradients.trial import Output, RowNorms, Trial, mixed

_MOST_IN_DOUBLE = 200_000_000  # trainable or not: a float64 copy is held while the check runs
_MOST_ROWS = 16
# What rounding may do. In float64, too, since many models compute parts in float32.
OUTPUTS, GRADIENTS = 1e-5, 1e-4


def self_check(
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    agree: Callable[[tuple[int, int, int]], tuple[int, int, int]] = lambda own: own,
) -> str | None:
    """None if every row was shown to stand alone, else why nothing was shown.

    Raises PrivacyError if rows were shown not to. Ranks that run every pass together `agree` on the
    numbers of rows.
    """
    maker = RowMaker(capture, (args, kwargs))
    if not any(maker.batched):
        return "the model's inputs have no batch rows"
    # A prime: axes inside the model (heads, windows) are rarely as long.
    primes = itertools.chain((3, 5, 7, 11, 13), itertools.count(17))
    few = next(n for n in primes if n not in maker.sizes)
    company = min((n for n in maker.sizes if 1 < n <= _MOST_ROWS), default=few + 1)
    few, company, places = agree((few, company, max(1, min(maker.rows, 32))))
    why = ""
    device = capture.collector.total.device
    in_units = capture.batch is not None and capture.batch.unit_rows > 1
    with aside(capture), own_randomness(device), without_checkpoints():
        for double, kind in itertools.product((True, False), KINDS):
            if double and not _fits_in_double(capture):
                continue
            with _precision(capture, double):
                torch.manual_seed(seed)
                trial = Trial(capture, maker.make(few, kind, double), maker.batched, few)
                try:
                    unshown = _begun(trial) or _compared(trial, [1, few - 1], company)
                except ConfigError:
                    if double:  # a part of the model has a precision of its own
                        continue
                    raise
                if unshown is None:
                    compare_places(trial, places)
                    if in_units:
                        (compare_units if trial.loss is None else compare_units_of_loss)(trial)
                    capture.tracker.checked = True
                    return None
                why = why or unshown
    return why


def _begun(trial: Trial) -> str | None:
    """Run the model on all rows; why that says nothing, if so."""
    # No other axis is as long: here the capture learns which constants have rows.
    trial.capture.tracker.learning = True
    try:
        return trial.begin()
    finally:
        trial.capture.tracker.learning = False


def _compared(trial: Trial, tested: list[int], company: int) -> str | None:
    """None if the rows agree, else why they could not be compared."""
    try:
        compare(trial, tested, company)
    except VestigeError:
        raise
    except Exception as error:
        return f"the model does not run on single synthetic rows: {error!r}"
    return None


# -- comparisons ------------------------------------------------------------------------------

Alone = dict[int, tuple[list[Tensor], Tensor]]  # rows, and what each of them is by itself
_COMPANY = "depends on the other examples of its batch"


def compare(trial: Trial, tested: list[int], company: int) -> None:
    """Hold tested rows among all rows against the same rows alone, and in other company."""
    targets = [trial.leaves[at] for at in trial.places]
    if trial.capture.runs_row_by_row():  # a module that does may not do what it does for all rows
        plain = trial.plainly(lambda t: t)
        for at, target in zip(trial.places, targets, strict=True):
            _same(
                target,
                plain[at],
                "output changes when its gradients are captured",
                trial.rounding(OUTPUTS),
            )
    alone = {row: trial.alone(row) for row in tested}
    for row, (outputs, gradient) in alone.items():
        if trial.loss is not None:
            continue
        for at, one in zip(trial.places, outputs, strict=True):
            _same(trial.outputs[at].of(row), one, f"output {_COMPANY}", trial.rounding(OUTPUTS))
        cotangents = [trial.outputs[at].masked(row) for at in trial.places]
        total, squares = trial.backward(targets, cotangents, trial.rows)
        squares[row] = 0
        if bool(squares.any()):
            raise mixed("a gradient of one example is attributed to another")
        _same(total, gradient, f"gradient {_COMPANY}", trial.rounding(GRADIENTS))
    _compare_in_other_company(trial, alone, company)


def _compare_in_other_company(trial: Trial, alone: Alone, company: int) -> None:
    """The tested rows come last among `company` rows, the first of which is huge."""
    capture, axis = trial.capture, trial.capture.axis
    rows = [i % trial.rows for i in range(max(company, len(alone) + 1))]
    rows[-len(alone) :] = list(alone)
    index = torch.tensor(rows)

    def gathered(value: Tensor) -> Tensor:
        value = value.index_select(axis, index.to(value.device))
        first = value.select(axis, 0)
        if value.is_floating_point():
            first.mul_(-1e6 if value.dtype == torch.float64 else -1e3)
        return value

    leaves = trial.captured(trial.changed(gathered), len(rows))
    together = trial.outputs_in(leaves)
    if not set(trial.outputs) <= set(together):
        for at in trial.outputs:
            label = capture.tracker.label(leaves[at]) if at < len(leaves) else None
            if isinstance(label, Meeting):
                raise label.refusal()
        raise mixed("the model gives other outputs for other numbers of rows")
    targets = [leaves[at] for at in trial.places]
    scale, what = 1.0, f"gradient {_COMPANY}"
    if trial.loss is None:
        cotangents = [
            _moved_cotangent(output, together[at], rows) for at, output in trial.outputs.items()
        ]
    else:
        cotangents = [torch.ones_like(t) for t in targets]
        scale = float(len(rows)) if capture.declared_mean else 1.0
        what = f"part in the loss that the model returns {_COMPANY}"
    _, squares = trial.backward(targets, cotangents, len(rows))
    for row, of_row in list(enumerate(rows))[-len(alone) :]:
        outputs, gradient = alone[of_row]
        for at, one in zip(trial.outputs, outputs, strict=False):
            _same(together[at].of(row), one, f"output {_COMPANY}", trial.rounding(OUTPUTS))
        _same(squares[row].sqrt() * scale, gradient.norm(), what, trial.rounding(GRADIENTS))


def _moved_cotangent(before: Output, now: Output, rows: list[int]) -> Tensor:
    """Each row's cotangent where the row is now."""
    cotangent = now.cotangent
    for row, of_row in enumerate(rows):
        cotangent.index_copy_(now.axis, now.places(row), before.cotangent_of(of_row))
    return cotangent


def compare_places(trial: Trial, rows: int) -> None:
    """A batch of copies of one row, as many as the real batch has: neither the place in the batch
    nor the number of rows may matter."""
    axis = trial.capture.axis

    def run(count: int) -> list[Any]:
        def copies(t: Tensor) -> Tensor:
            return t.narrow(axis, 0, 1).expand(*t.shape[:axis], count, *t.shape[axis + 1 :])

        return trial.plainly(copies, gradients=False)

    try:
        alone = run(1)
        runs = run(rows), run(rows + 1)  # neighbours: what one record more may not change
    except Exception:
        return  # the batch at hand will tell
    for together in runs:
        for at, output in trial.outputs.items():
            if output.value.shape[output.axis] == trial.rows:  # one entry for each row
                one = alone[at].expand(together[at].shape)
                what = "output depends on its place or the number of rows"
                _same(together[at], one, what, trial.rounding(OUTPUTS))


def compare_units(trial: Trial) -> None:
    """Two units of all synthetic rows: each has the gradient of its own rows, and nothing else."""
    capture, rows = trial.capture, 2 * trial.rows
    inputs = trial.changed(lambda t: torch.cat([t, t], capture.axis))
    leaves = trial.captured(inputs, rows, unit_rows=trial.rows)
    together = trial.outputs_in(leaves)
    if not set(trial.outputs) <= set(together):
        raise mixed("the model gives other outputs for other numbers of rows")
    targets = [leaves[at] for at in trial.places]
    cotangents = []
    for at in trial.outputs:
        of_first = together[at].owners < trial.rows
        shape = [-1 if axis == together[at].axis else 1 for axis in range(leaves[at].ndim)]
        cotangents.append(torch.where(of_first.view(shape), together[at].cotangent, 0))
    total, squares = trial.backward(targets, cotangents, 2)
    if bool(squares[1]):
        raise mixed("a gradient of one unit is attributed to another")
    _same(
        squares[0].sqrt() / trial.rows, total.norm(), "unit has not its rows' gradient", GRADIENTS
    )


def compare_units_of_loss(trial: Trial) -> None:
    """A unit of all synthetic rows beside one of copies of a row, under the loss of the model: each
    has the norm of its rows' sum, as those are alone. Of the first row, and of the last: whatever
    row of the one unit is taken for a row of the other differs from it once."""
    capture, rows = trial.capture, trial.rows
    alone = torch.stack([trial.alone(row)[1] for row in range(rows)])
    scale = 2.0 * rows if capture.declared_mean else 1.0
    for row in (0, rows - 1):

        def beside(t: Tensor, row: int = row) -> Tensor:
            return torch.cat([t, *[t.narrow(capture.axis, row, 1)] * rows], capture.axis)

        leaves = trial.captured(trial.changed(beside), 2 * rows, unit_rows=rows)
        targets = [leaves[at] for at in trial.places]
        _, squares = trial.backward(targets, [torch.ones_like(t) for t in targets], 2)
        expected = torch.stack([alone.sum(0).norm(), rows * alone[row].norm()])
        _same(squares.sqrt() * scale, expected, "unit has not its rows' gradient", GRADIENTS)


def _same(one: Tensor, other: Tensor, what: str, tolerance: float) -> None:
    """Refuse two tensors that differ by more than rounding; `what` says what that would mean."""
    tolerance = max(tolerance, 16 * max(torch.finfo(t.dtype).eps for t in (one, other)))
    difference = 1.0
    if one.shape == other.shape:
        a, b = one.detach().double(), other.detach().double()
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
        difference = float(apart.norm()) / (float(b[b.isfinite()].norm()) + 1e-30)
    if not difference <= tolerance:
        raise mixed(
            f"an example's {what} (self-check on synthetic rows: relative difference "
            f"{difference:.2g})"
        )


# -- surroundings -----------------------------------------------------------------------------


@contextmanager
def aside(capture: Capture) -> Iterator[None]:
    """Run with a collector of its own, and put everything back."""
    kept = (capture.collector, capture.batch, capture.mean_loss, capture.weight)
    numbered = dict(capture.numbered)  # an earlier forward pass of the batch may have run compiled
    capture.declared_mean = capture.mean_loss
    capture.mean_loss, capture.weight = False, 1.0
    capture.tracker.noting = True
    try:
        yield
    finally:
        capture.tracker.noting = False
        capture.stop_watching()
        capture.collector, capture.batch, capture.mean_loss, capture.weight = kept
        capture.numbered = numbered


@contextmanager
def _precision(capture: Capture, double: bool) -> Iterator[None]:
    """The model in float64 for a while, its own tensors put back untouched; without autocast and
    TF32. A state that the forward pass wrote to (also through .data) is refused."""
    passing = capture.shards.passing  # FSDP's, which a forward pass cannot write to
    kept = [(name, t, t.data) for name, t in capture.state_tensors() if id(t) not in passing]
    if double:
        for _, tensor, data in kept:
            if data.is_floating_point():
                tensor.data = data.double()
    before = [(name, t, t.detach().clone()) for name, t, _ in kept]
    capture.collector = RowNorms(capture.groups)
    default = torch.get_default_dtype()
    try:
        if double:
            torch.set_default_dtype(torch.float64)  # of what the model makes on the way, like masks
        # Rounded factors would hide small differences.
        with exact(), torch.autocast(capture.collector.total.device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)
        changed = [name for name, t, old in before if not same_contents(t, old)]
        for (_, tensor, data), (_, _, old) in zip(kept, before, strict=True):
            if double:
                tensor.data = data
            elif not same_contents(tensor, old):
                tensor.data.copy_(old)
        if changed:  # also in place of another refusal, which may only be its consequence
            raise kept_by_forward(type(capture.module).__name__, changed[0])


def _fits_in_double(capture: Capture) -> bool:
    if capture.shards.passing:
        return False  # FSDP gathers the numbers that it holds
    return sum(p.numel() for p in capture.module.parameters()) <= _MOST_IN_DOUBLE


def signature(inputs: Any) -> Any:
    """What a call of the model looks like but for the lengths of its axes."""

    def one(path: Any, value: Any) -> Any:
        if isinstance(value, Tensor):
            return pytree.keystr(path), value.dtype, value.ndim
        plain = isinstance(value, bool | int | float | complex | str | bytes | type(None) | Enum)
        return pytree.keystr(path), value if plain else type(value)

    return tuple(one(path, value) for path, value in pytree.tree_leaves_with_path(inputs))
