"""Where the key of a run may lie between ranks: tasks of `rank_program`."""

from __future__ import annotations

import base64
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.support.small_runs import private, run


def key_apart(folder):
    """What of a run's key the store of the group holds; and of a number that is put into it."""
    return _searched(folder / f"meeting.{dist.get_world_size()}")


def default_backend(folder):
    """The same with a group whose backend nobody has chosen. The last task: the group is gone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = folder / "meeting without a backend"
    dist.init_process_group(
        init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    return _searched(store) | {"backend": dist.get_backend()}


def _searched(store):
    engine, *rest = private("dp-sgd", engine_options={"noise_seed": None})
    run(engine, *rest, 1)
    key = engine.door.randomness._key
    found = [name for name, form in _forms(key).items() if form in store.read_bytes()]
    dist.barrier()
    number = bytes(reversed(key))
    if dist.get_rank() == 0:
        for name, form in _forms(number).items():
            _get_default_store().set(name, form)
    dist.barrier()
    seen = [name for name, form in _forms(number).items() if form in store.read_bytes()]
    return {"found": found, "seen": seen}


def _forms(key):
    """The key as it may be written down; half of it is too much, too."""
    half = key[:16]
    return {
        "raw": half,
        "hex": half.hex().encode(),
        "base64": base64.b64encode(half)[:20],
        "repr": repr(half)[2:-1].encode(),
    }
