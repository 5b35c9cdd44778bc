"""One compiled graph of a model's forward and backward pass, with the rules inside.

Dynamo turns the model's forward into a graph of torch's operations. AOTAutograd traces that graph
with tensors that have shapes and no contents, and runs it here under a capture of its own: every
operation meets its rule and the tracker, whose labels hold for any number of rows, because that
number is a symbol. What a rule does with an output gradient is traced, too, so that Inductor fuses
it; what it ends in, a `Use`, is taken apart into its tensors. They arrive in the compiled backward
pass by an operator, `vestige::arrive`, which puts the use together again and hands it to the
collector. Norms, clipping and sums are those of any other pass.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch.overrides import TorchFunctionMode

from vestige.errors import PrivacyError, UnsupportedModel
from vestige.gradients.backward import Forward, exact
from vestige.gradients.capture import Capture
from vestige.gradients.collector import ForwardRecord
from vestige.gradients.groups import Slot
from vestige.gradients.refs import Ref, Source
from vestige.gradients.rows import Label, Rows
from vestige.gradients.rules.base import Uses
from vestige.gradients.tracker import Tracker
from vestige.gradients.uses import PerExample, Use, Viewed

NUMBERS = itertools.count(1)  # of graphs and of forward passes: none is used twice
_GRAPHS: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_get_data_attr = getattr(torch._C._autograd, "_get_data_attr", None)  # what Dynamo makes of .data
# Gradients are held until the backward pass ends, so nobody may write to their memory before.
# A replayed CUDA graph would not call the operator by which gradients arrive.
_MEMORY = {"allow_buffer_reuse": False, "inplace_buffers": False, "triton.cudagraphs": False}


class MissedError(Exception):
    """No graph fits the model and what it is given now."""


# -- uses in pieces ---------------------------------------------------------------------------


def taken_apart(use: Use, tensors: list[Tensor]) -> Callable[[Sequence[Tensor]], Use]:
    """Add the use's tensors to `tensors`; the result makes the same use of others instead."""
    places: dict[str, int] = {}
    inner: dict[str, Callable[[Sequence[Tensor]], Use]] = {}
    frame = copy.copy(use)
    for name, value in vars(use).items():
        if isinstance(value, Tensor):
            known = (i for i, tensor in enumerate(tensors) if tensor is value)
            places[name] = next(known, len(tensors))
            if places[name] == len(tensors):
                tensors.append(value)
            setattr(frame, name, None)
        elif isinstance(value, Use):
            inner[name] = taken_apart(value, tensors)
            setattr(frame, name, None)
        elif any(
            isinstance(v, torch.SymInt) for v in (value if isinstance(value, tuple) else [value])
        ):
            raise UnsupportedModel(f"a gradient whose {name} follows the number of rows")

    def together(given: Sequence[Tensor]) -> Use:
        made = copy.copy(frame)
        for name, at in places.items():
            setattr(made, name, given[at])
        for name, build in inner.items():
            setattr(made, name, build(given))
        return made

    return together


class _Site:
    """Where an output gradient arrives in a graph."""

    def __init__(self, slots: list[Slot], uses: Callable[[Tensor], Uses]) -> None:
        self.slots, self.uses = slots, uses
        self._parts: list[tuple[Slot, Callable[[Sequence[Tensor]], Use]]] = []

    def take_apart(self, g: Tensor) -> list[Tensor]:
        """The tensors of the uses that `g` makes."""
        tensors: list[Tensor] = []
        self._parts = [(slot, taken_apart(use, tensors)) for slot, use in self.uses(g)]
        return tensors

    def put_together(self, tensors: Sequence[Tensor], weight: float) -> Uses:
        """The uses, `weight` times, of tensors that have contents."""
        uses = [(slot, build(tensors)) for slot, build in self._parts]
        if weight != 1:
            for _, use in uses:
                _scale(use, weight)
        return uses


def _scale(use: Use, weight: float) -> None:
    if isinstance(use, Viewed):
        _scale(use.use, weight)
    else:
        name = "values" if isinstance(use, PerExample) else "g"
        setattr(use, name, getattr(use, name) * weight)


@torch.library.custom_op("vestige::arrive", mutates_args=())
def _arrive(tensors: list[Tensor], anchor: Tensor, graph: int, site: int) -> Tensor:
    _GRAPHS[graph].arrive(tensors, int(anchor), site)
    return torch.zeros_like(anchor)


@_arrive.register_fake
def _(tensors: list[Tensor], anchor: Tensor, graph: int, site: int) -> Tensor:
    return torch.empty_like(anchor)


class _Tap(torch.autograd.Function):
    """Hands the output gradient to a site on its way; the anchor's gradient keeps that alive."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, graph: Traced, site: int) -> Tensor:
        ctx.at = graph, anchor.detach(), site
        return out.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        graph, anchor, site = ctx.at
        return g, graph.arrived(g, anchor, site), None, None


# -- while a graph is traced ------------------------------------------------------------------


class Traced(Capture):
    """The rules on tensors without contents, while the graph of `capture`'s model is traced."""

    traced = True

    def __init__(self, capture: Capture, number: int, inputs: Sequence[Any]) -> None:
        TorchFunctionMode.__init__(self)
        self.groups, self.axis, self._dtype = capture.groups, capture.axis, capture.dtype
        self.inside, self.recomputation = capture.inside, capture.recomputation
        self.shards, self.meet = capture.shards, None
        self._batched_constants = capture._batched_constants
        self._device, self.paused, self._stream = capture._device, False, None
        slots = {id(slot.parameter): slot for slot in capture.groups.slots}
        self._number, self.slots = number, [slots.get(id(value)) for value in inputs]
        labels = [capture.tracker.label(t) if isinstance(t, Tensor) else None for t in inputs]
        self.given = [_stride(label, "is given") for label in labels]
        self._place = next(
            (i, place[0])
            for i, label in enumerate(labels)
            if isinstance(label, Rows)
            and (place := label.place(inputs[i].shape)) is not None
            and inputs[i].shape[place[0]] == capture.rows
        )  # of an axis that is as long as the batch
        self.sites: list[_Site] = []
        self.strides: list[int | None] = []  # of the results' rows

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], anchor: Tensor) -> Any:
        """Run the graph once, by the rules."""
        self.sites, self._shared, self._anchor = [], {}, anchor
        self.tracker = Tracker(gm)  # which holds constants, and no parameters
        pairs = zip(inputs, self.slots, strict=True)
        self._sources = {id(tensor): Source(slot, tensor) for tensor, slot in pairs if slot}
        rows = inputs[self._place[0]].shape[self._place[1]]
        self._forward = Forward(rows, None, ForwardRecord())
        self.tracker.learning = True
        self.tracker.end()  # from now on a tensor that no operation made is refused
        self.tracker.learning = False
        self.tracker.begin(rows, (), self.axis, set())
        for tensor, stride in zip(inputs, self.given, strict=True):
            if isinstance(tensor, Tensor):
                self.tracker.give(tensor, None if stride is None else Rows(stride, rows))
        with self:
            results = gm(*inputs)
        labels = [self.tracker.label(t) if isinstance(t, Tensor) else None for t in results]
        self.strides = [_stride(label, "returns") for label in labels]
        for result, stride in zip(results, self.strides, strict=True):
            if stride is None and isinstance(result, Tensor) and result.requires_grad:
                raise UnsupportedModel("it returns something of parameters that all rows share")
        return results

    @property
    def dtype(self) -> torch.dtype:
        """The precision that sums are kept in."""
        return self._dtype

    def tap(
        self, out: Tensor, refs: Sequence[Ref | None], uses: Callable[[Tensor], Uses]
    ) -> Tensor:
        self.sites.append(_Site([ref.slot for ref in refs if ref], uses))
        at = len(self.sites) - 1
        return _Tap.apply(out, self._anchor, self, at)  # type: ignore[no-any-return, no-untyped-call]

    def repeated(
        self, value: Tensor, size: Sequence[int], ref: Ref, uses: Callable[[Tensor], Uses]
    ) -> Tensor:
        return self.tap(value.expand(size), [ref], uses)

    def squares(self, g: Tensor) -> None:
        """Left to the use, which has numbers to look at."""

    @property
    def any_rows(self) -> bool:
        """Whether the trace holds for other numbers of rows."""
        return isinstance(self.rows, torch.SymInt) and self.rows.node.maybe_as_int() is None

    def arrived(self, g: Tensor, anchor: Tensor, site: int) -> Tensor:
        with exact(self._device):
            tensors = self.sites[site].take_apart(g)
            made: Tensor = torch.ops.vestige.arrive(tensors, anchor, self._number, site)
        return made


def _stride(label: Label | None, verb: str) -> int | None:
    """Where the rows of what a graph is given or gives are, whatever their number."""
    if label is None:
        return None
    if isinstance(label, Rows) and label.order is None and type(label.stride) is int:
        return label.stride
    raise UnsupportedModel(f"it {verb} a tensor in which not every entry has one row of the batch")


class Graph:
    """One graph of a model, compiled."""

    def __init__(self, capture: Capture, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._capture = capture
        self.number = next(NUMBERS)
        if any(node.target is _get_data_attr for node in gm.graph.nodes):
            raise UnsupportedModel("it writes to .data, whose changes no operation shows")
        traced = Traced(capture, self.number, inputs)
        anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self._run = _inductor(gm, traced, [*inputs, anchor])
        if not traced.any_rows:
            raise UnsupportedModel("its operations fix the number of rows")
        self._sites, self._strides = traced.sites, traced.strides
        self._given = list(zip(traced.slots, traced.given, strict=True))
        for site in self._sites:
            del site.uses  # what it holds of the trace
        _GRAPHS[self.number] = self

    def __call__(self, *inputs: Any) -> Any:
        """Run it for the forward pass that is under way; MissedError if other parameters or rows
        are given to it than it was made for."""
        capture, number = self._capture, next(NUMBERS)
        for value, (slot, stride) in zip(inputs, self._given, strict=True):
            if isinstance(value, Tensor) and not self._fits(value, slot, stride):
                raise MissedError
        forward = capture.numbered[number] = capture.forward
        for site in self._sites:
            forward.record.note(site.slots)
        anchor = torch.tensor(float(number), dtype=torch.float64, requires_grad=True)
        results = self._run(*inputs, anchor)
        # What the backward pass reads may be a view of these, and is not checked by torch itself.
        tensors = [t for t in (*inputs, *results) if isinstance(t, Tensor)]
        forward.versions += [(tensor, tensor._version) for tensor in tensors]
        for result, stride in zip(results, self._strides, strict=True):
            if isinstance(result, Tensor):
                label = None if stride is None else Rows(stride, capture.rows)
                capture.tracker.give(result, label)
        return results

    def _fits(self, value: Tensor, slot: Slot | None, stride: int | None) -> bool:
        if slot is not None:
            return value is slot.parameter
        label = self._capture.tracker.label(value)
        if label is None or stride is None:
            return label is None and stride is None
        return isinstance(label, Rows) and label.same(Rows(stride, self._capture.rows))

    def arrive(self, tensors: Sequence[Tensor], number: int, at: int) -> None:
        """The tensors of a site's uses have come, in the backward pass of forward `number`."""
        site = self._sites[at]

        def uses(weight: float) -> Uses:
            return site.put_together(tensors, weight)

        forward = self._capture.numbered.get(number)
        if forward and any(tensor._version != version for tensor, version in forward.versions):
            raise PrivacyError(
                "an input or an output of the model was changed in place between forward and "
                "backward, and a compiled graph reads both: work on a copy, or leave compile out."
            )
        self._capture.arrive(forward, site.slots, uses)


def _inductor(gm: fx.GraphModule, traced: Traced, inputs: list[Any]) -> Callable[..., Any]:
    """The graph, run by `traced`, as Inductor compiles it; the last of its inputs is the anchor."""

    def run(*given: Any) -> Any:
        return traced(gm, given[:-1], given[-1])

    graph = fx.Graph()
    places = []
    for node in (node for node in gm.graph.nodes if node.op == "placeholder"):
        place = graph.placeholder(node.name)
        place.meta = dict(node.meta)
        places.append(place)
    results = graph.call_function(run, (*places, graph.placeholder("anchor")))
    (output,) = next(node for node in gm.graph.nodes if node.op == "output").args
    graph.output(
        tuple(graph.call_function(operator.getitem, (results, i)) for i in range(len(output)))
    )
    whole = fx.GraphModule(gm, graph)
    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
        compiled: Any = compile_fx(whole, inputs, config_patches=_MEMORY)
    return compiled  # type: ignore[no-any-return]
