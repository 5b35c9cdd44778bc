"""Checkpoints of sharded models: whole tensors, so that any number of ranks can go on from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from vestige.gradients.groups import Groups
from vestige.gradients.shards import is_sharded, like_shard, own_groups, own_places, whole

_FLAT = ("ring", "trend")  # of a history: flat vectors, of which every rank has its part


def gathered(state: Any) -> Any:
    """The state with whole tensors in the place of shards: a message of all ranks for each."""
    return pytree.tree_map(lambda v: whole(v) if is_sharded(v) else v, state)


def scattered(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors as this rank's shards of them, where `like` has shards under the same name."""
    return {name: shard_of(value, like.get(name)) for name, value in state.items()}


def shard_of(value: Any, like: Any) -> Any:
    """This rank's part of `value` where `like` is a shard of such a tensor; else all of it."""
    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank everybody cuts its part out of its own copy, and nothing is sent.
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def own_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved state whose tensors are in shards where the parameters are."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    of = dict(zip(numbers, held, strict=True))
    return {
        **state,
        "state": {
            number: {name: shard_of(value, of.get(number)) for name, value in one.items()}
            for number, one in state["state"].items()
        },
    }


def whole_history(state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """An engine's state with the whole past releases of a memory, by messages of all ranks."""
    own = own_groups(groups)
    if own is groups or "memory" not in state:
        return state

    def all_of(part: Tensor) -> Tensor:
        rows = part.reshape(-1, own.size)
        gathered = part.new_empty(len(rows), groups.size)
        for slot, here in zip(groups.slots, own.slots, strict=True):
            for to, row in zip(gathered, rows, strict=True):
                shard = like_shard(here.view(row).to(slot.parameter.device), slot.parameter)
                slot.view(to).copy_(whole(shard))
        return gathered.reshape(*part.shape[:-1], groups.size)

    return _with_history(state, all_of)


def own_history(state: Mapping[str, Any], groups: Groups) -> Mapping[str, Any]:
    """An engine's state with this rank's part of past releases."""
    places = own_places(groups)
    if places is None or "memory" not in state:
        return state

    def part_of(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 1 or value.shape[-1] != groups.size:
            return value  # refused by whoever is to take it
        return torch.cat([value[..., first:last] for first, last in places.ranges], -1)

    return _with_history(state, part_of)


def _with_history(state: Mapping[str, Any], change: Any) -> dict[str, Any]:
    memory = state["memory"]
    history = memory.get("history") if isinstance(memory, Mapping) else None
    if not isinstance(history, Mapping):
        return dict(state)
    changed = {name: change(history[name]) for name in _FLAT if name in history}
    return {**state, "memory": {**memory, "history": {**history, **changed}}}
