"""Loss-based auditing with one training run: many canaries, nothing but the final model.

Canaries are records with random inputs and random labels. A canary's score is how far training
lowered its loss (the first weights are public). The auditor guesses "in" for the k highest scores
and "out" for the k lowest, for a few k that are fixed beforehand and share the error probability.

Paper: Steinke, Nasr, Jagielski 2023, arXiv 2305.08846.
Guarantee: see bounds.py; free of assumptions about the mechanism.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.audit.attack.canaries import Canaries
from vestige.audit.attack.training import Target, Tell, as_numpy, attack, coins
from vestige.audit.bounds import Array, Cut, Flags, Trials, one_run_epsilon
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult, Evidence, result_of

FEATURES, HIDDEN, CLASSES = 512, 16, 10
GUESSED = (1 / 50, 1 / 10, 1 / 2)  # shares of the canaries that are guessed "in", and "out"
NO_FAMILY = "no family bound: the final model alone is attacked, not single releases"


def attacked(options: AuditOptions, tell: Tell) -> AuditResult:
    """Train once, guess, count."""
    steps, trials, records = options.length, options.canaries, options.records
    batch = options.batch_size(records)
    tell("noise for the claim", 0, steps)
    if options.chosen.private:
        noise, published = options.noise(options.charges(records)), None
    else:
        noise, published = options.published(batch / records)
    rng = coins(options)
    canaries = Canaries.tossed(trials, rng, options.zeroed)
    x = torch.from_numpy(rng.choice([-1.0, 1.0], size=(trials, FEATURES)).astype(np.float32))
    y = torch.from_numpy(rng.integers(CLASSES, size=trials))
    model = network()
    before = _losses(model, x, y)
    # A record is one row: its input and, behind it, its label. An empty lot has weight zero.
    data = canaries.dataset(torch.cat([x, y[:, None].float()], dim=1))
    run = attack(
        options,
        Target(model, data, _row_losses, batch, options.declared),
        noise,
        tell=lambda step: tell("training", step, steps),
    )
    tell("bounds", steps, steps)
    scores = as_numpy(before - _losses(model, x, y))
    trials_of_all = Trials(scores, canaries.member, np.zeros(trials, dtype=np.bool_))
    lower, cut = guessing_bound(scores, canaries.member, options.delta, options.confidence)
    return result_of(
        options,
        run.engine,
        Evidence(trials_of_all, cut),
        epsilon_lower=lower,
        epsilon_published=published,
        sample_rate=batch / records,
        noise_multiplier=noise,
        notes=(NO_FAMILY,),
    )


def network() -> nn.Module:
    """Two layers, 8,378 weights; the first weights are public."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def guessing_bound(
    scores: Array, member: Flags, delta: float, confidence: float
) -> tuple[float, Cut]:
    """The best of the bounds from guessing a few shares of the canaries, which share alpha."""
    count, order = len(scores), np.argsort(scores, kind="stable")
    each = 1 - (1 - confidence) / len(GUESSED)
    bounds = []
    for share in GUESSED:
        k = max(1, int(share * count))
        hits, misses = int(member[order[-k:]].sum()), int(member[order[:k]].sum())
        bound = one_run_epsilon(count, 2 * k, hits + k - misses, delta, each)
        bounds.append((bound, Cut(float(scores[order[-k]]), True, hits, k, misses, k)))
    return max(bounds, key=lambda pair: pair[0])


def _row_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, weights = batch
    labels = rows[:, -1].long()
    return weights * F.cross_entropy(model(rows[:, :-1]), labels, reduction="none")


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x), y, reduction="none")
