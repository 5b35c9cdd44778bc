"""A private loop under Accelerate or Fabric, for torchrun: what a rank saw lands in FOLDER/RANK.pt.

`trained(None)` is the same loop in one process without them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.support.rank_faults import records, refused
from tests.support.small_runs import flat, net
from vestige import PrivacyEngine

LOT = 6


def things():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(records(), LOT, shuffle=True)


def private(model, optimizer, loader):
    engine = PrivacyEngine("rdp", noise_seed=3)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=2,
    )
    return engine, *made


class Accelerated:
    """Accelerate's ways: after make_private, and those that are refused."""

    def __init__(self):
        from accelerate import Accelerator

        self._library = Accelerator(cpu=True)
        self.backward, self.prepared = self._library.backward, self._library.prepare

    def dealt(self, loader):
        return self._library.prepare(loader)

    def wrapped(self, model):
        return self._library.prepare(model)


class Fabric:
    """Lightning's."""

    def __init__(self):
        import lightning

        self._library = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
        self._library.launch()
        self.backward, self.wrapped = self._library.backward, self._library.setup_module

    def prepared(self, optimizer, loader):
        return self._library.setup_optimizers(optimizer), loader

    def dealt(self, loader):
        return self._library.setup_dataloaders(loader)


LIBRARIES = {"accelerate": Accelerated, "lightning": Fabric}


def trained(library):
    """Two epochs; the library prepares the optimizer after make_private, and may see the loader."""
    engine, model, optimizer, own = private(*things())
    loader = own
    if library:
        optimizer, loader = library.prepared(optimizer, own)
    lots: dict[int, list[list[float]]] = {}
    for _ in range(2):
        for x, y in loader:
            if not engine._run.capture.batch.empty:
                lots.setdefault(engine.released, []).extend(x.tolist())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            library.backward(loss) if library else loss.backward()
            optimizer.step()
    counts = [engine.released, engine.ledger.steps, engine.get_epsilon(1e-3)]
    return {
        "same loader": loader is own,
        "lots": lots,
        "counts": counts,
        "weights": flat(model.parameters()),
    }


def begin(model, optimizer, loader):
    """What is refused is refused by make_private or by the first forward pass."""
    _, _, _, own = private(model, optimizer, loader)
    x, _ = next(iter(own))
    model(x)


def main(name, folder):
    library = LIBRARIES[name]()
    model, optimizer, loader = things()
    dealt, wrapped = library.dealt(loader), library.wrapped(model)
    seen = trained(library) | {
        "loader": refused(lambda: begin(model, optimizer, dealt))["error"],
        "model": refused(lambda: begin(wrapped, optimizer, loader))["error"],
    }
    torch.save(seen | {"ranks": dist.get_world_size()}, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
