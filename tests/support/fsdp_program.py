"""What one rank does with a sharded model, forked by `ranks.py`.

World 0 is one process with the same model unsharded, as in `rank_program`.
"""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from tests.support import rank_program
from tests.support.small_runs import N, closure_of, flat, private, run
from tests.support.spectra_runs import looked_at
from vestige import PrivacyEngine
from vestige.errors import VestigeError
from vestige.methods import METHODS, SMA, resolve
from vestige.parallel.ranks import Ranks
from vestige.sampling.normals import Held

CASES = {
    "flat": {"method": "dp-sgd"},
    "per layer": {"method": "dp-sgd", "clipping": "per_layer"},
    "quantile": {"method": "dp-sgd", "clipping": "quantile_per_layer"},
    "fo": {"method": "fo"},
    "sma": {"method": SMA(debias=True)},
    "in pieces": {"method": "fo", "max_physical_batch_size": 1, "history_device": "cpu"},
    "checked": {"method": "dp-sgd", "self_check": True},
}
IN_SHARDS = [name for name, info in METHODS.items() if not info.load().whole]


class Block(nn.Module):
    """A frozen pair of layers with a low-rank adapter. No length is a multiple of 2 or 4."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(5, 7), nn.Linear(5, 1), nn.Linear(7, 5)
        self.a, self.b = nn.Parameter(torch.randn(3, 5) / 3), nn.Parameter(torch.randn(7, 3) / 3)

    def forward(self, x):
        adapted = F.linear(F.linear(x, self.a), self.b)
        return x + torch.sigmoid(self.gate(x)) * self.down(torch.tanh(self.up(x) + adapted))


def model(full, sharded=True):
    """Two blocks and a head; the blocks' layers are frozen unless it is trained in full."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(Block(), Block(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    for block in made[:2]:
        for layer in (block.up, block.gate, block.down):
            layer.requires_grad_(full)
    if sharded and dist.is_initialized():
        plain = set() if full else {p for p in made.parameters() if p.requires_grad}
        for block in made[:2]:
            fully_shard(block, ignored_params=plain)
        fully_shard(made, ignored_params=plain)
    return made


def whole(tensors):
    """The tensors in one, gathered where they are in shards."""
    return flat([t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors])


def releases(full, steps=4, *, method, **options):
    """The gradient of every release, and the weights after them."""
    net = model(full)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = resolve(method).make_optimizer(trained, lr=0.05)
    made = {"steps": steps, "self_check": False} | options

    def evaluate():  # leaves the root's parameters gathered
        with torch.no_grad():
            net(torch.zeros(2, 5).double())

    evaluate()
    engine, *rest = private(method, lambda _: optimizer, net, **made)
    seen = []

    def after():
        if len(seen) < engine.released:
            seen.append(whole(p.grad for p in trained))
            evaluate()

    run(engine, *rest, steps, after)
    counts = [engine.ledger.steps, engine.get_epsilon(1e-3)]
    caveats = len(engine.caveats())
    weights = whole(net.parameters())
    return {"releases": seen, "weights": weights, "counts": counts, "caveats": caveats}


def frozen(folder):
    """A frozen base in shards, trained adapters on every rank."""
    return {name: releases(False, **case) for name, case in CASES.items()}


def full(folder):
    """All parameters are trained, in shards."""
    return {name: releases(True, **case) for name, case in CASES.items()}


def spectra(folder):
    """Which matrices this rank looks at for SMA, all of which lie in shards."""
    return looked_at(model(True), self_check=False)


def every_method(folder):
    """Every method that takes trained parameters in shards."""
    return {name: releases(True, method=name) for name in IN_SHARDS}


def tiny_lots(folder):
    """Lots of one record on average: most shares are empty."""
    case = {"method": "dp-sgd", "sample_rate": 1 / N, "max_physical_batch_size": 1}
    return {full: releases(full, 30, **case) for full in (False, True)}


def _to_save(full):
    net = model(full)
    trained = [p for p in net.parameters() if p.requires_grad]
    return private("fo", lambda _: torch.optim.Adam(trained, 0.05), net, steps=6)


def straight(folder):
    """Six steps, and the weights after every second one; with a frozen base and in full."""
    seen = {False: [], True: []}
    for full, weights in seen.items():
        engine, net, *rest = _to_save(full)
        for _ in range(3):
            run(engine, net, *rest, 2)
            weights.append(whole(net.parameters()))
    return seen


def saved(folder):
    """Two steps, or two more from the checkpoint that is there; with a frozen base and in full."""
    reached = {"folder": str(folder)}
    for full in (False, True):
        path = folder / f"checkpoint.{full}"
        engine, net, *rest = _to_save(full)
        if path.exists():
            engine.load_checkpoint(path)
        run(engine, net, *rest, 2)
        engine.save_checkpoint(path)
        reached[full] = whole(net.parameters())
    return reached


def noise(folder):
    """Releases of hardly more than noise, in units of its standard deviation; and of mutants."""
    every = {"full": _noisy(True), "frozen": _noisy(False)}
    if not dist.is_initialized():
        return every
    every["from zero"] = _noisy(True, _from_zero)
    with mock.patch.object(Ranks, "add_up", _noisier):
        every["everywhere"] = _noisy(False)
    return every


def _noisy(full, change=lambda randomness: None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2001)).double()
    net[0].requires_grad_(full)
    if dist.is_initialized():
        fully_shard(net, ignored_params=set() if full else set(net[1].parameters()))
    options = {"noise_multiplier": 2.0, "max_grad_norm": 1e-9}
    engine, _, optimizer, loader = private("dp-sgd", _sgd, net, self_check=False, **options)
    change(engine.door.randomness)
    x, y = next(iter(loader))
    closure_of(net, optimizer, x, y)()
    optimizer.step()
    return whole(p.grad for p in net.parameters() if p.requires_grad) * 6 / 2e-9


def _from_zero(randomness):
    """A mutant: a shard's noise is made as if the shard were the beginning of the vector."""
    held = randomness.held
    size = sum(last - first for first, last in held.ranges)
    randomness.held = Held(held.length, ((0, size),))


_add_up = Ranks.add_up


def _noisier(ranks, collector, seen):
    """A mutant: every rank adds noise to its part of the sum."""
    collector.total.add_(torch.randn_like(collector.total), alpha=2e-9)
    _add_up(ranks, collector, seen)


def half(folder):
    """A release of parameters in bfloat16: what this rank has of it."""
    net = model(True, sharded=False).bfloat16()
    fully_shard(net)
    data = TensorDataset(torch.randn(N, 5).bfloat16(), torch.zeros(N, dtype=torch.int64))
    engine = PrivacyEngine("rdp")
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=_sgd(net.parameters()),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    run(engine, net, optimizer, loader, 1)
    size = sum(p.numel() for p in net.parameters())
    return {"own": engine.door.last[0], "size": size}


def messages(folder):
    """How often gradients were added up over ranks, and sent, in a lot of two physical batches."""
    options = {"max_physical_batch_size": 12 // dist.get_world_size(), "self_check": False}
    engine, net, optimizer, loader = private("dp-sgd", _sgd, model(True), **options)
    sent = []
    for x, y in loader:
        with profile(activities=[ProfilerActivity.CPU]) as watch:
            closure_of(net, optimizer, x, y)()
        sent.append({e.key: e.count for e in watch.key_averages() if "reduce" in e.key})
        optimizer.step()
        if engine.released:
            break
    return {"sent": sent, "parameters": len(list(net.parameters()))}


def inclusion(folder):
    """As of whole models: which records each rank is handed, over many lots."""
    net = nn.Sequential(nn.Linear(5, 3)).double()
    fully_shard(net)
    return {"lots": rank_program.lots_of(net)}


def charges(folder):
    """How many charges there are when the first sum is shared, after it, and in the end."""
    engine, net, optimizer, loader = private("fo", _sgd, model(True), self_check=False)
    collector, seen = engine._run.capture.collector, []
    share = collector.share

    def noted(sums):
        seen.append(engine.ledger.steps)
        return share(sums)

    collector.share = noted
    for number, (x, y) in enumerate(loader):
        closure_of(net, optimizer, x, y)()
        if number == 1:
            engine.abandon_lot()
            break
        optimizer.step()
    slots = len(list(net.parameters()))
    return {"seen": [seen[0], seen[slots]], "charged": engine.ledger.steps}


def own_records(folder):
    """Every rank has records of its own, some more than others; spare batches are masked."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(N, 5, generator=torch.Generator().manual_seed(rank)).double()
    data = TensorDataset(x[: 3 + rank], torch.zeros(3 + rank, dtype=torch.int64))
    net = model(True)
    engine = PrivacyEngine("rdp", noise_seed=4)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=_sgd(net.parameters()),
        data_loader=DataLoader(data, batch_size=3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sharded=True,
        dataset_size=4 * world,
        max_physical_batch_size=1,
    )
    run(engine, net, optimizer, loader, 3)
    return {"weights": whole(net.parameters()), "released": engine.released}


def _refused(act):
    """What a run is refused with, and how far it has come."""
    made = []
    try:
        act(made)
    except VestigeError as error:
        return {"error": str(error), "released": made[0].released if made else 0}
    return {"error": ""}


def apart(folder):
    """Rank 1 evaluates alone; or gives up a lot that the others release."""

    def evaluates(made):
        engine, net, optimizer, loader = private("dp-sgd", _sgd, model(False))
        made.append(engine)
        for x, y in loader:
            optimizer.step(closure_of(net, optimizer, x, y))
            if dist.get_rank() == 1:
                with torch.no_grad():
                    net(x)

    def gives_up(made):
        engine, net, optimizer, loader = private("dp-sgd", _sgd, model(True))
        made.append(engine)
        for number, (x, y) in enumerate(loader):
            if number == 1 and dist.get_rank() == 1:
                net(x)
                engine.abandon_lot()
                continue
            optimizer.step(closure_of(net, optimizer, x, y))

    return {"evaluates": _refused(evaluates), "gives up": _refused(gives_up)}


def killed(folder):
    """Rank 1 is killed in the backward pass of the third lot: FSDP's own messages fail."""
    options = {"steps": 8, "self_check": False}
    reached = {}
    engine, net, optimizer, loader = private("fo", _sgd, model(True), **options)
    began = 0.0

    def end(gradient):
        if engine.released == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for x, y in loader:
            began = time.time()
            loss = F.cross_entropy(net(x), y)
            loss.register_hook(end)
            loss.backward()
            optimizer.step()
    except VestigeError as error:
        reached = {"error": str(error), "seconds": time.time() - began}
    return reached | {"charged": engine.ledger.steps, "released": engine.released}


def unfit(folder):
    """What is refused for trained parameters in shards, and why."""

    def half(_):
        net = model(True, sharded=False)
        fully_shard(net, ignored_params=set(net[3].parameters()))
        private("dp-sgd", _sgd, net)

    def strange(_):
        net = model(True, sharded=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        net[3].weight = nn.Parameter(distribute_tensor(net[3].weight.data, mesh, [Shard(0)]))
        private("dp-sgd", _sgd, net)

    def along_columns(_):
        net = nn.Sequential(nn.Linear(8, 3))
        fully_shard(net, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        private("dp-sgd", _sgd, net)

    others = {name: {"method": name} for name in METHODS if name not in IN_SHARDS}
    others |= {"rows": {"method": "dp-sgd", "max_physical_batch_size": "auto"}}
    others |= {"average": {"method": "dp-sgd", "averaging": "ema"}}
    said = {
        name: _refused(lambda _, case=case: private(model=model(True), steps=4, **case))
        for name, case in others.items()
    }
    return (
        said
        | {"half": _refused(half), "strange": _refused(strange)}
        | {"columns": _refused(along_columns)}
    )


def _sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)


def main(*which):
    rank_program.main(*which, tasks=globals())
