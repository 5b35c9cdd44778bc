"""What one rank of several does, forked by `ranks.py`.

World 0 is one process without a group. What a task returns lands in FOLDER/TASK.RANK.pt.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_runs import N, closure_of, flat, net, private, run
from vestige import PrivacyEngine
from vestige.compat.faces import run_of
from vestige.engine.public_schedule import NoiseSchedule
from vestige.errors import VestigeError
from vestige.methods import METHODS
from vestige.parallel.ranks import Ranks
from vestige.privacy.ledger import Ledger

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
    engine, *rest = private("dp-sgd", sample_rate=2 / N)
    run(engine, *rest, 200)
    return {"weights": flat(rest[0].parameters()), "released": engine.released}


def own_seeds(folder):
    """Every rank has other weights and another seed before make_private."""
    torch.manual_seed(os.getpid())
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    engine, *rest = private("dp-sgd", model=model, engine_options={"noise_seed": None})
    run(engine, *rest, 5)
    return {"weights": flat(model.parameters())}


def noise(folder):
    """Releases of no records: noise alone."""
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
    return {"values": engine.door.last[0] / 2e-9}


def sharded(folder):
    """As `inclusion`, where every rank has records of its own, some more than others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cuts = [round(N * (r / world) ** 0.8) for r in range(world + 1)]
    return inclusion(folder, slice(cuts[rank], cuts[rank + 1]), sharded=True, dataset_size=N)


def inclusion(folder, own=slice(None), **options):
    """Which records each rank is handed, over many lots."""
    x = torch.arange(N).double()[:, None].repeat(1, 5)
    data = TensorDataset(x[own], torch.zeros(N).long()[own])
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=(model := net()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    lots = []
    while engine.released < 150:
        for x, y in loader:
            lots.append([] if engine._run.capture.batch.empty else x[:, 0].long().tolist())
            optimizer.step(closure_of(model, optimizer, x, y))
    return {"lots": lots, "weights": flat(model.parameters())}


def apart(folder):
    """Rank 1's weights change behind the back of the others."""
    engine, model, optimizer, loader = private("dp-sgd")
    for number, (x, y) in enumerate(loader):
        if number == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1e-9
        try:
            optimizer.step(closure_of(model, optimizer, x, y))
        except VestigeError as error:
            return {"error": str(error), "released": engine.released}
    return {"error": ""}


def other_order(folder):
    """Rank 1 has the records in another order."""
    order = torch.arange(N).roll(dist.get_rank())
    data = TensorDataset(*(tensor[order] for tensor in _data().tensors))
    model = net()
    return _refused(
        lambda: PrivacyEngine("rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    )


class Drawing(nn.Module):
    """Keeps what a forward pass draws."""

    def __init__(self):
        super().__init__()
        self.inner, self.drawn = net(), []

    def forward(self, x):
        self.drawn.append(torch.rand(4).tolist())
        return self.inner(x)


def masks(folder):
    """What the forward passes of three lots draw."""
    model = Drawing()
    engine, *rest = private("dp-sgd", model=model, self_check=False)
    run(engine, *rest, 3)
    return {"drawn": [tuple(numbers) for numbers in model.drawn]}


def other_noise(folder):
    """Rank 1 has a schedule that makes the noise small."""
    engine, model, optimizer, loader = private("dp-sgd")
    if dist.get_rank() == 1:
        NoiseSchedule(run_of(optimizer), [1e-3] * 50, "")
    try:
        run(engine, model, optimizer, loader, 1)
    except VestigeError as error:
        return {"error": str(error), "released": engine.released}
    return {"error": ""}


def forgotten(folder):
    """Rank 1 has trained before, on a ledger that rank 0 does not have."""
    ledger = Ledger()
    if dist.get_rank() == 1:
        ledger.charge(0.25, 1.0)
    try:
        private("dp-sgd", engine_options={"ledger": ledger})
    except VestigeError as error:
        return {"error": str(error), "left": ledger.steps}
    return {"error": ""}


def same_shards(folder):
    """Every rank has all records, and says that they are its own."""
    return _refused(lambda: private("dp-sgd", sharded=True, dataset_size=N))


def split_users(folder):
    """Users whose rows are on two ranks, and users that other ranks know by other ids."""
    rank, users = dist.get_rank(), torch.arange(N) // 2
    own = TensorDataset(*(tensor[rank::2] for tensor in _data().tensors))
    shards = {"sharded": True, "dataset_size": N // 2, "units": users[rank::2]}
    said = []
    for data, options in ((own, shards), (_data(), {"units": users + rank})):
        model = net()
        try:
            PrivacyEngine("rdp").make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=6),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                rows_per_unit=2,
                **options,
            )
            said.append("")
        except VestigeError as error:
            said.append(str(error))
    return {"errors": said}


def late_group(folder):
    """The group was made after make_private: here, the engine does not know of it."""
    engine, model, optimizer, loader = private("dp-sgd")
    engine._run.ranks = Ranks()
    try:
        run(engine, model, optimizer, loader, 1)
    except VestigeError as error:
        return {"error": str(error), "released": engine.released}
    return {"error": ""}


def other_settings(folder):
    """Rank 1 asks for less noise."""
    return _refused(lambda: private("dp-sgd", noise_multiplier=0.75 - 0.25 * dist.get_rank()))


def other_parameters(folder):
    """Rank 1 has frozen a layer, so that its sums are shorter."""
    model = net()
    model[0].requires_grad_(dist.get_rank() == 0)
    return _refused(lambda: private("dp-sgd", _of_trained, model))


def refused_on_one(folder):
    """Rank 1 has a model that is refused; rank 0 a number of steps."""
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double() if dist.get_rank() else net()
    said = [_refused(lambda: private("dp-sgd", model=model))["error"]]
    steps = 6 if dist.get_rank() else -1
    return {"errors": [*said, _refused(lambda: private("dp-sgd", steps=steps))["error"]]}


def _of_trained(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def _refused(act):
    """What `act` is refused with."""
    try:
        act()
    except VestigeError as error:
        return {"error": str(error)}
    return {"error": ""}


def exhausted(folder):
    """A budget that ends in the middle, with a ledger file that only rank 0 has."""
    engine = PrivacyEngine("rdp", ledger=folder / "ledger.jsonl")
    model = net()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_data(), batch_size=6),
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


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (N,), generator=generator))


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


class Raising(nn.Module):
    """Fails in the third lot, on rank 1."""

    def __init__(self):
        super().__init__()
        self.inner, self.passes = net(), 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 3 and dist.get_rank() == 1:
            raise RuntimeError("the third batch was too much")
        return self.inner(x)


def raises(folder):
    """The model of rank 1 raises, which ends its loop and its process."""
    return _until_it_ends(folder, Raising(), lambda: None)


def killed(folder):
    """Rank 1 waits for its end in the middle of a lot; rank 0 has charged it."""

    def wait():
        if dist.get_rank() == 1:
            (folder / "waiting").touch()
            time.sleep(600)

    return _until_it_ends(folder, net(), wait)


def _until_it_ends(folder, model, third):
    """What the ranks that go on are told, and how long they have waited for it."""
    engine = PrivacyEngine("rdp", ledger=folder / "ledger.jsonl")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_data(), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        steps=8,
        self_check=False,
    )
    began = 0.0
    try:
        for x, y in loader:
            if engine.released == 2:
                third()
            began = time.time()
            optimizer.step(closure_of(model, optimizer, x, y))
    except VestigeError as error:
        seconds = time.time() - began
        return {"error": str(error), "charged": engine.ledger.steps, "seconds": seconds}
    return {"error": ""}


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
    for one in task.split(","):
        torch.save((tasks or globals())[one](folder), folder / f"{one}.{rank}.pt")
    os._exit(0)  # a rank that is gone must not hold the others up
