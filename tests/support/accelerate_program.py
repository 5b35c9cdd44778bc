"""A private loop under Accelerate, for torchrun: every rank writes what it saw to FOLDER/RANK.pt.

`trained(None)` is the same loop in one process without Accelerate.
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


def trained(accelerator):
    """Two epochs; what Accelerate prepares after make_private are the optimizer and the loader."""
    engine, model, optimizer, own = private(*things())
    loader = own
    if accelerator:
        optimizer, loader = accelerator.prepare(optimizer, own)
    lots: dict[int, list[list[float]]] = {}
    for _ in range(2):
        for x, y in loader:
            if not engine._run.capture.batch.empty:
                lots.setdefault(engine.released, []).extend(x.tolist())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss) if accelerator else loss.backward()
            optimizer.step()
    counts = [engine.released, engine.ledger.steps, engine.get_epsilon(1e-3)]
    return {
        "same loader": loader is own,
        "lots": lots,
        "counts": counts,
        "weights": flat(model.parameters()),
    }


def main(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = things()
    prepared = accelerator.prepare(loader)
    wrapped = accelerator.prepare(model)
    seen = trained(accelerator) | {
        "ranks": accelerator.num_processes,
        "loader": refused(lambda: private(model, optimizer, prepared))["error"],
        "model": refused(lambda: private(wrapped, optimizer, loader))["error"],
    }
    torch.save(seen, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
