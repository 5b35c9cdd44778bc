"""From the arguments of make_private to a plan: everything is checked, and nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vestige.checks import check_count
from vestige.engine.build import Ingredients, check_settings
from vestige.engine.options import Options, check_counts
from vestige.engine.validation import (
    check_criterion,
    check_model,
    check_optimizer,
)
from vestige.errors import ConfigError
from vestige.gradients.clipping import Auto, Clip, Clipping, Quantile, split_clipping
from vestige.gradients.groups import partition
from vestige.gradients.shards import own_groups
from vestige.memory.history import Keeping
from vestige.methods import Method, planned_charges, query_weight, resolve
from vestige.plan import (
    PrivacyPlan,
    Schedule,
    Table,
    constant,
    lots_per_epoch,
    of_users,
    sampling_rate,
)
from vestige.privacy.accounting import Charge
from vestige.privacy.noise_scales import NoiseScale, noise_scales, shaped
from vestige.sampling.loader import check_loader
from vestige.sampling.units import Units


@dataclass(frozen=True)
class Request:
    """What make_private was given."""

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[Any]
    noise_multiplier: Schedule | None
    max_grad_norm: float | Sequence[float]
    method: str | Method
    clipping: Clipping | None
    max_physical_batch_size: int | None
    loss_reduction: str
    criterion: Any
    dataset_size: int | None
    steps: int | None
    options: Options

    @cached_property
    def units(self) -> Units | None:
        """The users whose records these are; None where every record is its own unit."""
        return units_of(self.data_loader, self.options)

    @property
    def records(self) -> int:
        """The number of privacy units in the data, private unless it was declared."""
        return len(self.data_loader.dataset) if self.units is None else len(self.units)  # type: ignore[arg-type]


def units_of(data_loader: DataLoader[Any], options: Options) -> Units | None:
    """The users of a data set; None where every record is its own unit."""
    if options.units is None:
        return None
    return Units(options.units, options.rows_per_unit, len(data_loader.dataset))  # type: ignore[arg-type]


def check_sharded(method: Method, dataset_size: int | None) -> None:
    """Refuse what needs to see all records, where every rank has its own."""
    if dataset_size is None:
        raise ConfigError(
            "sharded=True without dataset_size: declare the public number of records of all ranks "
            "together. The number that each of them has is private, and so is their sum."
        )
    if type(method).lots is not Method.lots:
        raise ConfigError(
            f"method {method.name!r} draws its lots in a way that needs all records on every rank: "
            "leave sharded=True out, or use a method with Poisson lots, such as dp-sgd or fo."
        )


def prepare(request: Request) -> tuple[PrivacyPlan, Method, Ingredients]:
    """The frozen plan of the run, its method, and what it is built from."""
    options, steps = request.options, request.steps
    check_model(request.module)
    check_optimizer(request.optimizer, request.module)
    check_criterion(request.criterion, request.loss_reduction, request.module)
    batch_size = check_loader(request.data_loader)
    check_counts(max_physical_batch_size=request.max_physical_batch_size, steps=steps)
    method = resolve(request.method).tabulated(steps)
    method.check_optimizer(request.optimizer)
    made = _ingredients(request, method)
    check_settings(method, made, request.max_physical_batch_size)
    geometry, form, noise = made.geometry, made.form, made.noise
    names = made.groups.names if geometry is None else ("direction", "magnitude")
    first = made.clip.bounds if geometry is None else geometry.bounds(made.clip.bounds[0])
    shape = method.clip_shape(steps) or (1.0,)
    bounds = [tuple(c * shape[min(t, len(shape) - 1)] for c in first) for t in range(len(noise))]
    stds = tuple(scale.stds(bounds[t]) for t, scale in enumerate(noise))
    size = request.records if request.dataset_size is None else request.dataset_size
    rate = sampling_rate(size, batch_size, options.sample_rate, steps)
    unit = _unit(options, request.max_physical_batch_size)
    adjacency = method.info.adjacency
    plan = PrivacyPlan(
        method=method.name,
        dataset_size=size,
        size_declared=request.dataset_size is not None,
        batch_size=batch_size,
        sample_rate=method.charged_rate(rate),
        clipping=_clipping_name(request, method),
        group_names=names,
        bounds=bounds[0],
        noise_multiplier=constant([scale.joint for scale in noise]),
        noise_stds=stds[0] if len(stds) == 1 else stds,
        beta=query_weight(method, steps),
        settings=_settings(method, options.denoiser),
        averaging=options.averaging,
        history_dtype=None if options.history_dtype is None else str(options.history_dtype),
        steps=steps,
        max_physical_batch_size=request.max_physical_batch_size,
        loss_reduction=request.loss_reduction,
        count_noise=form.noise(batch_size) if isinstance(form, Quantile) else None,
        adjacency=adjacency if options.units is None else of_users(adjacency),
        private=method.info.private,
        **unit,
    )
    return plan, method, made


def _unit(options: Options, physical: int | None) -> dict[str, int | None]:
    """The rows of a privacy unit; refused where a physical batch has no room for one."""
    views = None if options.augment is None else options.views or 1
    rows = (options.rows_per_unit or 1) * (views or 1)
    if physical is not None and rows > physical:
        raise ConfigError(
            f"max_physical_batch_size={physical} has no room for the {rows} rows of one privacy "
            f"unit (rows_per_unit={options.rows_per_unit}, views={views}): a unit is clipped as a "
            "whole and never split. Raise it, or take fewer rows."
        )
    return {"views": views, "rows_per_unit": options.rows_per_unit}


def _ingredients(request: Request, method: Method) -> Ingredients:
    options = request.options
    parts, form = split_clipping(method.clipping if request.clipping is None else request.clipping)
    groups = partition(request.module, parts)
    stability = form.stability if isinstance(form, Auto) else None
    geometry = method.geometry(own_groups(groups).buffer())
    names = groups.names if geometry is None else ("direction", "magnitude")
    given = options.group_noise_multipliers
    noise = noise_scales(request.noise_multiplier, given, names, request.steps)
    if geometry is not None and given is None:
        noise = [NoiseScale.evenly(scale.joint, len(names)) for scale in noise]
    return Ingredients(
        module=request.module,
        optimizer=request.optimizer,
        groups=groups,
        geometry=geometry,
        clip=Clip.over(request.max_grad_norm, groups.names, stability),
        form=form,
        noise=shaped(noise, method.noise_shape(request.steps)),
        records=request.records,
        units=request.units,
        augment=options.augment,
        workers=request.data_loader.num_workers,
        batch_first=options.batch_first,
        keeping=Keeping(options.history_dtype, options.device_of_history),
        denoiser=options.denoiser,
        master_weights=options.master_weights,
    )


def _clipping_name(request: Request, method: Method) -> str:
    """The clipping, in words for the plan."""
    parts, form = split_clipping(method.clipping if request.clipping is None else request.clipping)
    return str(form) if form else parts if isinstance(parts, str) else "partition"


def _settings(method: Method, denoiser: str | Method | None) -> dict[str, Any]:
    """The method's settings, and those of a denoiser after it."""
    if denoiser is None:
        return method.settings()
    after = resolve(denoiser)
    return method.settings() | {"denoiser": {"name": after.name, **after.settings()}}


@dataclass(frozen=True)
class Ahead:
    """What a run of known length will be charged, before its noise is known."""

    method: Method
    steps: int
    rate: Table
    charges: Counter[Charge]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        data_loader: DataLoader[Any],
        method: Method,
        length: tuple[int | None, int | None],
        dataset_size: int | None,
        options: Options,
        clipping: Clipping | None,
    ) -> Ahead:
        """`length` are epochs or steps. A schedule is evaluated here, once: what is calibrated is
        what runs."""
        epochs, steps = length
        if (epochs is None) == (steps is None):
            raise ConfigError(
                f"epochs={epochs} and steps={steps}: give exactly one of them, the length of the "
                "run that the noise is solved for."
            )
        lot, size = check_loader(data_loader), dataset_size
        if size is None:
            units = units_of(data_loader, options)
            size = len(data_loader.dataset) if units is None else len(units)  # type: ignore[arg-type]
        sampling_rate(size, lot)  # refuses bad sizes before they are divided
        if steps is None:
            steps = check_count("epochs", epochs) * lots_per_epoch(size, lot)
        rate = sampling_rate(size, lot, options.sample_rate, check_count("steps", steps))
        method = method.tabulated(steps)
        form = method.clipping if clipping is None else clipping
        groups = partition(module, split_clipping(form)[0]).count
        charges = planned_charges(method, form, groups, size, lot, rate, steps)
        return cls(method, steps, rate, charges)
