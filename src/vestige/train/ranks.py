"""`vestige train` in several processes, as torchrun starts them: rank 0 writes, the others help.

Every rank goes through the same run, since checkpoints and the ledger are steps of all of them. The
files of the others go to a folder of their own that is thrown away.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from vestige.train.config import TrainConfig

_PATIENCE = timedelta(minutes=10)  # the longest that ranks wait for each other


def leads() -> bool:
    """Whether this process is the one that people see: rank 0, or alone."""
    return not int(os.environ.get("RANK") or 0)


@contextlib.contextmanager
def joined(device: str) -> Iterator[str]:
    """While entered, the processes that torchrun has started are one group; the device of this."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield device
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if ":" not in device else device
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    if mine:
        store, rank, world = next(iter(rendezvous("env://", timeout=_PATIENCE)))
        # After a restart the store still has the addresses of the processes that have ended.
        own = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=_PATIENCE)
    try:
        yield device
    finally:
        if mine:
            dist.destroy_process_group()


@contextlib.contextmanager
def written(config: TrainConfig) -> Iterator[TrainConfig]:
    """The settings as this rank has them: others than rank 0 write where nobody looks."""
    if leads():
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        yield config.changed(out=Path(folder) / "run")
