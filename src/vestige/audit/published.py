"""The methods that were published as private and are not: the violation, on adversarial data.

The engine reports an infinite epsilon for them. Here they are held against `epsilon_published`: the
accounting of their papers, a Gaussian at multiplier sigma in every step, on lots of the whole data.
A trial is a whole run of the real engine with or without one record, by a fair coin.

GeoDP (arXiv 2504.05618) claims that one record turns the angles of the mean by at most
sqrt(d + 2) bounding pi / B. Take B records of gradient (r, -C/2, 0)/B and one of (0, C, 0): with it
the sum is (r, C/2, 0), without it (r, -C/2, 0). The last angle turns by pi. The sign of the second
coordinate tells, unless the noise carries the first angle, C/(2r), or the length, r/B, through
zero. r = C sqrt(B / (2 sqrt(5) pi bounding)) puts both r / (sigma C) standard deviations away, as
far as one likes with B: 27 / sigma for the 1024 records here.

DP-Adam-AC (arXiv 2510.05288) clips at a quantile of raw norms, which nobody charges for. Take
norms at the lowest and at the highest bound, as many of each that one more high one carries the
quantile from one to the other: from the second step on the *scale* of the noise tells. With the
default setting it is 5 low and 1 high norm, and the scales differ by a factor of 80.

Guarantee: the bound is Clopper and Pearson's on the error rates, free of assumptions. The family
bound has no meaning here: the releases are no Gaussians of known sensitivity.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack import CLIP, Attacked, Tell, as_numpy, attack, coins
from vestige.audit.bounds import Split, membership_epsilon
from vestige.audit.result import AuditResult, Evidence
from vestige.audit.setting import Setting
from vestige.errors import ConfigError
from vestige.geometry import angle_scale
from vestige.methods import DPAdamAC, GeoDP
from vestige.privacy.accounting import Charge, epsilon, events_of, noise_for

NO_FAMILY = "no family bound: these releases are no Gaussians of known sensitivity"
_GEODP_RECORDS = 1024
_ADAM_AC_PARAMETERS = 64


@dataclass(frozen=True)
class Adversary:
    """Gradients of the records and of the one in question, and what is read off the releases."""

    others: Tensor
    canary: Tensor
    score: Callable[[Attacked], float]
    fewest_steps: int = 1


def adversary(setting: Setting) -> Adversary:
    """The adversarial data for the method."""
    method = setting.method
    if isinstance(method, GeoDP):
        return _turning(method)
    if isinstance(method, DPAdamAC):
        return _tipping(method)
    raise ConfigError(
        f"method {method.name!r} has no guarantee, and no attack on it is known here: "
        f"{method.guarantee}."
    )


def audit_published(setting: Setting, tell: Tell, begun: float) -> AuditResult:
    """Whole runs with and without one record, against what the paper would claim."""
    found = adversary(setting)
    steps = setting.steps
    if steps < found.fewest_steps:
        raise ConfigError(
            f"steps={steps} is too few for method {setting.method.name!r}, whose leak shows from "
            f"step {found.fewest_steps} on: use at least {found.fewest_steps}."
        )
    paper = Counter({Charge(1.0): steps})
    tell("noise for the published claim", 0, setting.trials)
    if setting.noise is not None:
        noise = float(setting.noise)
    else:
        assert setting.target is not None
        noise = noise_for(setting.target, setting.delta, paper)[0]
    published = epsilon(events_of(paper, noise), setting.delta)
    member = coins(setting).random(setting.trials) < 0.5
    scores = np.zeros(setting.trials)
    for trial, inside in enumerate(member):
        run = _run(setting, found, noise, trial, bool(inside))
        scores[trial] = found.score(run)
        tell("runs", trial + 1, setting.trials)
    split = Split.by_canary(np.arange(setting.trials), setting.trials)
    lower, cut = membership_epsilon(scores, member, split, setting.delta, setting.confidence)
    claimed = run.engine.get_epsilon(setting.delta)
    return AuditResult(
        method=setting.method.name,
        mode="canary",
        epsilon_lower=lower,
        epsilon_lower_family=None,
        epsilon_claimed=claimed if math.isfinite(claimed) else None,
        epsilon_published=published,
        confidence=setting.confidence,
        delta=setting.delta,
        trials=setting.trials,
        family_trials=0,
        steps=steps,
        sample_rate=1.0,
        noise_multiplier=noise,
        noise_multiplier_attacked=None,
        noise_multiplier_upper=None,
        clipping=run.engine.plan.clipping,
        seeded=setting.seed is not None,
        seconds=time.perf_counter() - begun,
        notes=(NO_FAMILY,),
        evidence=Evidence(scores, member, split.choosing, cut),
    )


def _run(setting: Setting, found: Adversary, noise: float, trial: int, inside: bool) -> Attacked:
    """One run of the engine: the record in question is there or not."""
    size, length = found.others.shape
    gradients = torch.cat([found.others, found.canary[None]]) if inside else found.others
    model = nn.Linear(length, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return attack(
        setting,
        model,
        TensorDataset(gradients, torch.ones(len(gradients), dtype=torch.float64)),
        size,
        noise,
        lambda model, rows, weights: weights * model(rows).squeeze(1),
        declared=size,
        run=trial,
        self_check=trial == 0,  # the model is the same in all of them
    )


def _turning(method: GeoDP) -> Adversary:
    size = _GEODP_RECORDS
    # Length r/B in units of its noise C/B, and first angle C/(2r) in units of its own: equal.
    length = CLIP * math.sqrt(1 / (2 * angle_scale(3, 1, method.bounding)) * size)
    length = min(length, CLIP * size / 2)
    others = torch.tensor([length, -CLIP / 2, 0.0], dtype=torch.float64).expand(size, 3) / size

    def score(run: Attacked) -> float:
        return float(sum(np.sign(as_numpy(looks[0].values)[1]) for looks in run.transcript.looks))

    return Adversary(others.contiguous(), others.new_tensor([0.0, CLIP, 0.0]), score)


def _tipping(method: DPAdamAC) -> Adversary:
    norms = tipping_norms(method)
    others = torch.zeros(len(norms), _ADAM_AC_PARAMETERS, dtype=torch.float64)
    others[:, 0] = torch.tensor(norms)
    canary = others.new_zeros(_ADAM_AC_PARAMETERS)
    canary[0] = method.highest

    def score(run: Attacked) -> float:
        # No record reaches the other coordinates: they hold nothing but noise.
        later = [as_numpy(looks[0].values)[1:] for looks in run.transcript.looks[1:]]
        return float(np.log(np.mean(np.square(later), axis=1)).mean())

    return Adversary(others, canary, score, fewest_steps=2)


def tipping_norms(method: DPAdamAC) -> list[float]:
    """Norms at the two ends whose quantile one more high norm moves the most."""

    def quantile(low: int, high: int) -> float:
        norms = [method.lowest] * low + [method.highest] * high
        return float(np.quantile(norms, 1 - method.clipped))

    def moved(pair: tuple[int, int]) -> tuple[float, int]:
        low, high = pair
        ratio = quantile(low, high + 1) / quantile(low, high)
        return round(ratio, 6), -low - high  # the fewest records of those that move it as far

    low, high = max(((low, high) for low in range(1, 40) for high in range(1, 20)), key=moved)
    return [method.lowest] * low + [method.highest] * high
