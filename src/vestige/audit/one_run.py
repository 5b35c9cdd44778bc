"""Loss-based auditing with one training run: many canaries, nothing but the final model.

Canaries are records with random inputs and random labels; a fair coin puts each into the data. A
small network is trained once with the real engine. A canary's score is how far training lowered its
loss (the first weights are public). The auditor guesses "in" for the k highest scores and "out" for
the k lowest, for a few k that are fixed beforehand and share the error probability, and counts.

The attacker sees one model and no transcript, so the bounds are far below those of canary.py at the
same claim: this shows what a run leaks to somebody who is handed the model.

Paper: Steinke, Nasr, Jagielski 2023, arXiv 2305.08846.
Guarantee: see one_run_bound.py; free of assumptions about the mechanism.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack import Tell, as_numpy, attack, coins
from vestige.audit.bounds import Cut
from vestige.audit.one_run_bound import one_run_epsilon
from vestige.audit.result import AuditResult, Evidence
from vestige.audit.setting import CONFIDENCE, DELTA, SAMPLE_RATE, STEPS, Setting
from vestige.methods import Method, resolve
from vestige.privacy.accounting import Charge, epsilon, events_of, noise_for

TRIALS = 1000
FEATURES, HIDDEN, CLASSES = 512, 16, 10
GUESSED = (1 / 50, 1 / 10, 1 / 2)  # shares of the canaries that are guessed "in", and "out"
NO_FAMILY = "no family bound: the final model alone is attacked, not single releases"


def audit_one_run(
    method: str | Method,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    trials: int = TRIALS,
    confidence: float = CONFIDENCE,
    delta: float = DELTA,
    seed: int | None = None,
    clipping: Any = None,
    sample_rate: float = SAMPLE_RATE,
    progress: Tell | None = None,
) -> AuditResult:
    """Train once on random canaries and bound epsilon from the guesses; as `canary.audit`."""
    begun = time.perf_counter()
    if steps is None and not resolve(method).private:
        steps = STEPS  # one run, not many short ones
    setting = Setting.checked(
        method,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        steps=steps,
        trials=trials,
        confidence=confidence,
        delta=delta,
        seed=seed,
        clipping=clipping,
        sample_rate=sample_rate,
        layers=2,  # of the network, where each is a group
    )
    tell = progress or (lambda what, done, total: None)
    records = trials if setting.zeroed else trials // 2
    batch = setting.batch_size(records)
    tell("noise for the claim", 0, setting.steps)
    noise, published = _noise(setting, records, batch)
    rng = coins(setting)
    member = rng.random(trials) < 0.5
    x = torch.from_numpy(rng.choice([-1.0, 1.0], size=(trials, FEATURES)).astype(np.float32))
    y = torch.from_numpy(rng.integers(CLASSES, size=trials))
    model = network()
    before = _losses(model, x, y)
    inside = torch.from_numpy(member)
    # A record is one row: its input and, behind it, its label. An empty lot has weight zero.
    rows, weights = torch.cat([x, y[:, None].float()], dim=1), inside.float()
    kept = torch.ones(trials, dtype=torch.bool) if setting.zeroed else inside
    found = attack(
        setting,
        model,
        TensorDataset(rows[kept], weights[kept]),
        batch,
        noise,
        _row_losses,
        declared=None if setting.zeroed else records,
        tell=lambda step: tell("training", step, setting.steps),
    )
    tell("bounds", setting.steps, setting.steps)
    scores = as_numpy(before - _losses(model, x, y))
    lower, cut = guessing_bound(scores, member, delta, confidence)
    claimed = found.engine.get_epsilon(delta)
    return AuditResult(
        method=setting.method.name,
        mode="one-run",
        epsilon_lower=lower,
        epsilon_lower_family=None,
        epsilon_claimed=claimed if math.isfinite(claimed) else None,
        epsilon_published=published,
        confidence=setting.confidence,
        delta=setting.delta,
        trials=trials,
        family_trials=0,
        steps=setting.steps,
        sample_rate=batch / records,
        noise_multiplier=noise,
        noise_multiplier_attacked=None,
        noise_multiplier_upper=None,
        clipping=found.engine.plan.clipping,
        seeded=seed is not None,
        seconds=time.perf_counter() - begun,
        notes=(NO_FAMILY,),
        evidence=Evidence(scores, member, np.zeros(trials, dtype=np.bool_), cut),
    )


def network() -> nn.Module:
    """Two layers, 8,378 weights; the first weights are public."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def guessing_bound(
    scores: np.typing.NDArray[np.float64],
    member: np.typing.NDArray[np.bool_],
    delta: float,
    confidence: float,
) -> tuple[float, Cut]:
    """The best of the bounds from guessing a few shares of the canaries, which share alpha."""
    count, order = len(scores), np.argsort(scores, kind="stable")
    each = 1 - (1 - confidence) / len(GUESSED)
    best: tuple[float, Cut] | None = None
    for share in GUESSED:
        k = max(1, int(share * count))
        hits, misses = int(member[order[-k:]].sum()), int(member[order[:k]].sum())
        bound = one_run_epsilon(count, 2 * k, hits + k - misses, delta, each)
        cut = Cut(float(scores[order[-k]]), True, hits, misses, k, k)
        if best is None or bound > best[0]:
            best = bound, cut
    assert best is not None
    return best


def _noise(setting: Setting, records: int, batch: int) -> tuple[float, float | None]:
    """The noise, and the published epsilon of a method that is not private."""
    if setting.method.private:
        return setting.noise_multiplier(setting.charges(records)), None
    paper = Counter({Charge(batch / records): setting.steps})
    if setting.noise is not None:
        noise = setting.noise
    else:
        assert setting.target is not None
        noise = noise_for(setting.target, setting.delta, paper)[0]
    return noise, epsilon(events_of(paper, noise), setting.delta)


def _row_losses(model: nn.Module, rows: Tensor, weights: Tensor) -> Tensor:
    labels = rows[:, -1].long()
    return weights * F.cross_entropy(model(rows[:, :-1]), labels, reduction="none")


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x), y, reduction="none")
