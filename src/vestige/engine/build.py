"""From a method and a plan to a run: which parts a method needs, and which settings it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from vestige.engine.importance import Importance, ImportanceClip
from vestige.engine.run import Parts, Run
from vestige.errors import ConfigError
from vestige.gradients import capture
from vestige.gradients.clipping import Auto, Clip, Quantile
from vestige.gradients.groups import Groups
from vestige.memory.recollection import Recollection
from vestige.methods import DPIS, DPAdamACPrivate, Method, resolve, share
from vestige.methods.base import Surroundings
from vestige.plan import PrivacyPlan
from vestige.privacy.ledger import Facts, Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import Door
from vestige.sampling.loader import LotSampler
from vestige.sampling.streams import Randomness
from vestige.updates.adam import AdamBC
from vestige.updates.averaging import Averaging
from vestige.updates.clip_control import ClipControl, ClipSchedule, QuantileControl
from vestige.updates.estimated import EstimatedMemory
from vestige.updates.filters import Filter


def check_settings(
    method: Method,
    optimizer: Optimizer,
    form: Auto | Quantile | None,
    groups: Groups,
    noise: Sequence[NoiseScale],
    workers: int,
    physical: int | None,
) -> None:
    """Refuse what does not go together, before anything is attached to the model."""
    method.check_optimizer(optimizer)
    name = method.name
    if (method.filters_releases or method.own_gradient) and isinstance(optimizer, AdamBC):
        raise ConfigError(
            f"method {name!r} changes the noise after the release, which the correction "
            f"of {type(optimizer).__name__} does not know: use another optimizer."
        )
    if method.fixed_sensitivity and form is not None:
        raise ConfigError(
            f"method {name!r} takes a fixed clip bound, whose sensitivity is known before the run: "
            "use clipping='flat' or 'per_layer'."
        )
    if method.fixed_sensitivity and len(noise) > 1:
        raise ConfigError(
            f"method {name!r} takes one noise multiplier for the whole run: no schedule."
        )
    if method.flat_only and groups.count > 1:
        raise ConfigError(
            f"method {name!r} looks at the whole gradient, not at {groups.count} groups of it: use "
            "flat clipping."
        )
    if isinstance(method, DPAdamACPrivate) and not isinstance(form, Quantile):
        raise ConfigError(
            f"method {name!r} follows the counts of quantile clipping: leave clipping out, or pass "
            "vestige.gradients.clipping.Quantile(...)."
        )
    if isinstance(method, DPIS) and workers:
        raise ConfigError(
            f"method {name!r} draws each lot after the last release, so workers cannot read ahead: "
            f"use num_workers=0 instead of {workers}."
        )
    if method.looks > 1 and physical is not None:
        raise ConfigError(
            f"method {name!r} looks at every lot twice and needs it in one piece: leave "
            f"max_physical_batch_size={physical} out, use sample='fresh', or dp-sat."
        )


def assemble(
    plan: PrivacyPlan,
    method: Method,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    groups: Groups,
    clip: Clip,
    form: Auto | Quantile | None,
    noise: Sequence[NoiseScale],
    randomness: Randomness,
    ledger: Ledger,
    name: str,
    records: int,
    history_dtype: torch.dtype | None,
    denoiser: str | Method | None,
    batch_first: bool,
    self_check: bool,
    seed: int,
) -> Run:
    """The run of `method` under `plan`, not yet attached to the model."""
    around = Surroundings(
        groups.buffer(), groups.slots, groups.segments(), plan, randomness, records
    )
    parts = Parts(
        memory=_memory(method, groups, around, history_dtype),
        filter_share=share(method, plan.steps) if method.filters_releases else None,
        denoiser=_filter(method, denoiser, around),
        ascent=method.ascent(around),
        alternates=method.alternates,
        averaging=_averaging(plan, groups, method.alternates),
        geometry=method.geometry(around.like),
        importance=_importance(method, around),
        clip=_clip_control(method, form, clip, plan),
        rate=method.rate_control(),
    )
    if parts.importance:
        clip = ImportanceClip(clip.bounds, importance=parts.importance)
    watch = capture(module, groups, clip, batch_first, parts.geometry)
    if isinstance(form, Quantile):
        watch.collector.count_unclipped()
    if not method.private and parts.clip:
        watch.collector.norms = []
    correlation = method.correlation(around)
    if correlation and parts.denoiser and isinstance(optimizer, AdamBC):
        raise ConfigError(
            f"denoiser={denoiser!r} after the correlated noise of method {method.name!r} leaves "
            f"noise that {type(optimizer).__name__} cannot know: leave one of them out."
        )
    door = Door(
        groups,
        noise,
        randomness,
        ledger,
        segments=parts.geometry.segments if parts.geometry else None,
        count_noise=plan.count_noise,
        correlation=correlation,
        distortion=method.distortion(around.like, plan),
        private=method.private,
        run=name,
        facts=Facts(plan.adjacency, randomness.repeatable),
    )
    lots = LotSampler(
        randomness,
        records,
        plan.sample_rate,
        plan.lots_per_epoch,
        plan.max_physical_batch_size,
        parts.importance or method.drawing(around),
    )
    if parts.importance:
        lots.measure_by = plan.batch_size
    return Run(
        plan, optimizer, watch, lots, door, randomness, self_check, seed, parts, method.passes
    )


def _memory(
    method: Method, groups: Groups, around: Surroundings, dtype: torch.dtype | None
) -> Recollection | EstimatedMemory | None:
    beta = share(method, around.plan.steps)
    rule, filter = method.memory(around.plan.lots_per_epoch), method.query_filter(around)
    if rule is not None:
        return Recollection(rule, groups, around.like, beta, dtype)
    if filter is None:
        return None
    if dtype is not None:
        raise ConfigError(
            f"history_dtype={dtype} does nothing for method {method.name!r}, which keeps an "
            "estimate instead of past releases: leave it out."
        )
    return EstimatedMemory(filter, around.like, beta)


def _filter(method: Method, denoiser: str | Method | None, around: Surroundings) -> Filter | None:
    """The method's own filter, or the denoiser's."""
    own = method.filter(around)
    if denoiser is None:
        return own
    after = resolve(denoiser).filter(around)
    if after is None or resolve(denoiser).ascent(around) is not None:
        raise ConfigError(
            f"denoiser={denoiser!r} is no filter of releases alone: use 'doppler' or 'kalman' with "
            "beta 1, or leave it out."
        )
    scaled = method.own_gradient or isinstance(method, DPIS)
    if own is not None or method.filters_releases or scaled:
        raise ConfigError(
            f"method {method.name!r} filters or scales its releases itself: leave "
            f"denoiser={denoiser!r} out."
        )
    return after


def _averaging(plan: PrivacyPlan, groups: Groups, alternates: bool) -> Averaging | None:
    if plan.averaging is None:
        return None
    # The number of times that the weights move.
    steps = plan.steps // 2 if plan.steps and alternates else plan.steps
    return Averaging(plan.averaging, {s.name: s.parameter for s in groups.slots}, steps)


def _importance(method: Method, around: Surroundings) -> Importance | None:
    if not isinstance(method, DPIS):
        return None
    plan = around.plan
    return Importance(
        around.randomness,
        around.records,
        plan.dataset_size,
        float(plan.sample_rate),  # type: ignore[arg-type]
        method.floor,
        method.norm_noise,
    )


def _clip_control(
    method: Method, form: Auto | Quantile | None, clip: Clip, plan: PrivacyPlan
) -> ClipControl | None:
    factors, control = method.clip_shape(plan.steps), method.clip_control(clip.bounds)
    if control is not None and form is not None:
        raise ConfigError(
            f"method {method.name!r} moves its clip bound itself: leave clipping={str(form)!r} out."
        )
    if isinstance(form, Quantile):
        if factors is not None:
            raise ConfigError(
                f"method {method.name!r} has a schedule of its clip bound, which quantile clipping "
                "would move as well: use one of them."
            )
        if any(not form.lowest <= c <= form.highest for c in clip.bounds):
            raise ConfigError(
                f"max_grad_norm makes the first bounds {clip.bounds}, outside of quantile "
                f"clipping's range [{form.lowest}, {form.highest}]: start within it, or widen it."
            )
        return QuantileControl(clip.bounds, form, plan.batch_size)
    if factors is not None:
        return ClipSchedule(clip.bounds, factors)
    return control
