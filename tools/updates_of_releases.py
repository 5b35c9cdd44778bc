"""Muon and MicroAdam on releases, beside DP-SGD with momentum and DP-Adam, at epsilon 3.

python tools/updates_of_releases.py ["DATA MODEL" ...] prints the table of docs/accuracy.md

Our reading of DP-Muon (arXiv 2605.12994) has flat clipping, as the others, and Adam for vectors;
that of DP-MicroAdam (arXiv 2511.20509) an error that is not quantised, which saves memory alone.
Three rates half a decade apart are tried, on training records that no run learns from, with seed
100, and while the best lies at an end, the next one beyond it.
"""

import math
import statistics
import sys
from collections import deque
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.privacy import accounting
from vestige.train import data, models

TASKS = {  # data and model: training and validation records, lot, epochs
    "digits mlp": (1150, 287, 115, 30),
    "cifar10 mlp": (5000, 2000, 500, 30),
    "mnist mlp": (5000, 2000, 500, 10),
    "mnist cnn": (1000, 500, 125, 8),
}


class Muon(torch.optim.Optimizer):
    """Momentum with its singular values near 1; a step has the size of Adam's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        every = self.param_groups[0]["params"]
        self.vectors = torch.optim.Adam([p for p in every if p.ndim == 1], lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        self.vectors.step()
        for p in (p for p in self.param_groups[0]["params"] if p.ndim > 1):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
            x = mean.flatten(1) / mean.norm().clamp(min=1e-12)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
            p.sub_(x.view_as(p), alpha=0.2 * math.sqrt(max(x.shape)) * self.param_groups[0]["lr"])


class MicroAdam(torch.optim.Optimizer):
    """Adam on the last ten sparse gradients: the largest entries now, the rest is fed back."""

    def __init__(self, params, lr, share):
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            state = self.state[p] or {"rest": torch.zeros_like(p), "kept": deque(maxlen=10), "t": 0}
            rest, kept, t = state["rest"].add_(p.grad).view(-1), torch.zeros(p.numel()), state["t"]
            largest = rest.abs().topk(math.ceil(group["share"] * rest.numel())).indices
            kept[largest], rest[largest] = rest[largest], 0.0
            state["kept"].appendleft(kept.view_as(p))
            self.state[p] = state | {"t": t + 1}
            mean, square = (
                sum(b**age * g**power for age, g in enumerate(state["kept"])) / (1 - b ** (t + 1))
                for b, power in ((0.9, 1), (0.999, 2))
            )
            p.addcdiv_(0.1 * mean, square.mul_(0.001).sqrt_().add_(1e-8), value=-group["lr"])


UPDATES = {  # the optimizer and the middle one of its rates
    "DP-SGD, momentum 0.9": (partial(torch.optim.SGD, momentum=0.9), 0.1),
    "DP-Adam": (torch.optim.Adam, 0.003),
    "DP-Muon": (Muon, 0.003),
    "DP-MicroAdam, 10 % of the entries": (partial(MicroAdam, share=0.1), 0.001),
    "DP-MicroAdam, 1 %": (partial(MicroAdam, share=0.01), 0.001),
}


def accuracy(task, make, sigma, rate, seed, tuning=False):
    """Accuracy of the last weights, on validation records while tuning, else on the test split."""
    (name, kind), (train, held, lot, epochs) = task.split(), TASKS[task]
    d = data.load(name, test_size=None if name == "digits" else 2000)
    if tuning:
        d = replace(d, x_test=d.x_train[train:][:held], y_test=d.y_train[train:][:held])
    module = models.build(kind, d.input_shape, d.classes, seed)
    optimizer = make(module.parameters(), lr=rate)
    engine = PrivacyEngine(seed=seed, noise_seed=seed)  # test mode, for public data
    _, _, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(d.x_train[:train], d.y_train[:train]), batch_size=lot),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    for x, y in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        engine.backward(F.cross_entropy(module(x), y, reduction="none"))
        optimizer.step()
    engine.close()
    return (module(d.x_test).argmax(1) == d.y_test).float().mean().item()


for task in sys.argv[1:] or TASKS:
    train, _, lot, epochs = TASKS[task]
    noise = accounting.calibrate(3.0, 1e-5, lot / train, epochs * train // lot).noise_multiplier
    for label, (make, middle) in UPDATES.items():
        tried, wanted = {}, {-1, 0, 1}
        while wanted:
            for place in wanted:
                tried[place] = accuracy(task, make, noise, middle * 10 ** (place / 2), 100, True)
            best = max(sorted(tried), key=tried.get)
            wanted = {best - 1, best + 1} - tried.keys() if len(tried) < 7 else set()
        rate = middle * 10 ** (best / 2)
        found = [accuracy(task, make, noise, rate, seed) for seed in range(3)]
        shown = " | ".join(f"{a:.4f}" for a in [*found, statistics.fmean(found)])
        print(f"| {task} | {label} | {rate:.2g} | {shown} |", flush=True)
