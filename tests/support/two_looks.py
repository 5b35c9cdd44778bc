"""Runs recorded step by step, and references of a few lines: lots, gradients, noise."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

from tests.support.small_runs import flat, net
from vestige.release.door import Door
from vestige.sampling.streams import NOISE, Randomness

C, LR, RADIUS, SEED = 1.5, 0.3, 0.4, 4  # SEED is that of `private`


SEGMENTS = {"flat": [slice(0, 75)], "per_layer": [slice(0, 48), slice(48, 75)]}


class Seen:
    """What went in and out of the door: private sums, and what was let out."""

    def __init__(self):
        self.sums, self.values, self.stds, self.bounds = [], [], [], []
        self.counts, self.noisy_counts = [], []  # of quantile clipping
        self.looks = []  # (sum, released) of first looks
        self.branches = []  # of memories
        self.totals, self.measured = [], []  # of importance sampling


def watch(monkeypatch):
    """Record everything that passes any door from now on."""
    seen, release, first_look, measure = Seen(), Door.release, Door.first_look, Door.measure

    def recorded(door, clipped, sample_rate, branch=None, **kwargs):
        seen.branches.append(None if branch is None else branch.values.clone())
        out = release(door, clipped, sample_rate, branch, **kwargs)
        seen.sums.append(clipped._values.clone())
        seen.bounds.append(clipped.bounds)
        seen.counts.append(None if clipped._counts is None else clipped._counts.tolist())
        seen.values.append(out.values.clone())
        seen.stds.append(out.stds)
        seen.noisy_counts.append(out.counts)
        return out

    def looked(door, clipped, *args):
        out = first_look(door, clipped, *args)
        seen.looks.append((clipped._values.clone(), out.values.clone()))
        return out

    def measured(door, number, multiplier, lot):
        out = measure(door, number, multiplier, lot)
        seen.totals.append(float(number._values))
        seen.measured.append(out)
        return out

    monkeypatch.setattr(Door, "release", recorded)
    monkeypatch.setattr(Door, "first_look", looked)
    monkeypatch.setattr(Door, "measure", measured)
    return seen


def gradients(theta, x, y):
    """(n, P): the gradient of every example's own loss at weights `theta`, one at a time."""
    twin = net()
    vector_to_parameters(theta.clone(), twin.parameters())
    rows = [torch.zeros(0, len(theta), dtype=theta.dtype)]
    for i in range(len(x)):
        loss = F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1])
        rows.append(flat(torch.autograd.grad(loss, list(twin.parameters())))[None])
    return torch.cat(rows)


def clipped_sum(rows, bounds, segments):
    """Every row clipped group by group, and added up."""
    total = torch.zeros(rows.shape[1], dtype=rows.dtype)
    for row in rows:
        for at, bound in zip(segments, bounds, strict=True):
            if row[at].isfinite().all():
                total[at] += row[at] / max(1.0, float(row[at].norm()) / bound)
    return total


def normals(step, purpose=NOISE, seed=SEED, size=75):
    """The standard normal vector of a step, drawn again."""
    like = torch.zeros(size, dtype=torch.float64)
    for block, part in Randomness(seed).normal_blocks(like, step, purpose):
        like[block] = part
    return like


def lots(engine, loader, count=None):
    """(x, y, the rows that count) of the lots to come; an empty lot has none."""
    for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count):
        rows = slice(0, 0 if engine._run.capture.batch.empty else len(x))
        yield x, y, (x[rows], y[rows])


def sgd(lr=LR, momentum=0.0):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def close(a, b, tolerance=1e-9):
    return float((a - b).abs().max()) < tolerance
