"""The methods that were published as private and are not: the violation, on adversarial data.

The engine reports an infinite epsilon for them. Here they are held against `epsilon_published`: the
accounting of their papers, a Gaussian at multiplier sigma in every step, on lots of the whole data.
A trial is a whole run of the real engine with or without one record, by a fair coin. docs/audit.md
says how one record turns the angles of GeoDP (arXiv 2504.05618) and tips the quantile of DP-Adam-AC
(arXiv 2510.05288).

Guarantee: the bound is Clopper and Pearson's on the error rates, free of assumptions. The family
bound has no meaning here: the releases are no Gaussians of known sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack.training import CLIP, Attacked, Target, Tell, as_numpy, attack, coins
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult, judge
from vestige.errors import ConfigError
from vestige.geometry import angle_scale
from vestige.methods import DPAdamAC, GeoDP, Method

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


def adversary(method: Method) -> Adversary:
    """The adversarial data for the method."""
    if isinstance(method, GeoDP):
        return _turning(method)
    if isinstance(method, DPAdamAC):
        return _tipping(method)
    raise ConfigError(
        f"method {method.name!r} has no guarantee, and no attack on it is known here: "
        f"{method.guarantee}."
    )


def attacked(options: AuditOptions, tell: Tell) -> AuditResult:
    """Whole runs with and without one record, against what the paper would claim."""
    known, count = adversary(options.chosen), options.canaries
    if options.length < known.fewest_steps:
        raise ConfigError(
            f"steps={options.length} is too few for method {options.chosen.name!r}, whose leak "
            f"shows from step {known.fewest_steps} on: use at least {known.fewest_steps}."
        )
    tell("noise for the published claim", 0, count)
    noise, published = options.published(1.0)
    member = coins(options).random(count) < 0.5
    scores = np.zeros(count)
    for trial, inside in enumerate(member):
        # The model is the same in all of them: one self-check is enough.
        run = attack(options, _target(known, bool(inside)), noise, run=trial, self_check=trial == 0)
        scores[trial] = known.score(run)
        tell("runs", trial + 1, count)
    return judge(
        options,
        run.engine,
        scores,
        member,
        epsilon_published=published,
        noise_multiplier=noise,
        sample_rate=1.0,
        notes=(NO_FAMILY,),
    )


def _target(known: Adversary, inside: bool) -> Target:
    """The record in question is there or not."""
    size, length = known.others.shape
    gradients = torch.cat([known.others, known.canary[None]]) if inside else known.others
    model = nn.Linear(length, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return Target(
        model,
        TensorDataset(gradients, torch.ones(len(gradients), dtype=torch.float64)),
        lambda model, batch: batch[1] * model(batch[0]).squeeze(1),
        size,
        size,
    )


def _turning(method: GeoDP) -> Adversary:
    size = _GEODP_RECORDS
    # Length r/B in units of its noise C/B, and first angle C/(2r) in units of its own: equal.
    length = CLIP * math.sqrt(1 / (2 * angle_scale(3, 1, method.bounding)) * size)
    length = min(length, CLIP * size / 2)
    others = torch.tensor([length, -CLIP / 2, 0.0], dtype=torch.float64).expand(size, 3) / size

    def score(run: Attacked) -> float:
        return float(sum(np.sign(as_numpy(look.without_branch)[1]) for look in run.recording.sums))

    return Adversary(others.contiguous(), others.new_tensor([0.0, CLIP, 0.0]), score)


def _tipping(method: DPAdamAC) -> Adversary:
    norms = tipping_norms(method)
    others = torch.zeros(len(norms), _ADAM_AC_PARAMETERS, dtype=torch.float64)
    others[:, 0] = torch.tensor(norms)
    canary = others.new_zeros(_ADAM_AC_PARAMETERS)
    canary[0] = method.highest

    def score(run: Attacked) -> float:
        # No record reaches the other coordinates: they hold nothing but noise.
        later = [as_numpy(look.without_branch)[1:] for look in run.recording.sums[1:]]
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
