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
Where the model returns a loss instead of rows, the norms of its rows are compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vestige.errors import PrivacyError, VestigeError
from vestige.gradients.capture import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.following import name_of
from vestige.gradients.rows import Meeting, Rows, Summed
from vestige.gradients.tracker import VALUES, kept_by_forward, same_contents
from vestige.sampling.loader import Batch

_MOST_IN_DOUBLE = 200_000_000  # trainable or not: a float64 copy is held while the check runs
_MOST_ROWS = 16
# What rounding may do. In float64, too, since many models compute parts in float32.
_OUTPUTS, _GRADIENTS = 1e-5, 1e-4


def self_check(
    capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> str | None:
    """None if every row was shown to stand alone, else why nothing was shown.

    Raises PrivacyError if rows were shown not to.
    """
    real = (args, kwargs)
    sizes = _sizes(real)
    # A prime: axes inside the model (heads, windows) are rarely as long.
    primes = itertools.chain((3, 5, 7, 11, 13), itertools.count(17))
    few = next(n for n in primes if n not in sizes)
    equal = min((n for n in sizes if 1 < n <= _MOST_ROWS), default=None)
    why = ""
    with _aside(capture), _own_randomness(capture):
        rows = _rows_of(real, capture)
        if not any(_has_rows(t, capture.axis, rows) for t in pytree.tree_leaves(real)):
            return "the model's inputs have no batch rows"
        for double, kind in itertools.product((True, False), _KINDS):
            if double and not _fits_in_double(capture.module):
                continue
            with _precision(capture, double):
                # No other axis is as long: here the capture learns which constants have rows.
                capture.tracker.learning = True
                try:
                    trial = _trial(capture, real, few, seed, kind, double)
                finally:
                    capture.tracker.learning = False
                if isinstance(trial, str):
                    why = why or trial
                    continue
                try:
                    _compare(trial, [1, few - 1], equal or few + 1)
                except VestigeError:
                    raise
                except Exception as error:
                    why = why or f"the model does not run on single synthetic rows: {error!r}"
                    continue
                _compare_places(trial, max(1, min(rows, 32)))
                capture.tracker.checked = True
                return None
    return why


# -- synthetic rows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """How rows are made up; the first kind that the model takes is used."""

    positive: bool = False  # numbers in (0, 1), for logarithms
    tokens: bool = True  # any token of the smallest embedding, else 0 and 1
    masks: bool | None = None  # all of this, else the first few positions of each row


_KINDS = (
    _Kind(),
    _Kind(tokens=False),
    _Kind(tokens=False, masks=True),
    _Kind(tokens=False, masks=False),
    _Kind(positive=True, tokens=False, masks=True),
    _Kind(positive=True, tokens=False, masks=False),
)
_SCALES = (1.0, -0.3, 3.0, -10.0, 0.03)


def _synthetic(real: Any, capture: Capture, count: int, kind: _Kind, double: bool) -> Any:
    """The inputs with their rows replaced by `count` random ones."""
    axis, rows = capture.axis, _rows_of(real, capture)
    vocabulary = min(
        (m.num_embeddings for m in capture.module.modules() if isinstance(m, nn.Embedding)),
        default=2,
    )
    length = next(
        (t.shape[1 - axis] for t in pytree.tree_leaves(real) if _has_rows(t, axis, rows, 2)), 1
    )
    lengths = (torch.randperm(max(length, count))[:count] % max(length, 1)) + 1

    def fake(path: Any, value: Any) -> Any:
        if not _has_rows(value, axis, rows):
            return value
        shape = list(value.shape)
        shape[axis] = count
        name = pytree.keystr(path).lower()
        if value.is_floating_point():
            content = torch.rand(shape) * 0.98 + 0.01 if kind.positive else torch.randn(shape)
            if not kind.positive:
                scale = torch.tensor(list(itertools.islice(itertools.cycle(_SCALES), count)))
                content = content * scale.view(-1, *[1] * (value.ndim - 1 - axis))
            content = content.to(value.device)
            return content.double() if double else content.to(value.dtype)
        if value.dtype == torch.bool or "mask" in name:
            if kind.masks is not None or value.ndim < 2:
                return torch.full(shape, bool(kind.masks)).to(value)
            places = torch.arange(shape[1 - axis])
            mask = places < lengths.unsqueeze(1).clamp(max=max(1, shape[1 - axis] - 1))
            mask = mask.t() if axis else mask
            return mask.view(*mask.shape, *[1] * (value.ndim - 2)).expand(shape).to(value)
        if value.ndim == 1 and length > 1 and kind.tokens:
            return lengths.to(value)  # beside rows with positions: their lengths
        if value.dtype == torch.uint8:
            return torch.randint(0, 256, shape).to(value)
        return torch.randint(0, vocabulary if kind.tokens else 2, shape).to(value)

    return pytree.tree_map_with_path(fake, real)


def _has_rows(value: Any, axis: int, rows: int, axes: int = 1) -> bool:
    wide = isinstance(value, Tensor) and value.ndim > max(axis, axes - 1)
    return wide and value.shape[axis] == rows


def _rows_of(inputs: Any, capture: Capture) -> int:
    return capture.count_rows(*inputs)


def _sizes(inputs: Any) -> set[int]:
    return {s for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) for s in t.shape}


# -- runs of the model ------------------------------------------------------------------------


class _RowNorms(Collector):
    """Adds gradients up unclipped, and keeps each row's squared norm."""

    def __init__(self, capture: Capture) -> None:
        groups = capture.groups
        super().__init__(groups, Clip((1e140,) * groups.count))
        self.squares: Tensor | None = None

    def clear(self) -> None:
        super().clear()
        self.squares = None

    def _look(self, square_norms: Tensor, group: int) -> None:
        held = 0 if self.squares is None else self.squares
        self.squares = held + square_norms.detach().double()

    def _settle_at_once(self, members: Any) -> None:
        self._settle([_whole(slot, use) for slot, use in members])


def _whole(slot: Any, use: Any) -> Any:
    from vestige.gradients.collector import _Held

    return _Held(slot, use, None)


@dataclass(frozen=True)
class Output:
    """One tensor that the model returned for all rows: the rows are on `axis`, as `owners` says."""

    value: Tensor
    axis: int
    owners: Tensor
    cotangent: Tensor

    def of(self, row: int) -> Tensor:
        """The entries of one row."""
        return self.value.index_select(self.axis, (self.owners == row).nonzero()[:, 0])

    def cotangent_of(self, row: int) -> Tensor:
        """The cotangent of one row alone."""
        return self.cotangent.index_select(self.axis, (self.owners == row).nonzero()[:, 0])

    def masked(self, row: int) -> Tensor:
        """The cotangent of all rows, with everybody else's set to zero."""
        mine = self.owners == row
        shape = [1] * self.value.ndim
        shape[self.axis] = -1
        return torch.where(mine.view(shape), self.cotangent, 0)


@dataclass
class Trial:
    """Synthetic rows, and what the model makes of all of them."""

    capture: Capture
    inputs: Any
    batched: list[bool]  # which of the inputs' leaves have rows
    rows: int
    leaves: list[Any]  # all that the model returned
    outputs: dict[int, Output]  # those that have rows, by their place
    loss: int | None  # the place of a loss, where no output has rows
    mean: bool

    @property
    def places(self) -> list[int]:
        """The places of what is compared."""
        return list(self.outputs) if self.loss is None else [self.loss]


def _trial(
    capture: Capture, real: Any, count: int, seed: int, kind: _Kind, double: bool
) -> Trial | str:
    """The model on synthetic rows; or why that says nothing."""
    torch.manual_seed(seed)
    inputs = _synthetic(real, capture, count, kind, double)
    try:
        leaves = _captured(capture, inputs, count)
    except VestigeError:
        raise
    except Exception as error:
        return f"the model does not run on synthetic rows: {error!r}"
    outputs = _outputs(capture, leaves)
    labels = {
        at: capture.tracker.label(leaf)
        for at, leaf in enumerate(leaves)
        if _may_be_loss(leaf) and at not in outputs
    }
    loss = next((at for at, x in labels.items() if isinstance(x, Summed)), None)
    if not outputs and loss is None:
        for label in labels.values():
            if isinstance(label, Rows):
                label = Meeting("a change of the rows' order that is not undone")
            if isinstance(label, Meeting):
                raise label.refusal()
        return "the model returns nothing with batch rows"
    if any(bool(o.value.isnan().any()) for o in outputs.values()):
        return "the model's outputs for synthetic rows are not numbers"
    axis, rows = capture.axis, _rows_of(real, capture)
    batched = [_has_rows(value, axis, rows) for value in pytree.tree_leaves(real)]
    loss = None if outputs else loss
    return Trial(capture, inputs, batched, count, leaves, outputs, loss, capture.declared_mean)


def _may_be_loss(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()


def _outputs(capture: Capture, leaves: list[Any]) -> dict[int, Output]:
    """What the model returned with rows in the batch's order."""
    found = {}
    for at, leaf in enumerate(leaves):
        label = capture.tracker.label(leaf) if _may_be_loss(leaf) else None
        if isinstance(label, Rows) and label.order is None:
            axis, inner = label.place(leaf.shape) or (0, 1)
            owners = label.owners(leaf.shape, axis, inner, leaf.device)
            found[at] = Output(leaf, axis, owners, torch.randn(leaf.shape).to(leaf))
    return found


def _captured(capture: Capture, inputs: Any, rows: int) -> list[Any]:
    """What the model returns, captured: ready for a backward pass."""
    args, kwargs = pytree.tree_map(_cloned, inputs)
    capture.collector.clear()
    capture.start(Batch(rows))
    torch.manual_seed(0)
    with torch.enable_grad(), _NoChance(capture):
        return pytree.tree_leaves(capture.module(*args, **kwargs))


def _plainly(capture: Capture, inputs: Any, gradients: bool = True) -> list[Any]:
    """What the model returns, as if nobody watched."""
    args, kwargs = pytree.tree_map(_cloned, inputs)
    torch.manual_seed(0)
    capture.tracker.restart()
    with capture.plainly(), torch.set_grad_enabled(gradients), _NoChance(capture):
        return pytree.tree_leaves(capture.module(*args, **kwargs))


def _cloned(value: Any) -> Any:
    """A model may change its inputs in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _changed(trial: Trial, change: Callable[[Tensor], Tensor]) -> Any:
    """The inputs with `change` made to those that have rows."""
    leaves, spec = pytree.tree_flatten(trial.inputs)
    changed = [change(v) if b else v for v, b in zip(leaves, trial.batched, strict=True)]
    return pytree.tree_unflatten(changed, spec)


def _backward(
    trial: Trial, targets: list[Tensor], cotangents: list[Tensor], rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of the rows' gradients and their squared norms."""
    capture = trial.capture
    collector = capture.collector
    assert isinstance(collector, _RowNorms)
    collector.clear()
    capture.reopen()
    torch.autograd.backward(targets, cotangents, retain_graph=True)
    squares = collector.squares
    if squares is None:
        device = collector.total.device
        squares = torch.zeros(rows or trial.rows, device=device, dtype=torch.float64)
    return collector.total.double().clone(), squares


# -- comparisons ------------------------------------------------------------------------------


def _compare(trial: Trial, tested: list[int], company: int) -> None:
    capture, places = trial.capture, trial.places
    targets = [trial.leaves[at] for at in places]
    if capture.runs_row_by_row():  # a module that does may not do what it does for all rows
        plain = _plainly(capture, trial.inputs)
        for at, target in zip(places, targets, strict=True):
            _same(target, plain[at], "output", "when its gradients are captured", _OUTPUTS)
    alone = {row: _alone(trial, row) for row in tested}
    for row, (outputs, gradient) in alone.items():
        if trial.loss is not None:
            continue
        for at, one in zip(places, outputs, strict=True):
            _same(trial.outputs[at].of(row), one, "output", _COMPANY, _OUTPUTS)
        cotangents = [trial.outputs[at].masked(row) for at in places]
        total, squares = _backward(trial, targets, cotangents)
        squares[row] = 0
        if bool(squares.any()):
            raise _mixed("a gradient of one example is attributed to another")
        _same(total, gradient, "gradient", _COMPANY, _GRADIENTS)
    _compare_in_other_company(trial, alone, company)


def _alone(trial: Trial, row: int) -> tuple[list[Tensor], Tensor]:
    """The outputs and the flat gradient of one row by itself, by plain autograd."""
    capture, groups, places = trial.capture, trial.capture.groups, trial.places
    leaves = _plainly(capture, _changed(trial, lambda t: t.narrow(capture.axis, row, 1)))
    if len(leaves) <= max(places):
        raise _mixed("the model gives other outputs for one row than for several")
    outputs = [leaves[at] for at in places]
    cotangents = [
        torch.ones_like(out) if trial.loss is not None else trial.outputs[at].cotangent_of(row)
        for at, out in zip(places, outputs, strict=True)
    ]
    if any(out.shape != c.shape for out, c in zip(outputs, cotangents, strict=True)):
        raise _mixed("the model gives outputs of another shape for one row than for several")
    parameters = [slot.parameter for slot in groups.slots]
    with capture.plainly():
        found = torch.autograd.grad(
            [o for o in outputs if o.requires_grad],
            parameters,
            [c for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad],
            allow_unused=True,
        )
    flat = groups.buffer().double()
    for slot, g in zip(groups.slots, found, strict=True):
        if g is not None:
            slot.view(flat).copy_(g.to_dense() if g.is_sparse else g)
    return [o.detach() for o in outputs], flat


def _compare_in_other_company(
    trial: Trial, alone: dict[int, tuple[list[Tensor], Tensor]], company: int
) -> None:
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

    inputs = _changed(trial, gathered)
    leaves = _captured(capture, inputs, len(rows))
    found = _outputs(capture, leaves)
    if trial.loss is None and not set(trial.places) <= set(found):
        for at in trial.places:
            label = capture.tracker.label(leaves[at]) if at < len(leaves) else None
            if isinstance(label, Meeting):
                raise label.refusal()
        raise _mixed("the model gives other outputs for other numbers of rows")
    targets = [leaves[at] for at in trial.places]
    cotangents, scale = [torch.ones_like(t) for t in targets], float(len(rows))
    if trial.loss is None:
        cotangents, scale = [], 1.0
        for at, target in zip(trial.places, targets, strict=True):
            cotangent = torch.randn(target.shape).to(target)
            for row, of_row in enumerate(rows):
                mine = (found[at].owners == row).nonzero()[:, 0]
                part = trial.outputs[at].cotangent_of(of_row)
                cotangent.index_copy_(found[at].axis, mine.to(target.device), part)
            cotangents.append(cotangent)
    _, squares = _backward(trial, targets, cotangents, len(rows))
    for row, of_row in list(enumerate(rows))[-len(alone) :]:
        outputs, gradient = alone[of_row]
        if trial.loss is None:
            for at, one in zip(trial.places, outputs, strict=True):
                _same(found[at].of(row), one, "output", _COMPANY, _OUTPUTS)
        norm = squares[row].sqrt() * (scale if trial.mean or trial.loss is None else 1.0)
        what = "gradient" if trial.loss is None else "part in the loss that the model returns"
        _same(norm, gradient.norm(), what, _COMPANY, _GRADIENTS)


def _compare_places(trial: Trial, rows: int) -> None:
    """A batch of copies of one row, as many as the real batch has: neither the place in the batch
    nor the number of rows may matter."""
    axis = trial.capture.axis

    def copies(count: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t.narrow(axis, 0, 1).expand(*t.shape[:axis], count, *t.shape[axis + 1 :])

    def run(count: int) -> list[Any]:
        return _plainly(trial.capture, _changed(trial, copies(count)), gradients=False)

    try:
        alone = run(1)
        runs = run(rows), run(rows + 1)  # neighbours: what one record more may not change
    except Exception:
        return  # the batch at hand will tell
    for together in runs:
        for at, output in trial.outputs.items():
            if output.value.shape[output.axis] == trial.rows:  # one entry for each row
                one = alone[at].expand(together[at].shape)
                _same(together[at], one, "output", "from its place or the number of rows", _OUTPUTS)


_COMPANY = "from the other examples of its batch"


def _same(one: Tensor, other: Tensor, what: str, where: str, tolerance: float) -> None:
    tolerance = max(tolerance, 16 * max(torch.finfo(t.dtype).eps for t in (one, other)))
    difference = 1.0
    if one.shape == other.shape:
        a, b = one.detach().double(), other.detach().double()
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
        difference = float(apart.norm()) / (float(b[b.isfinite()].norm()) + 1e-30)
    if not difference <= tolerance:
        text = "changes" if "captured" in where else "depends"
        where = where.replace("from", "on")
        raise _mixed(
            f"an example's {what} {text} {where} (self-check on synthetic rows: relative "
            f"difference {difference:.2g})"
        )


def _mixed(what: str) -> PrivacyError:
    return PrivacyError(
        f"{what}. The clip bound would not hold. Look for an operation across the batch (batch "
        "statistics, attention over the batch, a contrastive term), a batch axis that is not the "
        "first (batch_first=False if it is the second), or a position in the lot that matters."
    )


# -- surroundings -----------------------------------------------------------------------------


@contextmanager
def _own_randomness(capture: Capture) -> Iterator[None]:
    """Leave the generators that the user seeded as they were."""
    device = capture.collector.total.device
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _aside(capture: Capture) -> Iterator[None]:
    """Run with a collector of its own, and put everything back."""
    kept = (capture.collector, capture.batch, capture.mean_loss, capture.weight)
    capture.declared_mean = capture.mean_loss
    capture.mean_loss, capture.weight = False, 1.0
    capture.tracker.noting = True
    try:
        yield
    finally:
        capture.tracker.noting = False
        capture.stop_watching()
        capture.collector, capture.batch, capture.mean_loss, capture.weight = kept


@contextmanager
def _precision(capture: Capture, double: bool) -> Iterator[None]:
    """The model in float64 for a while, its own tensors put back untouched; without autocast. A
    state that the forward pass wrote to (also through .data) is refused."""
    kept = [(name, t, t.data) for name, t in capture.state_tensors()]
    if double:
        for _, tensor, data in kept:
            if data.is_floating_point():
                tensor.data = data.double()
    before = [(name, t, t.detach().clone()) for name, t, _ in kept]
    capture.collector = _RowNorms(capture)
    try:
        with torch.autocast(capture.collector.total.device.type, enabled=False), _full_products():
            yield
    finally:
        changed = [name for name, t, old in before if not same_contents(t, old)]
        for (_, tensor, data), (_, _, old) in zip(kept, before, strict=True):
            if double:
                tensor.data = data
            elif not same_contents(tensor, old):
                tensor.data.copy_(old)
        if changed:  # also in place of another refusal, which may only be its consequence
            raise kept_by_forward(type(capture.module).__name__, changed[0])


@contextmanager
def _full_products() -> Iterator[None]:
    """No TF32, whose rounding would hide small differences."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept


def _fits_in_double(module: nn.Module) -> bool:
    return sum(p.numel() for p in module.parameters()) <= _MOST_IN_DOUBLE


class _NoChance(TorchFunctionMode):
    """Random numbers are fixed, the same for every row: what is left depends on the rows alone.
    The branches that the model takes are noted."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = name_of(func)
        if name in _RECURRENT and len(args) == 9:
            args = (*args[:5], 0.0, *args[6:])
        elif name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
            args = args[:4] if len(args) > 4 else args
        stand_in = _STAND_INS.get(name)
        if stand_in is None:
            out = func(*args, **kwargs)
            if self._capture.paused and isinstance(out, bool) and name in VALUES:
                self._capture.tracker.answered(out)
            return out
        return stand_in(func, args, kwargs)


def _copied(_: Any, args: Any, kwargs: Any) -> Any:
    value = kwargs["input"] if "input" in kwargs else args[0]
    return value.clone()


def _filled(content: float) -> Callable[[Any, Any, Any], Any]:
    def stand_in(func: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            out = func(*args, **kwargs)
            return out.fill_(content)

    return stand_in


def _backwards(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs).sort(descending=True).values


def _gumbel(_: Any, args: Any, kwargs: Any) -> Any:
    names = ("logits", "tau", "hard", "eps", "dim")
    given = {"tau": 1.0, "dim": -1, **dict(zip(names, args, strict=False)), **kwargs}
    return F.softmax(given["logits"] / given["tau"], given["dim"])


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_STAND_INS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(
        "dropout dropout_ alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d "
        "feature_dropout rrelu".split(),
        _copied,
    ),
    **dict.fromkeys(
        "rand randn rand_like randn_like normal normal_ uniform_ exponential_ log_normal_ "
        "cauchy_".split(),
        _filled(0.37),
    ),
    **dict.fromkeys(
        "randint randint_like random_ bernoulli bernoulli_ geometric_".split(), _filled(1)
    ),
    "randperm": _backwards,
    "gumbel_softmax": _gumbel,
}
