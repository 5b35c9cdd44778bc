"""What a model in shards must be for private training, and what goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from vestige.errors import ConfigError, UnsupportedModel
from vestige.gradients.shards import fsdp_hooks, is_sharded, managed, own_part, own_rows
from vestige.methods import Method
from vestige.updates.adam import AdamBC

if TYPE_CHECKING:
    from vestige.engine.build import Ingredients
    from vestige.parallel.ranks import Ranks
    from vestige.plan import PrivacyPlan

_REMEDY = (
    "keep what is trained whole on every rank (fully_shard(..., ignored_params=...)), where "
    "everything goes together"
)


def check_shards(module: nn.Module) -> None:
    """Refuse shards that are not FSDP2's, and trained ones beside whole ones.

    Parameters that an evaluation has left gathered go back into their shards first.
    """
    for owner in managed(module):
        owner.reshard()  # type: ignore[operator]
    known = {
        place for owner, places in managed(module).items() if fsdp_hooks(owner) for place in places
    }
    trained: dict[bool, str] = {}
    for owner, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            name, sharded = f"{owner}.{key}".lstrip("."), is_sharded(parameter)
            if sharded and (part, key) not in known:
                raise UnsupportedModel(
                    f"parameter {name!r} is a DTensor that no fully_shard manages: its products "
                    "would be sums over ranks that nobody follows. Shard models by "
                    "torch.distributed.fsdp.fully_shard(MODULE) alone, one module at a time."
                )
            if parameter.requires_grad:
                trained.setdefault(sharded, name)
    if len(trained) > 1:
        raise UnsupportedModel(
            f"parameter {trained[True]!r} is trained in shards and {trained[False]!r} as a whole: "
            "shard all that is trained (fully_shard on the root, too), or none of it "
            "(fully_shard(..., ignored_params=...))."
        )


def check_trained_shards(
    made: Ingredients, method: Method, plan: PrivacyPlan, ranks: Ranks
) -> None:
    """Refuse what does not go with trained parameters in shards: nothing where they are whole."""
    sharded = [slot for slot in made.groups.slots if is_sharded(slot.parameter)]
    if not sharded:
        return
    from torch.distributed.tensor import Shard

    members = dist.get_process_group_ranks(ranks.group) if ranks.group else []
    for slot in sharded:
        parameter: Any = slot.parameter
        mesh, placements = parameter.device_mesh, parameter.placements
        straight = len(placements) == 1 and type(placements[0]) is Shard and placements[0].dim == 0
        fits = straight and mesh.mesh.tolist() == members
        if not fits or len(range(*own_rows(parameter))) != len(own_part(parameter)):
            raise UnsupportedModel(
                f"parameter {slot.name!r} is sharded as {placements} over {mesh}: trained "
                f"parameters must lie in shards of dimension 0, one on each of the ranks {members} "
                "in order. Shard over a mesh of one dimension with all ranks."
            )
    reason = _unfit(made, method, plan)
    if reason:
        raise ConfigError(f"parameters are trained in shards, and {reason}: {_REMEDY}.")


def _unfit(made: Ingredients, method: Method, plan: PrivacyPlan) -> str | None:
    """Why this run needs whole parameters; None if it does not."""
    name = f"method {method.name!r}"
    if made.geometry is not None:
        return f"{name} looks at the whole gradient of an example"
    if method.needs_closure:
        return f"{name} looks at a batch twice before its sum is shared"
    if type(method).noise is not Method.noise:
        return f"{name} keeps the noise of whole releases"
    if method.whole:
        return f"{name} {method.whole}"
    if isinstance(made.optimizer, AdamBC):
        return f"{type(made.optimizer).__name__} corrects whole parameters for their noise"
    for option, value in (
        ("averaging", plan.averaging),
        ("denoiser", made.denoiser),
        ("master_weights", made.master_weights or None),
    ):
        if value is not None:
            return f"{option}={value!r} keeps copies of whole parameters or releases"
    return None
