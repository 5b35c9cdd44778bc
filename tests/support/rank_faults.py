"""What ranks are refused, and how they end: tasks of `rank_program`."""

from __future__ import annotations

import functools
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from tests.support.small_runs import N, closure_of, net, private, run
from tests.support.spectra_runs import looked_at
from vestige import PrivacyEngine
from vestige.compat.faces import run_of
from vestige.engine.public_schedule import NoiseSchedule
from vestige.errors import VestigeError
from vestige.parallel.ranks import Ranks
from vestige.privacy.ledger import Ledger


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


def apart_spectra(folder):
    """Rank 1's weights change between two lots, so that it alone reads its spectra again."""
    return refused(lambda: looked_at(net(), changes=dist.get_rank() == 1))


class Hidden(Dataset):
    """Records that nobody can compare without reading them."""

    def __init__(self):
        self._records = records()

    def __len__(self):
        return N

    def __getitem__(self, place):
        return self._records[place]


def other_order(folder):
    """Rank 1 has the records in another order; by themselves, or in a Subset of what hides them."""
    order = torch.arange(N).roll(dist.get_rank())
    shown = TensorDataset(*(tensor[order] for tensor in records().tensors))
    return {"errors": [_of_records(shown), _of_records(Subset(Hidden(), order.tolist()))]}


def _of_records(data):
    model = net()
    told = refused(
        lambda: PrivacyEngine("rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    )
    return told["error"]


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
    return refused(lambda: private("dp-sgd", sharded=True, dataset_size=N))


def split_users(folder):
    """Users whose rows are on two ranks, and users that other ranks know by other ids."""
    rank, users = dist.get_rank(), torch.arange(N) // 2
    own = TensorDataset(*(tensor[rank::2] for tensor in records().tensors))
    shards = {"sharded": True, "dataset_size": N // 2, "units": users[rank::2]}
    said = []
    for data, options in ((own, shards), (records(), {"units": users + rank})):
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
    return refused(lambda: private("dp-sgd", noise_multiplier=0.75 - 0.25 * dist.get_rank()))


def other_generator(folder):
    """Rank 1 makes its noise in another way, by its engine; then where another torch is there."""
    other = dist.get_rank() == 1
    modes = {"secure_mode": other, "noise_seed": None}
    said = [refused(lambda: private("dp-sgd", engine_options=modes))]
    with mock.patch.object(torch, "__version__", "0.1") if other else nullcontext():
        said.append(refused(lambda: private("dp-sgd")))
    return {"errors": [one["error"] for one in said]}


def other_parameters(folder):
    """Rank 1 has frozen a layer, so that its sums are shorter."""
    model = net()
    model[0].requires_grad_(dist.get_rank() == 0)
    return refused(lambda: private("dp-sgd", _of_trained, model))


def refused_on_one(folder):
    """Rank 1 has a model that is refused; rank 0 a number of steps."""
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double() if dist.get_rank() else net()
    said = [refused(lambda: private("dp-sgd", model=model))["error"]]
    steps = 6 if dist.get_rank() else -1
    return {"errors": [*said, refused(lambda: private("dp-sgd", steps=steps))["error"]]}


def _of_trained(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def refused(act):
    """What `act` is refused with."""
    try:
        act()
    except VestigeError as error:
        return {"error": str(error)}
    return {"error": ""}


def records():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (N,), generator=generator))


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


MOMENTS = ["forward", "backward", "all_reduce", "update", "checkpoint"]


def _killed_in(moment, victim, folder):
    """Rank `victim` kills itself at that moment of the third lot, or when it is saved."""
    model = net()

    def end(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def third():
        if dist.get_rank() != victim:
            return
        if moment == "forward":
            model[0].register_forward_hook(end)
        elif moment == "backward":
            model[0].register_full_backward_hook(end)
        elif moment == "checkpoint" and victim == 0:  # when the file is written and not yet there
            mock.patch.object(Path, "replace", end).start()
        else:
            places = {
                "all_reduce": "torch.distributed.all_reduce",
                "update": "torch.optim.sgd.sgd",  # the release is out, the weights wait
                "checkpoint": "vestige.PrivacyEngine.save_checkpoint",
            }
            mock.patch(places[moment], end).start()

    return _until_it_ends(folder, model, third)


KILLED = {
    f"killed_in_{moment}_{victim}": functools.partial(_killed_in, moment, victim)
    for moment in MOMENTS
    for victim in (0, 1)
}


def _until_it_ends(folder, model, third):
    """What the ranks that go on are told, and how long they have waited for it."""
    engine = PrivacyEngine("rdp", ledger=folder / "ledger.jsonl")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=6),
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
            if engine.released == 3:
                engine.save_checkpoint(folder / "checkpoint")
    except VestigeError as error:
        reached = {"released": engine.released, "charged": engine.ledger.steps}
        return reached | {"error": str(error), "seconds": time.time() - began}
    return {"error": ""}


def wrapped(folder):
    """A model inside DistributedDataParallel, itself and in a layer of another."""
    inside = DistributedDataParallel(net())
    return {
        "errors": [
            refused(lambda m=m: private("dp-sgd", model=m))["error"]
            for m in (inside, nn.Sequential(inside))
        ]
    }


def wrapped_later(folder):
    """A model inside DistributedDataParallel since make_private, trained; then without it."""
    said = []
    for check in (True, False):
        engine, model, optimizer, loader = private("dp-sgd", self_check=check)
        outside = DistributedDataParallel(model)
        said.append(refused(lambda made=(engine, outside, optimizer, loader): run(*made, 1)))
        engine.abandon_lot()
        released = engine.released
        run(engine, model, optimizer, loader, 1)
        with torch.no_grad():
            outside(torch.zeros(2, 5).double())
    return {"errors": [one["error"] for one in said], "released": [released, engine.released]}
