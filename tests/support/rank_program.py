"""What one rank of several does, forked by `ranks.py`.

World 0 is one process without a group. What a task returns lands in FOLDER/TASK.RANK.pt.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import rank_faults, rank_secrets
from tests.support.rank_faults import records, refused
from tests.support.small_runs import N, closure_of, flat, net, private, run
from tests.support.spectra_runs import looked_at
from vestige import PrivacyEngine
from vestige.engine import fitting
from vestige.errors import VestigeError
from vestige.methods import METHODS
from vestige.sampling.forward_randomness import LotStream
from vestige.sampling.loader import LotSampler

VARIANTS = {
    "per layer": {"method": "dp-sgd", "clipping": "per_layer"},
    "quantile": {"method": "dp-sgd", "clipping": "quantile"},
    "in pieces": {"method": "fo", "max_physical_batch_size": 2},
    "measured in pieces": {"method": "dp-is", "max_physical_batch_size": 2},
    "budget": {"method": "dp-sgd", "max_epsilon": 50.0, "delta": 1e-3},
    "averaged": {"method": "sma", "averaging": "ema"},
    "users": {"method": "dp-sgd", "units": torch.arange(N) // 2, "rows_per_unit": 3},
}


def releases(method, steps=3, **options):
    """The values of every release, and the weights after them."""
    engine, *rest = private(method, steps=steps, self_check=False, **options)
    seen = []

    def after():
        if len(seen) < engine.released:
            seen.append(engine.door.last[0].clone())

    run(engine, *rest, steps, after)
    counts = [engine.ledger.steps, engine.get_epsilon(1e-3)]
    return {"releases": seen, "weights": flat(rest[0].parameters()), "counts": counts}


def methods(folder):
    """Every registered method, and what a run may have beside it."""
    every = {name: releases(name) for name in METHODS}
    return every | {name: releases(**options) for name, options in VARIANTS.items()}


def tiny_lots(folder):
    """200 lots of two records on average: most shares are empty."""
    reached = {}
    for method in ("dp-sgd", "fo"):
        engine, *rest = private(method, sample_rate=2 / N)
        run(engine, *rest, 200)
        reached[method] = {"weights": flat(rest[0].parameters()), "released": engine.released}
    return reached


def own_seeds(folder):
    """Every rank has other weights and another seed before make_private."""
    torch.manual_seed(os.getpid())
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    engine, *rest = private("dp-sgd", model=model, engine_options={"noise_seed": None})
    run(engine, *rest, 5)
    return {"weights": flat(model.parameters())}


def noise(folder):
    """Noise alone, where all ranks have set one seed, and where each has set its own."""
    return {"values": [_noise_after(seed) for seed in (0, dist.get_rank())]}


def _noise_after(seed):
    """A release of no records, in units of the noise."""
    torch.manual_seed(seed)
    data = TensorDataset(torch.zeros(N, 5).double(), torch.zeros(N, dtype=torch.int64))
    model = nn.Linear(5, 2000).double()
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=2.0,
        max_grad_norm=1e-9,
    )
    x, y = next(iter(loader))
    optimizer.step(closure_of(model, optimizer, x, y))
    return engine.door.last[0] / 2e-9


def sharded(folder):
    """As `inclusion`, where every rank has records of its own, some more than others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cuts = [round(N * (r / world) ** 0.8) for r in range(world + 1)]
    return inclusion(folder, slice(cuts[rank], cuts[rank + 1]), sharded=True, dataset_size=N)


def spectra(folder):
    """Which matrices this rank looks at for SMA."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)]
    return looked_at(nn.Sequential(*layers).double())


def inclusion(folder, own=slice(None), **options):
    """Which records each rank is handed, over many lots."""
    model = net()
    return {"lots": lots_of(model, own, **options), "weights": flat(model.parameters())}


def pieces(folder):
    """As `inclusion`, in physical batches of one record: none of them is a lot of its own."""
    return inclusion(folder, max_physical_batch_size=1)


def lots_of(model, own=slice(None), **options):
    """The records of this rank's share of 150 lots, whatever batches they come in."""
    x = torch.arange(N).double()[:, None].repeat(1, 5)
    data = TensorDataset(x[own], torch.zeros(N).long()[own])
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    lots = [[]]
    while engine.released < 150:
        for x, y in loader:
            lots[-1] += [] if engine._run.capture.batch.empty else x[:, 0].long().tolist()
            optimizer.step(closure_of(model, optimizer, x, y))
            lots += [[]] * (len(lots) == engine.released)
    return lots[:-1]


class Drawing(nn.Module):
    """Keeps what a forward pass draws."""

    def __init__(self):
        super().__init__()
        self.inner, self.drawn = net(), []

    def forward(self, x):
        self.drawn.append(torch.rand(4).tolist())
        return self.inner(x)


class Limited(nn.Module):
    """On a device that has room for 7 rows on rank 0, and for 5 on rank 1."""

    def __init__(self):
        super().__init__()
        self.inner, self.room = net(), 7 - 2 * dist.get_rank()

    def forward(self, x):
        if len(x) > self.room:
            raise torch.OutOfMemoryError("no room")
        return self.inner(x)


def as_many_as_fit(folder):
    """The rows that the ranks have found, and their weights."""
    tried = mock.patch.object(fitting, "foreseen", lambda steps, _: fitting.told(steps))
    with tried:
        engine, *rest = private("fo", model=Limited(), max_physical_batch_size="auto")
    run(engine, *rest, 3)
    rows = engine.plan.max_physical_batch_size
    return {"rows": rows, "weights": flat(rest[0].parameters())}


def masks(folder):
    """What the forward passes of three lots draw."""
    model = Drawing()
    engine, *rest = private("dp-sgd", model=model, self_check=False)
    run(engine, *rest, 3)
    return {"drawn": [tuple(numbers) for numbers in model.drawn]}


def dropout(folder):
    """What masks have kept in 150 lots; and a mutant, whose ranks all have the masks of rank 0."""
    own = _kept()

    def of_rank_zero(lots, lot):
        return LotStream(lots._randomness, lot, 0, lots.generators)

    with mock.patch.object(LotSampler, "stream", of_rank_zero):
        return {"own": own, "same": _kept()}


def _kept():
    """How often each of 40 inputs was kept by the masks of a lot, and how many records it had.

    Every input is 1 and no gradient is clipped: a weight's sum is twice how often its input was
    kept, the bias's is the number of records.
    """
    data = TensorDataset(torch.ones(N, 40).double())
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1)).double()
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=12),
        noise_multiplier=1e-9,
        max_grad_norm=100.0,
        loss_reduction="sum",
    )
    sums = []
    while engine.released < 150:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            sums.append(engine.door.last[0].clone())
    return {"kept": torch.stack(sums)[:, :40] / 2, "records": torch.stack(sums)[:, 40]}


def subgroup(folder):
    """The last two ranks train; the first is refused with their group."""
    members = [dist.get_world_size() - 2, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        return releases("fo", process_group=group) | {"error": ""}
    return refused(lambda: private("fo", process_group=group))


def resumed(folder):
    """The first release of each of two runs that go on from one checkpoint, with fresh noise."""
    path, fresh = folder / "resumed", {"noise_seed": None}
    engine, *rest = private("fo", steps=9, engine_options=fresh)
    run(engine, *rest, 3)
    engine.save_checkpoint(path)
    dist.barrier()  # rank 0 has written it
    firsts, lots = [], []
    for _ in range(2):
        engine, *rest = private("fo", steps=9, engine_options=fresh)
        engine.load_checkpoint(path)
        run(engine, *rest, 1)
        firsts.append(engine.door.last[0].clone())
        lots.append(engine.released)
    return {"firsts": firsts, "released": lots}


def exhausted(folder):
    """A budget that ends in the middle, with a ledger file that only rank 0 has."""
    engine = PrivacyEngine("rdp", ledger=folder / "ledger.jsonl")
    model = net()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_epsilon=6.0,
        delta=1e-3,
    )
    with contextlib.suppress(VestigeError):
        run(engine, model, optimizer, loader, 100)
    spent = engine.get_epsilon(1e-3)
    engine.close()
    return {"released": engine.released, "epsilon": spent, "file": engine.ledger.file is not None}


def straight(folder):
    """Nine steps without a break, and the weights after every third one."""
    engine, *rest = private("fo", steps=9)
    weights = []
    for _ in range(3):
        run(engine, *rest, 3)
        weights.append(flat(rest[0].parameters()))
    return {"weights": weights}


def saved(folder):
    """Three steps, or three more from the checkpoint that is there."""
    path, ledger = folder / "checkpoint", folder / "ledger.jsonl"
    engine, *rest = private("fo", steps=9, engine_options={"ledger": ledger})
    if path.exists():
        engine.load_checkpoint(path)
    run(engine, *rest, 3)
    engine.save_checkpoint(path)
    weights, charged = flat(rest[0].parameters()), engine.ledger.steps
    engine.close()
    return {"weights": weights, "released": engine.released, "charged": charged}


def main(task, rank, world, folder, tasks=None):
    """Do the tasks one after the other, in one group."""
    torch.set_num_threads(1)
    if world:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting.{world}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=300),
        )
    every = tasks or vars(rank_faults) | rank_faults.KILLED | vars(rank_secrets) | globals()
    for one in task.split(","):
        torch.save(every[one](folder), folder / f"{one}.{rank}.pt")
    os._exit(0)  # a rank that is gone must not hold the others up
