"""Models whose parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps in shards.

Such a parameter is a DTensor of which every rank holds some rows. While a block runs, FSDP has the
whole parameter, a plain tensor, in the DTensor's place. So the rules see whole weights, frozen or
not, and what FSDP does in between (gathering, casting, hooks of its own) is no operation of the
model: the rows of a tensor pass through it unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vestige.gradients.groups import Groups, Slot
from vestige.gradients.hooks import Guard
from vestige.gradients.refs import Source, tensors_in
from vestige.sampling.normals import Held

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a part of the tensor only. Imports nothing: where the module was
    never imported there is no such tensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without its history: all of a plain one."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, without its history: of a sharded one by a message of all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def dealt(count: int, world: int, rank: int) -> tuple[int, int]:
    """The rows, first and one past the last, that a rank gets of `count`, as torch deals them out:
    equal chunks, the last of which are shorter or empty."""
    chunk = -(-count // world)
    return min(rank * chunk, count), min((rank + 1) * chunk, count)


def own_rows(parameter: Tensor) -> tuple[int, int]:
    """The rows, first and one past the last, that this process has of a sharded parameter."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return dealt(parameter.shape[0], mesh.size(), mesh.get_local_rank())


def like_shard(own: Tensor, parameter: Tensor) -> Tensor:
    """`own` as this process's part of a tensor that is sharded as `parameter` is."""
    if not is_sharded(parameter):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def own_groups(groups: Groups) -> Groups:
    """This process's part of every parameter, side by side; `groups` where they are whole."""
    if not any(is_sharded(slot.parameter) for slot in groups.slots):
        return groups
    slots, start = [], 0
    for slot in groups.slots:
        part = own_part(slot.parameter)
        slots.append(Slot(slot.name, part, slot.group, start, slot.parameter))
        start += part.numel()
    return Groups(groups.names, tuple(slots))


def own_places(groups: Groups) -> Held | None:
    """Where this process's parts lie in the flat vector of all; None where they are whole."""
    if own_groups(groups) is groups:
        return None
    ranges = []
    for slot in groups.slots:
        row = slot.parameter.numel() // max(1, slot.parameter.shape[0])
        first, last = own_rows(slot.parameter)
        if first < last:
            ranges.append((slot.start + first * row, slot.start + last * row))
    return Held(groups.size, tuple(ranges))


def managed(module: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """FSDP's modules in `module`, and the places of the parameters that each of them unshards."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}

    def walk(part: nn.Module, owner: nn.Module | None) -> None:
        owner = part if isinstance(part, kind) else owner
        if owner is not None:
            places = [(part, key) for key, p in part._parameters.items() if is_sharded(p)]
            found.setdefault(owner, []).extend(places)
        for child in part.children():
            walk(child, owner)

    walk(module, None)
    return found


def fsdp_hooks(owner: nn.Module) -> list[tuple[dict[int, Any], int, Any]]:
    """The hooks by which FSDP unshards and reshards a module: where each is kept, and itself."""
    stores: list[Any] = [owner._forward_pre_hooks, owner._forward_hooks]
    return [
        (hooks, number, hook)
        for hooks in stores
        for number, hook in hooks.items()
        if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")
    ]


class Shards:
    """The sharded parameters of a model that is captured."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._slots = {id(s.parameter): s for s in capture.groups.slots}
        self._wholes: dict[str, Tensor] = {}
        self._restore: list[tuple[dict[int, Any], int, Any]] = []
        self._guards: list[Any] = []
        self.eps = 0.0  # the coarsest rounding of a weight, as FSDP gathers and casts it
        # Tensors that come and go while the model runs.
        self.passing = {id(p) for p in capture.module.parameters() if is_sharded(p)}

    def whole(self, slot: Slot) -> Tensor:
        """The tensor that stands for a parameter while the model runs."""
        return self._wholes.get(slot.name, slot.parameter)

    def attach(self) -> Shards:
        """Put FSDP's hooks aside from what is captured."""
        for owner, places in managed(self._capture.module).items():
            named = [
                (part, key, self._slots.get(id(part._parameters[key]))) for part, key in places
            ]
            for hooks, number, hook in fsdp_hooks(owner):
                self._restore.append((hooks, number, hook))
                hooks[number] = self._aside(hook, named, hooks is owner._forward_pre_hooks)
        return self

    def remove(self) -> None:
        """Give FSDP its hooks back."""
        for hooks, number, hook in self._restore:
            if number in hooks:
                hooks[number] = hook
        for guard in self._guards:
            guard.remove()
        self._restore, self._guards = [], []

    def _aside(
        self, hook: Callable[..., Any], named: list[tuple[nn.Module, str, Slot | None]], first: bool
    ) -> Callable[..., Any]:
        def call(module: nn.Module, *given: Any) -> Any:
            with torch._C.DisableTorchFunction(), self._capture.passing():
                out = hook(module, *given)
                for part, key, slot in named:
                    self._note(part._parameters[key], slot)
            if self._capture.watching:
                # The first hook hands on arguments, (args, kwargs), the last the output.
                self._pass_on(given if first else given[-1], out)
            return out

        call.__self__ = hook.__self__  # type: ignore[attr-defined]  # still known as FSDP's
        return call

    def _note(self, tensor: Any, slot: Slot | None) -> None:
        """A parameter is there as a whole for the first time."""
        if tensor is None or id(tensor) in self.passing or is_sharded(tensor):
            return
        self.passing.add(id(tensor))
        if tensor.is_floating_point():
            self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        self._capture.tracker.registered.add(id(tensor))
        if slot is not None:
            self._wholes[slot.name] = tensor
            self._capture.stand_in(Source(slot, tensor))
            self._guards.append(tensor.register_hook(Guard(slot.name)))

    def _pass_on(self, before: Any, after: Any) -> None:
        tracker = self._capture.tracker
        for old, new in zip(tensors_in(before), tensors_in(after), strict=True):
            if new is not old:
                tracker.give(new, tracker.label(old))
