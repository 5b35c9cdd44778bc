"""Partition of the trainable parameters into groups that are clipped on their own.

`"flat"` is one group of everything; `"per_layer"` one group per module that owns trainable
parameters (weight and bias together), in the order of `named_modules()`; a partition is a sequence
of sequences of parameter names or of parameters, or a mapping from group name to those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from vestige.errors import ConfigError, PrivacyError

Partition = str | Sequence[Sequence[str | Tensor]] | Mapping[str, Sequence[str | Tensor]]


@dataclass(frozen=True)
class Slot:
    """One trainable parameter and its place in the flat buffer."""

    name: str
    parameter: Tensor
    group: int
    start: int
    shard_of: Tensor | None = None  # where `parameter` is this process's part of one

    @property
    def stop(self) -> int:
        """The end of the parameter's segment."""
        return self.start + self.parameter.numel()

    @property
    def trained(self) -> Tensor:
        """The parameter as the optimizer has it."""
        return self.parameter if self.shard_of is None else self.shard_of

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's segment of a flat buffer, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True)
class Groups:
    """The trainable parameters, ordered so that every group is one contiguous segment."""

    names: tuple[str, ...]
    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        """The number of groups, G."""
        return len(self.names)

    @property
    def size(self) -> int:
        """The number of trainable numbers, P."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def ids(self) -> set[int]:
        """The identities of the trainable parameters."""
        return {id(slot.parameter) for slot in self.slots}

    def segments(self) -> list[slice]:
        """Each group's segment of the flat buffer."""
        starts = [min(s.start for s in self.slots if s.group == g) for g in range(self.count)]
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], self.size], strict=True)]

    def buffer(self) -> Tensor:
        """A zero flat buffer in the wider of float32 and the parameters' dtype."""
        first = self.slots[0].parameter
        dtype = torch.float32
        for slot in self.slots:
            dtype = torch.promote_types(dtype, slot.parameter.dtype)
        return torch.zeros(self.size, dtype=dtype, device=first.device)

    def check_unchanged(self, module: nn.Module) -> None:
        """Refuse if the trainable set is no longer the one the plan was made for."""
        planned = self.ids
        if planned == {id(p) for p in module.parameters() if p.requires_grad}:
            return
        now = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        added = [name for key, name in now.items() if key not in planned]
        gone = [s.name for s in self.slots if id(s.parameter) not in now]
        if added or gone:
            change = "; ".join(
                f"{what}: {', '.join(names)}"
                for what, names in (("newly trainable", added), ("no longer trainable", gone))
                if names
            )
            raise PrivacyError(
                f"the set of trainable parameters changed after make_private ({change}). The clip "
                "bound and the noise were fixed for the old set: freeze or unfreeze parameters "
                "first, then call make_private of a new PrivacyEngine(ledger=engine.ledger), "
                "which goes on counting."
            )


def partition(module: nn.Module, clipping: Partition) -> Groups:
    """Split the trainable parameters of `module` into groups.

    Raises ConfigError if a partition names a parameter twice, misses one, or names a frozen or
    unknown one.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError(
            "the model has no trainable parameter (every requires_grad is False): "
            "unfreeze at least one before make_private."
        )
    if isinstance(clipping, str):
        groups = _named_partition(module, clipping, trainable)
    else:
        groups = _explicit_partition(clipping, trainable)
    slots, start = [], 0
    for index, members in enumerate(groups.values()):
        for name in members:
            slots.append(Slot(name, trainable[name], index, start))
            start += trainable[name].numel()
    return Groups(tuple(groups), tuple(slots))


def _named_partition(
    module: nn.Module, clipping: str, trainable: Mapping[str, nn.Parameter]
) -> dict[str, list[str]]:
    if clipping == "flat":
        return {"all": list(trainable)}
    if clipping != "per_layer":
        raise ConfigError(
            f"clipping={clipping!r} is unknown: use 'flat', 'per_layer', 'auto', "
            "'auto_per_layer', 'quantile', 'quantile_per_layer', or a partition, a sequence of "
            "sequences of parameter names."
        )
    names = {id(p): name for name, p in trainable.items()}
    groups: dict[str, list[str]] = {}
    for owner, submodule in module.named_modules():
        # A tied parameter belongs to the first module that owns it.
        parameters = submodule.parameters(recurse=False)
        members = [names.pop(id(p)) for p in parameters if id(p) in names]
        if members:
            groups[owner or "(root)"] = members
    return groups


def _explicit_partition(
    clipping: Sequence[Sequence[str | Tensor]] | Mapping[str, Sequence[str | Tensor]],
    trainable: Mapping[str, nn.Parameter],
) -> dict[str, list[str]]:
    by_id = {id(p): name for name, p in trainable.items()}
    named = (
        dict(clipping)
        if isinstance(clipping, Mapping)
        else {f"group {i}": members for i, members in enumerate(clipping)}
    )
    groups: dict[str, list[str]] = {}
    seen: set[str] = set()
    for label, members in named.items():
        groups[label] = []
        if isinstance(members, str | Tensor):
            raise ConfigError(
                f"the partition's group {label!r} is a single {type(members).__name__}: "
                "give each group as a sequence of parameter names."
            )
        for member in members:
            name = member if isinstance(member, str) else by_id.get(id(member), "")
            if name not in trainable:
                raise ConfigError(
                    f"the partition's group {label!r} names {member if name else 'a tensor'!r}, "
                    f"which is not a trainable parameter; those are: {', '.join(trainable)}."
                )
            if name in seen:
                raise ConfigError(f"the partition names parameter {name!r} twice: keep one.")
            seen.add(name)
            groups[label].append(name)
    missing = [name for name in trainable if name not in seen]
    if missing or any(not members for members in groups.values()):
        problem = f"misses {', '.join(missing)}" if missing else "has an empty group"
        raise ConfigError(f"the partition {problem}: every trainable parameter needs one group.")
    return groups
