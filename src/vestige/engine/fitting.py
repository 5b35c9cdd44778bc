"""max_physical_batch_size="auto": the most rows whose gradients fit into memory, found by trial.

Forward and backward passes on synthetic rows, in the shape of the data's, take twice as many rows
each time, until a lot fits or memory ends; the last step is halved. On a GPU memory ends where
torch says so. A CPU's must not be tried out, so growth is measured and extended in proportion,
up to half of what is free.

With several processes each tries its share of a lot, and all take the least number that one found.

Guarantee: the number follows from the model, the shape of a record, the lot's public size and the
machines. No number of a record is in it, and nothing is drawn from the secret key.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vestige.engine.build import Ingredients
from vestige.engine.prepare import Request, prepare
from vestige.errors import ConfigError
from vestige.gradients import Capture
from vestige.gradients.rows import Summed
from vestige.gradients.shards import is_sharded
from vestige.gradients.synthetic import KINDS, Kind, RowMaker, own_randomness
from vestige.gradients.trial import Trial
from vestige.parallel.ranks import Ranks
from vestige.plan import PrivacyPlan
from vestige.sampling.collate import Collate, Views

_INSTEAD = "Give max_physical_batch_size a number."
_STATUS = Path("/proc/self/status")


def fitted(request: Request, ranks: Ranks) -> Request:
    """The request with as many rows as fit; as it is where a rank's share of a lot fits at once."""
    if ranks.world > 1 and any(map(is_sharded, request.module.parameters())):
        raise ConfigError(
            "max_physical_batch_size='auto' does not go with parameters in shards: a trial that "
            f"ends one rank's memory would leave the others in the middle of a pass. {_INSTEAD}"
        )
    plan, _, made = ranks.each(lambda: prepare(request))
    here = made.groups.slots[0].parameter.device.type
    free = ranks.least(ranks.each(lambda: free_memory() if here == "cpu" else 0.0))
    most = math.ceil(plan.expected_lot + 6 * math.sqrt(plan.expected_lot))
    if not request.options.sharded:  # else one rank may have most of the records
        most = -(-most // ranks.world)
    found = ranks.each(lambda: _units(request, plan, made, most, free / ranks.beside))
    units = ranks.least(found)
    rows = None if units == most else units * plan.unit_rows
    return replace(request, max_physical_batch_size=rows)


def _units(request: Request, plan: PrivacyPlan, made: Ingredients, most: int, free: float) -> int:
    """As many units, up to `most`, as fit on this rank; on a CPU into half of `free` bytes."""
    capture = Capture(made.module, made.groups, made.clip, made.batch_first, made.geometry)
    capture.mean_loss = plan.loss_reduction == "mean"
    capture.tracker.learning = True
    own = capture.collector.total.device
    capture.attach()
    try:
        with own_randomness(own):
            steps = _Steps(capture, _call(request, plan, own), plan.unit_rows)
            fits = told(steps) if own.type == "cuda" else foreseen(steps, free / 2)
            units = most_that_fits(fits, most)
    finally:
        capture.stop_watching()
        capture.detach()
    if not units:
        raise ConfigError(
            f"max_physical_batch_size='auto': the {plan.unit_rows} rows of one privacy unit do not "
            "fit into memory. Take a smaller model or record, or recompute its blocks "
            "(torch.utils.checkpoint)."
        )
    return units


def most_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, to one part in eight; with one part in eight to
    spare where memory has ended below `most`."""
    low, high = 0, 1
    while high <= most and fits(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low - low // 8


class _Steps:
    """Forward and backward passes of the model on so many units of synthetic rows."""

    def __init__(self, capture: Capture, call: Any, unit_rows: int) -> None:
        self._capture, self._unit_rows = capture, unit_rows
        self._maker = RowMaker(capture, call)
        self._kind: Kind | None = None

    def __call__(self, units: int) -> None:
        if self._kind is None:
            self._kind = self._first_kind()
        self._run(units, self._kind)

    def _first_kind(self) -> Kind:
        """The first kind of content that the model takes."""
        why: Exception | None = None
        for kind in KINDS:
            try:
                self._run(1, kind)
                return kind
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                why = why or error
                self._capture.stop_watching()
        raise ConfigError(
            "max_physical_batch_size='auto': the model does not run on synthetic rows in the shape "
            f"of the data's ({type(why).__name__}: {str(why)[:200]}). {_INSTEAD}"
        ) from why

    def _run(self, units: int, kind: Kind) -> None:
        capture, rows = self._capture, units * self._unit_rows
        trial = Trial(capture, self._maker.make(rows, kind, False), self._maker.batched, rows)
        leaves = trial.captured(trial.inputs, rows, self._unit_rows)
        found = trial.outputs_in(leaves)
        targets = [(output.value, output.cotangent) for output in found.values()]
        if not targets:
            losses = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            losses = [t for t in losses if isinstance(capture.tracker.label(t), Summed)]
            targets = [(loss, torch.ones_like(loss)) for loss in losses[:1]]
        if not targets:
            raise ValueError("it returns nothing that rows have a part in")
        torch.autograd.backward(*zip(*targets, strict=True))  # type: ignore[arg-type]
        self.clear()

    def clear(self) -> None:
        """Nothing is left of a pass, also of one that was broken off."""
        self._capture.stop_watching()
        self._capture.collector.clear()
        self._capture.batch = None


def told(steps: _Steps) -> Callable[[int], bool]:
    """Whether so many units fit: the device says where they do not."""

    def fits(units: int) -> bool:
        try:
            steps(units)
            return True
        except torch.OutOfMemoryError:
            full = True
        # Out of the handler: the error held the frames, and they the tensors.
        steps.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return not full

    return fits


def foreseen(steps: _Steps, budget: float) -> Callable[[int], bool]:
    """Whether so many units fit into `budget` bytes more than what is used now."""
    begun = _resident("VmRSS")
    per_unit = 0.0  # of the largest trial so far

    def fits(units: int) -> bool:
        nonlocal per_unit
        if per_unit * units > budget:
            return False
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            steps(units)
        except torch.OutOfMemoryError:
            return False
        grown = _resident("VmHWM") - begun
        per_unit = grown / units
        return grown <= budget

    return fits


def free_memory() -> float:
    """The bytes that are free on this machine."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024


def _resident(what: str) -> float:
    return _kilobytes(_STATUS, what) * 1024


def _kilobytes(file: Path, name: str) -> int:
    try:
        return int(file.read_text().split(f"{name}:")[1].split()[0])
    except (OSError, IndexError, ValueError) as error:
        raise ConfigError(
            "max_physical_batch_size='auto': how much memory is free is read from /proc, which "
            f"this system does not have. {_INSTEAD}"
        ) from error


def _call(request: Request, plan: PrivacyPlan, device: torch.device) -> Any:
    """What the model is given: the input of a batch, in shape; records are blanked."""
    loader, options = request.data_loader, request.options
    views = None if options.augment is None else Views(options.augment, plan.views or 1)
    batch = Collate(loader.dataset, loader.collate_fn, views, plan.unit_rows)([])
    batch = pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch[0] if isinstance(batch, tuple | list) else batch,), {}
