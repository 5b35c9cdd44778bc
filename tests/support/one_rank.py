"""A process group of this process alone: sharded models as they are, without a second process."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


@contextmanager
def one_rank(folder, backend="gloo"):
    """A group of one."""
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_net(full=True, device="cpu"):
    """Two layers in shards, where there is a group; without `full` the first is frozen and the
    second whole."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device, torch.float64)
    net[0].requires_grad_(full)
    if dist.is_initialized():
        fully_shard(net[0])
        fully_shard(net, ignored_params=set() if full else set(net[2].parameters()))
    return net
