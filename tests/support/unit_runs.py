"""Runs whose privacy units have several rows, and the same sums by a plain loop over units."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_runs import small
from vestige import PrivacyEngine
from vestige.audit.tape import Recording, Tape

USERS, CLIP, LOT = 12, 0.5, 4
HAS = [1, 2, 3, 5, 1, 4, 2, 6, 3, 1, 2, 5]  # rows of every user; the last one's are loud


def owners(users=USERS):
    """The user of every row, mixed up."""
    ids = torch.tensor([user for user in range(USERS) for _ in range(HAS[user])])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))
    return ids[order][ids[order] < users]


def records(users=USERS):
    """(input, class, index, user) of every row that belongs to the first `users` users."""
    generator = torch.Generator().manual_seed(1)
    count = sum(HAS)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=generator)
    everybody = owners()
    loud = everybody == USERS - 1  # and of one mind, so that clipped rows would add up
    x[loud] = 50 * (x[loud][:1] + 0.01 * x[loud])
    y[loud] = 1
    kept = everybody < users
    tensors = x, y, torch.arange(count), everybody
    return TensorDataset(*(t[kept] for t in tensors))


def model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3)
        ).double()


class OwnLoss(nn.Module):
    """Returns the mean loss where it is given labels, as models of Hugging Face do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, labels=None):
        scores = self.inner(x)
        return scores if labels is None else F.cross_entropy(scores, labels)


@dataclass
class Lot:
    """What the loop saw of one lot, and the weights that it was given to."""

    model: nn.Module
    rows: list = field(default_factory=list)  # (input, class, index, user)


def run(data, method="dp-sgd", steps=16, seed=5, frozen=None, lot=LOT, loss="mean", **options):
    """The recording, the lots as the loop saw them, and the engine.

    `loss` says what the backward pass begins with: the mean or the sum that the loop has made, its
    losses by "rows", or the loss that the model returns ("own")."""
    net, chosen, lr = model(), small(method), options.pop("lr", 0.1)
    net = OwnLoss(net) if loss == "own" else net
    engine = PrivacyEngine("rdp", noise_seed=seed)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=chosen.make_optimizer(net.parameters(), lr=lr),
        data_loader=DataLoader(data, batch_size=lot),
        method=chosen,
        steps=steps,
        **{"noise_multiplier": 0.8, "max_grad_norm": CLIP} | options,
    )
    lots: dict[int, Lot] = {}
    with Tape(engine, frozen=frozen) as tape:
        while engine.released < steps:
            for x, y, index, user in loader:
                batch = engine._attached().capture.batch
                lot = lots.setdefault(batch.lot, Lot(copy.deepcopy(net)))
                tape.took(index.tolist())
                if not batch.empty:
                    lot.rows += list(zip(x, y, index.tolist(), user.tolist(), strict=True))

                def closure(x=x, y=y):
                    optimizer.zero_grad()
                    if loss == "own":
                        whole = net(x, labels=y)
                        whole.backward()
                        return whole.detach()
                    losses = F.cross_entropy(net(x), y, reduction="none")
                    if loss == "rows":
                        engine.backward(losses)
                    else:
                        (losses.mean() if loss == "mean" else losses.sum()).backward()
                    return losses.mean()

                optimizer.step(closure)
                tape.stepped(net, optimizer)
                if engine.released == steps:
                    break
    recording: Recording = tape.finished()
    return recording, lots, engine


def summed_by_hand(lot, by, groups, bounds):
    """Clip the mean gradient of every unit's different rows, group by group, and add up.

    `by` is the place of what names a unit in a row: its index (2) or its user (3).
    """
    net, units = lot.model, {}
    for row in lot.rows:
        key = (row[2], row[0].numpy().tobytes())  # a stand-in is a row once more
        units.setdefault(row[by], {})[key] = row
    total = 0
    for rows in units.values():
        loss = sum(F.cross_entropy(net(x[None]), y[None]) for x, y, *_ in rows.values())
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss / len(rows), list(net.parameters()))]
        )
        for part, bound in zip(groups, bounds, strict=True):
            norm = float(gradient[part].norm())
            gradient[part] *= min(1.0, bound / norm) if norm else 0.0
        total = total + gradient
    return total
