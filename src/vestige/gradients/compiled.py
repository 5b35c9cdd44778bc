"""compile=True: the model's forward and backward pass run as compiled graphs, where they can.

Graphs are made on synthetic rows, of a public number, before a lot's forward pass begins; so no
number of a lot is in them or in what Inductor writes to its cache. There every new graph is held
against the model as it runs otherwise: one row's cotangent gives every other row a norm of zero,
and, unless the model draws random numbers, outputs and gradients agree.

Guarantee: a forward pass runs by a graph only if Dynamo's guards say that the model would do now
what it did when that graph was made and checked. Otherwise it runs operation by operation, by the
rules, and all checks are made again before the next one. A model that cannot be traced as a whole,
or whose outputs are not one row to an example, always does, and says so once.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._dynamo import maybe_mark_dynamic
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from vestige.errors import UnsupportedModel
from vestige.gradients.capture import Capture
from vestige.gradients.graphs import NUMBERS, Graph, MissedError
from vestige.gradients.loss_watch import LossWatch
from vestige.gradients.recompute import without_checkpoints
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Rows
from vestige.gradients.self_check import aside
from vestige.gradients.synthetic import KINDS, RowMaker, own_randomness
from vestige.gradients.trial import RowNorms, Trial
from vestige.sampling.loader import Batch

_KNOWN = (Capture, LossWatch, DeviceContext)  # modes under which graphs can be used
_ENOUGH = 4
# Hooks that come or go later are noticed, too.
_GUARDED = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


class Compiled:
    """Runs the root's forward by compiled graphs; `rows` is a public number of rows.

    `recheck` asks for all checks before the next forward pass; `why` says why nothing is compiled.
    """

    def __init__(self, capture: Capture, rows: int) -> None:
        self._capture, self._rows = capture, max(rows, 2)
        self._graphs: list[Graph] = []
        self._building = self._first = self.recheck = False
        self._missed = 0  # the rows of the pass that no graph fitted
        self._in_vain = 0  # checks that made no graph: a few are enough
        self._odd: set[int] = set()  # numbers of rows that the graphs do not take
        self.why: str | None = None
        root, forward = capture.module, type(capture.module).forward
        self._own = forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                raise MissedError
            return forward(root, *args, **kwargs)

        # Dynamo keeps graphs by code: no other model has this one.
        call.__code__ = call.__code__.replace(co_name=f"forward_{next(NUMBERS)}")
        self._call = torch.compile(call, backend=self._backend, fullgraph=True, dynamic=False)

    @property
    def graphs(self) -> int:
        """How many graphs were made."""
        return len(self._graphs)

    def _backend(self, gm: fx.GraphModule, inputs: list[Any]) -> Graph:
        self._graphs.append(Graph(self._capture, gm, inputs))
        return self._graphs[-1]

    # -- before a forward pass ----------------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the graph for such a call, and check it; the call itself runs operation by
        operation."""
        again, before = self.recheck, self.graphs
        if self._capture.runs_row_by_row():
            self._give_up("a part of it has no gradient rule and runs row by row")
        if self.why is not None:
            self.recheck = False
            return
        self.recheck = True  # until it is done: whatever interrupts it, it is made again
        device = self._capture.collector.total.device
        with aside(self._capture), own_randomness(device), without_checkpoints():
            try:
                self._check(RowMaker(self._capture, (args, kwargs)))
            except MissedError:
                pass  # a graph whose guards hold is given others' parameters: there is none for it
            except Exception as error:  # a model that is refused is refused by its own pass
                inner = getattr(error, "inner_exception", error)
                self._give_up((str(inner).strip() or repr(inner)).splitlines()[0])
        self._first, self.recheck = True, False
        if again and self.graphs == before:
            self._odd.add(self._missed)
            self._in_vain += 1

    def _check(self, maker: RowMaker) -> None:
        """Two numbers of rows: what is right for one of them only would show."""
        primes = (n for n in itertools.count(self._rows) if _is_prime(n))
        for rows in itertools.islice((n for n in primes if n not in maker.lengths), 2):
            self._check_rows(maker, rows)

    def _check_rows(self, maker: RowMaker, rows: int) -> None:
        capture = self._capture
        capture.collector = collector = RowNorms(capture.groups)
        for kind in KINDS:
            trial = Trial(capture, maker.make(rows, kind, False), maker.batched, rows)
            if trial.begin() is None and trial.outputs:
                break
        else:
            raise UnsupportedModel("it returns no rows for synthetic inputs")
        row = rows - 1
        cotangents = [trial.outputs[at].masked(row) for at in trial.places]
        expected, _ = trial.backward([trial.leaves[at] for at in trial.places], cotangents, rows)
        outputs, again = self._run(trial), self._run(trial)
        targets = [again[at] for at in trial.places]
        total, squares = trial.backward(targets, cotangents, rows, again=False)
        squares[row] = 0
        if bool(squares.any()):
            raise UnsupportedModel("its graph gives a gradient of one example to another")
        pairs = [(trial.leaves[at], outputs[at], again[at]) for at in trial.places]
        if all(torch.equal(one, other) for _, one, other in pairs):  # no chance is in it
            tolerance = self._tolerance(collector.total)
            same = [_close(one, other, tolerance) for one, other, _ in pairs]
            if not (all(same) and _close(expected, total, tolerance)):
                raise UnsupportedModel("its graph gives other outputs or gradients")

    def _run(self, trial: Trial) -> list[Any]:
        """What the model returns for synthetic rows by its graph, which is made if need be."""
        capture = self._capture
        capture.collector.clear()
        capture.start(Batch(trial.rows))
        args, kwargs = trial.changed(lambda t: t.clone())
        self._building = True
        try:
            with torch.enable_grad():
                return pytree.tree_leaves(capture.module(*args, **kwargs))
        finally:
            self._building = False

    def _tolerance(self, total: Tensor) -> float:
        """What rounding may do to gradients in the precision that the model computes in."""
        narrow = torch.is_autocast_enabled(total.device.type) or total.is_cuda
        half = any(slot.parameter.element_size() < 4 for slot in self._capture.groups.slots)
        return 0.1 if half or narrow else 1e-3

    # -- a forward pass -----------------------------------------------------------------------

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While the root runs, its forward is this one's."""
        root = self._capture.module
        own = root.__dict__.get("forward")
        if own is not None and own != self._forward:
            self._give_up("it has a forward of its own on the instance")
        if self.why is not None or own is not None:
            yield
            return
        root.__dict__["forward"] = self._forward
        try:
            yield
        finally:
            root.__dict__.pop("forward", None)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        capture = self._capture
        root = capture.module
        watched = capture.watches and torch.is_grad_enabled() and capture.rows > 1
        unknown = _has_any_global_hook() or type(root).forward is not self._own
        if not watched or unknown or any(not isinstance(mode, _KNOWN) for mode in _modes()):
            return type(root).forward(root, *args, **kwargs)
        if self._building:
            for tensor in tensors_in((args, kwargs)):
                label = capture.tracker.label(tensor)
                place = label.place(tensor.shape) if isinstance(label, Rows) else None
                if place is not None:
                    maybe_mark_dynamic(tensor, place[0])
            with self._free_of_ours():
                return self._call(*args, **kwargs)
        first, self._first = self._first, False
        if not first and self.why is None and self._graphs and capture.rows not in self._odd:
            try:
                with self._free_of_ours(), torch.compiler.set_stance("eager_on_recompile"):
                    return self._call(*args, **kwargs)
            except MissedError:
                self._missed, self.recheck = capture.rows, self._in_vain < _ENOUGH
        return type(root).forward(root, *args, **kwargs)

    @contextmanager
    def _free_of_ours(self) -> Iterator[None]:
        """Vestige's own modes and methods are away for a while: Dynamo would trace them."""
        modes = _modes()
        _set_modes([mode for mode in modes if isinstance(mode, DeviceContext)])
        try:
            with self._capture.fallback.away(), _GUARDED:
                yield
        finally:
            _set_modes(modes)

    def _give_up(self, why: str) -> None:
        if self.why is None:
            self.why = why
            warnings.warn(
                f"compile=True: the model runs uncompiled, because {why.rstrip('.')}. The guarantee"
                " and the results are the same.",
                UserWarning,
                stacklevel=2,
            )


def _modes() -> list[Any]:
    """torch's stack of function modes, the innermost last."""
    return [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]


def _set_modes(modes: list[Any]) -> None:
    for _ in range(_len_torch_function_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _is_prime(n: int) -> bool:
    return all(n % k for k in range(2, int(n**0.5) + 1))


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    a, b = one.detach().double(), other.detach().double()
    return bool((a - b).norm() <= tolerance * (b.norm() + 1e-30))
