"""From a method and a plan to a run: strategies in front of the door, parts behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vestige.engine.run import Run
from vestige.errors import ConfigError
from vestige.geometry import Geometry
from vestige.gradients import Capture
from vestige.gradients.clipping import Auto, Clip, Quantile
from vestige.gradients.groups import Groups
from vestige.gradients.shards import own_groups, own_places
from vestige.memory.history import Keeping
from vestige.methods import Method, resolve
from vestige.methods.method import BuildContext, DrawContext, Feature, check_together
from vestige.parallel.ranks import Ranks
from vestige.parallel.sums import Sums
from vestige.plan import PrivacyPlan
from vestige.privacy.ledger import Facts, Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.correlation import Correlation
from vestige.release.door import Door, Position
from vestige.release.part import Part
from vestige.sampling.collate import Views
from vestige.sampling.loader import LotSampler, batches_of_a_lot
from vestige.sampling.lots import Drawing
from vestige.sampling.streams import Randomness
from vestige.sampling.units import Units
from vestige.updates.adam import AdamBC, KnownNoise
from vestige.updates.averaging import Averaging
from vestige.updates.control import ClipControl, ClipSchedule, QuantileControl
from vestige.updates.decoding import Decoding
from vestige.updates.filters import Filter
from vestige.updates.master_weights import MasterWeights


@dataclass(frozen=True)
class Ingredients:
    """What a run is built from, beside its plan and its method."""

    module: nn.Module
    optimizer: Optimizer
    groups: Groups
    geometry: Geometry | None
    clip: Clip
    form: Auto | Quantile | None
    noise: Sequence[NoiseScale]
    records: int
    units: Units | None
    augment: Callable[[Any], Any] | None
    workers: int
    batch_first: bool
    keeping: Keeping
    denoiser: str | Method | None
    master_weights: bool = False


def features(made: Ingredients, physical: int | None) -> dict[Feature, Any]:
    """What a run with these settings has, and some methods do not go with."""
    corrects = type(made.optimizer).__name__ if isinstance(made.optimizer, AdamBC) else None
    present = {
        Feature.MOVING_CLIP: repr(str(made.form)) if made.form else None,
        Feature.QUANTILE: str(made.form) if isinstance(made.form, Quantile) else None,
        Feature.GROUPS: made.groups.count if made.groups.count > 1 else None,
        Feature.NOISE_SCHEDULE: len(made.noise) if len(made.noise) > 1 else None,
        Feature.WORKERS: made.workers or None,
        Feature.PHYSICAL_BATCHES: physical,
        Feature.NOISE_CORRECTION: corrects,
        Feature.DENOISER: None if made.denoiser is None else repr(made.denoiser),
        Feature.DENOISED_CORRECTION: corrects if made.denoiser is not None else None,
        Feature.HISTORY_DTYPE: made.keeping.dtype,
    }
    return {feature: value for feature, value in present.items() if value is not None}


def check_settings(method: Method, made: Ingredients, physical: int | None) -> None:
    """Refuse what does not go together, before anything is attached to the model."""
    method.check_optimizer(made.optimizer)
    check_together(method, features(made, physical))
    form = made.form
    if isinstance(form, Quantile) and not all(
        form.lowest <= bound <= form.highest for bound in made.clip.bounds
    ):
        raise ConfigError(
            f"max_grad_norm makes the first bounds {made.clip.bounds}, outside of quantile "
            f"clipping's range [{form.lowest}, {form.highest}]: start within it, or widen it."
        )


def build(
    plan: PrivacyPlan,
    method: Method,
    made: Ingredients,
    randomness: Randomness,
    ledger: Ledger,
    name: str,
    ranks: Ranks | None = None,
) -> Run:
    """The run of `method` under `plan`, called `name` on the ledger, not yet attached."""
    ranks = ranks or Ranks()
    here = own_groups(made.groups)
    randomness.held = own_places(made.groups)
    draw = DrawContext(here.buffer(), plan, randomness, made.records)
    drawing, noise = method.lots(draw), method.noise(draw)
    watch = Capture(made.module, made.groups, made.clip, made.batch_first, made.geometry)
    watch.mean_loss = plan.loss_reduction == "mean"
    context = BuildContext(
        **vars(draw),
        groups=here,
        capture=watch,
        optimizer=made.optimizer,
        position=Position(),
        clip=made.clip,
        clip_control=_clip_control(method, made, watch, plan),
        lots=drawing,
        keeping=_shared(made.keeping, ranks, sharded=here is not made.groups),
    )
    watch.collector.clip = method.clip(context)
    own = method.parts(context)
    door = Door(
        here,
        made.noise,
        randomness,
        ledger,
        segments=made.geometry.segments if made.geometry else None,
        count_noise=plan.count_noise,
        correlation=noise if isinstance(noise, Correlation) else None,
        distortion=None if isinstance(noise, Correlation) else noise,
        private=method.info.private,
        run=name,
        facts=Facts(plan.adjacency, randomness.repeatable),
        position=context.position,
    )
    lots = _sampler(plan, made, randomness, drawing)
    parts, passes = _all_parts(own, made, context), method.passes(context, own)
    run = Run(plan, made.optimizer, watch, lots, door, parts, passes, ranks)
    run.excludes = method.excludes()
    if run.survey:
        rows = plan.units_per_batch or plan.batch_size
        lots.measured_in = rows, -(-plan.dataset_size // (rows * randomness.share[1]))
    return run


def _sampler(
    plan: PrivacyPlan, made: Ingredients, randomness: Randomness, drawing: Drawing | None
) -> LotSampler:
    """What draws the lots: of rows, of views of them, or of units."""
    lots = LotSampler(
        randomness,
        made.records,
        plan.sample_rate,
        plan.lots_per_epoch,
        plan.units_per_batch,
        drawing,
        batches_of_a_lot(plan.expected_lot, plan.units_per_batch, randomness.share[1]),
    )
    lots.units = made.units
    lots.views = None if made.augment is None else Views(made.augment, plan.views or 1)
    return lots


def _shared(keeping: Keeping, ranks: Ranks, sharded: bool) -> Keeping:
    """How several ranks keep releases and divide what they find of the weights."""
    if ranks.group is None:
        return keeping
    sums = Sums(ranks)
    return replace(keeping, add=sums.total if sharded else None, divide=sums.divided)


def _all_parts(own: Sequence[Part], made: Ingredients, context: BuildContext) -> list[Part]:
    """The method's parts, with what the run has beside them, in the order of their moments."""
    parts = list(own)
    if made.geometry:
        parts.append(Decoding(made.geometry))
    if made.denoiser is not None:
        parts.append(_denoiser(made.denoiser, context))
    if isinstance(made.optimizer, AdamBC):
        parts.append(KnownNoise(made.optimizer, made.groups.slots))
    if context.clip_control:
        parts.insert(0, context.clip_control)  # what follows it reads the fraction that was clipped
    if context.plan.averaging is not None:
        halved = any(part.withholds for part in parts)
        steps = context.plan.steps
        moves = steps // 2 if steps and halved else steps  # how often the weights move
        weights = {slot.name: slot.parameter for slot in made.groups.slots}
        parts.append(Averaging(context.plan.averaging, weights, moves))
    if made.master_weights:
        narrow = {slot.name: slot.parameter for slot in made.groups.slots}
        parts.append(MasterWeights(narrow, made.optimizer))  # last: others see what they move
    return parts


def _denoiser(denoiser: str | Method, context: BuildContext) -> Filter:
    """The filter of another method, after this one."""
    parts = resolve(denoiser).parts(context)
    if len(parts) == 1 and isinstance(parts[0], Filter):
        return parts[0]
    raise ConfigError(
        f"denoiser={denoiser!r} is no filter of releases alone: use 'doppler' or 'kalman' with "
        "beta 1, or leave it out."
    )


def _clip_control(
    method: Method, made: Ingredients, watch: Capture, plan: PrivacyPlan
) -> ClipControl | None:
    """What moves the clip bounds of this run, unless the method does."""
    bounds, collector = made.clip.bounds, watch.collector
    if isinstance(made.form, Quantile):
        return QuantileControl(bounds, collector, made.form, plan.batch_size)
    factors = method.clip_shape(plan.steps)
    return None if factors is None else ClipSchedule(bounds, collector, factors)
