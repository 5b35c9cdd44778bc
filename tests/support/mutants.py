"""Deliberately broken copies of the real parts, and which check has to catch each of them.

A mutant breaks the engine through pytest's monkeypatch, so that everything else is the real thing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from vestige.audit.attack.rows import batch_major
from vestige.audit.verify import CHECKS
from vestige.engine import state as saving
from vestige.engine.run import Run
from vestige.engine.ways import Ways
from vestige.gradients import following
from vestige.gradients.clipping import Clip
from vestige.gradients.following import FAMILIES
from vestige.gradients.rows import Rows
from vestige.memory.history import History
from vestige.memory.recall import Recollection
from vestige.methods import DPFTRL, DPIS, FO, BandedInverse, FractionalNoise, Method, correlated
from vestige.privacy import noise_scales as noise
from vestige.privacy.factorisation import inverse_response, inverse_sensitivity, norm
from vestige.privacy.ledger import Ledger
from vestige.release.correlation import Correlation
from vestige.release.door import Branch, Door, Release
from vestige.sampling import loader, lots
from vestige.sampling.loader import Batch, LotSampler
from vestige.sampling.lots import Poisson
from vestige.sampling.streams import MEASURE, NOISE, Randomness
from vestige.updates.control import QuantileControl

HALF = FO(beta=0.5, window=5)
BANDED = BandedInverse(bands=2)
AUDIT = {"audit": "epsilon"}
NOISY = {"noise": "variance", **AUDIT}
UNPLANNED = {"claim": "planned charges", "noise": "charge"}


@dataclass(frozen=True)
class Mutant:
    """A broken copy. `caught` has all checks of `verify` that notice, and a finding of each."""

    name: str
    break_it: Callable[[Any], None]
    caught: Mapping[str, str]
    method: str | Method = "dp-sgd"
    clipping: Any = None


MUTANTS: list[Mutant] = []


def mutant(
    name: str, caught: Mapping[str, str], *methods: str | Method, clipping: Any = None
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a mutant, on DP-SGD or on each of `methods`."""

    def register(break_it: Callable[[Any], None]) -> Callable[[Any], None]:
        for method in methods or ("dp-sgd",):
            title = name if len(methods) < 2 else f"{name} ({getattr(method, 'name', method)})"
            MUTANTS.append(Mutant(title, break_it, caught, method, clipping))
        return break_it

    return register


def changed_noise(patch, change):
    """Let `change(noise, step)` stand for the noise of every release."""
    original = Randomness.normal_blocks

    def blocks(self, like, step, purpose=NOISE):
        for block, drawn in original(self, like, step, purpose):
            yield block, change(drawn.clone(), step)

    patch.setattr(Randomness, "normal_blocks", blocks)


def raw_counts(clipped):
    return None if clipped._counts is None else tuple(clipped._counts.tolist())


def changed_factors(patch, change):
    original = Clip.factors

    def factors(self, square_norms, group, scale, dtype, rounding):
        return change(original, self, square_norms, group, scale, dtype, rounding)

    patch.setattr(Clip, "factors", factors)


# -- the noise ------------------------------------------------------------------------------


@mutant("noise halved", NOISY)
def noise_halved(patch):
    changed_noise(patch, lambda drawn, step: drawn * 0.5)


def noise_times(patch, factor):
    original = Door._add

    def add(self, total, branch, gain, noises, values):
        scaled = ((block, drawn, std * factor(gain)) for block, drawn, std in noises)
        original(self, total, branch, gain, scaled, values)

    patch.setattr(Door, "_add", add)


@mutant("noise scaled by beta as well as accounted at sigma/beta", NOISY, HALF)
def noise_times_beta(patch):
    noise_times(patch, lambda gain: gain)


@mutant("noise scaled by beta twice", NOISY, HALF)
def noise_times_beta_twice(patch):
    noise_times(patch, lambda gain: gain**2)


@mutant("noise on half of the coordinates", NOISY)
def noise_on_half(patch):
    def half(drawn, step):
        drawn[::2] = 0
        return drawn

    changed_noise(patch, half)


@mutant("uniform noise of the same variance", {"noise": "normal law"})
def noise_uniform(patch):
    def uniform(drawn, step):
        return (torch.special.ndtr(drawn.double()) - 0.5).mul(math.sqrt(12)).to(drawn.dtype)

    changed_noise(patch, uniform)


@mutant("one noise for every step", {"noise": "noise repeated"})
def noise_of_step_zero(patch):
    original = Randomness.normal_blocks
    patch.setattr(
        Randomness,
        "normal_blocks",
        lambda self, like, step, purpose=NOISE: original(self, like, 0, purpose),
    )


@mutant("one number for all coordinates", {"noise": "noise shared by coordinates", **AUDIT})
def noise_of_one_number(patch):
    changed_noise(patch, lambda drawn, step: torch.full_like(drawn, float(drawn[0])))


@mutant("noise mixed with the last step's, charged as fresh", {"noise": "noise in a row"})
def noise_mixed(patch):
    original = Randomness.normal_blocks

    def blocks(self, like, step, purpose=NOISE):
        earlier = [drawn.clone() for _, drawn in original(self, like, max(step - 1, 0), purpose)]
        for (block, drawn), old in zip(original(self, like, step, purpose), earlier, strict=True):
            yield block, drawn * math.sqrt(0.75) + old * 0.5

    patch.setattr(Randomness, "normal_blocks", blocks)


@mutant("noise seed reused after resume", {"noise": "noise repeated"}, "dp-sgd", "fo")
def key_reused(patch):
    original = Randomness.__init__

    def init(self, noise_seed=None, *others):
        original(self, noise_seed, *others)
        if noise_seed is None:
            self._key = hashlib.sha256(b"the same for every engine").digest()

    patch.setattr(Randomness, "__init__", init)


@mutant(
    "the sum enters with weight 1 instead of beta",
    {"noise": "noise along the sum", "audit": "epsilon"},
    HALF,
)
def gain_forgotten(patch):
    original = Door._add

    def add(self, total, branch, gain, noises, values):
        original(self, total, branch, 1.0, noises, values)

    patch.setattr(Door, "_add", add)


@mutant("counts of quantile clipping without noise", {"noise": "variance"}, clipping="quantile")
def counts_without_noise(patch):
    patch.setattr(Door, "_noisy_counts", lambda self, clipped: raw_counts(clipped))


@mutant("normaliser of dp-is without noise", {"noise": "variance"}, DPIS())
def normaliser_without_noise(patch):
    original = Randomness.normals

    def normals(self, purpose, step, count):
        drawn = original(self, purpose, step, count)
        return drawn * 0 if purpose == MEASURE else drawn

    patch.setattr(Randomness, "normals", normals)


# -- the charge -----------------------------------------------------------------------------


@mutant("marginal sigma/beta accounted for three groups", {"noise": "charge"}, "sma")
def marginal_accounted(patch):
    patch.setattr(noise, "joint_multiplier", min)


def charged_otherwise(patch, change):
    original = Ledger.charge

    def charge(self, sample_rate, noise_multiplier, account=None):
        changed = change(self, sample_rate, noise_multiplier)
        if changed is not None:
            original(self, *changed, account)

    patch.setattr(Ledger, "charge", charge)


@mutant(
    "two looks charged as one at full sigma",
    {**UNPLANNED, **AUDIT},
    "dp-sam",
)
def two_looks_as_one(patch):
    charged_otherwise(patch, lambda ledger, rate, z: (rate, z * math.sqrt(2)))


@mutant("every other release not charged", UNPLANNED)
def every_other_charged(patch):
    calls = Counter()

    def change(ledger, rate, z):
        calls[id(ledger)] += 1
        return (rate, z) if calls[id(ledger)] % 2 else None

    charged_otherwise(patch, change)
    # Else a state with fewer charges than releases is refused when the run is resumed.
    patch.setattr(saving, "_own_charges", lambda run, state: saving._saved(state["own"]))


@mutant(
    "counts of quantile clipping not charged",
    {"claim": "planned charges", "noise": "charge"},
    clipping="quantile",
)
def counts_not_charged(patch):
    patch.setattr(Door, "_beside", property(lambda self: 0.0))


@mutant("a tree charged as if every record came once", {"noise": "charge"}, DPFTRL())
def tree_charged_once(patch):
    patch.setattr(
        correlated, "tree_sensitivity", lambda steps, period: (steps - 1).bit_length() + 1
    )


@mutant("a banded inverse charged as a single column", {"noise": "charge"}, BANDED)
def single_column(patch):
    patch.setattr(
        correlated,
        "inverse_sensitivity",
        lambda d, steps, period: inverse_sensitivity(d, steps, steps),
    )


@mutant("a banded inverse charged as if its inverse were banded", {"noise": "charge"}, BANDED)
def inverse_cut_off(patch):
    def orthogonal(d, steps, period):
        return math.sqrt(-(-steps // period)) * norm(inverse_response(d, len(d)))

    patch.setattr(correlated, "inverse_sensitivity", orthogonal)


@mutant("a banded inverse with plain Poisson lots", {"noise": "charge"}, BANDED)
def not_in_turn(patch):
    patch.setattr(BandedInverse, "lots", lambda self, context: None)


@mutant(
    "a banded inverse that goes on uncharged after a resume",
    {"lots": "sampling rate", "noise": "charge"},
    BANDED,
)
def block_goes_on(patch):
    patch.setattr(Correlation, "continue_from", lambda self, lot, repeatable: self.paid(lot))


@mutant("charges forgotten on resume", {"noise": "charges lost"})
def charges_forgotten(patch):
    patch.setattr(saving, "_own_charges", lambda run, state: Ledger())
    patch.setattr(Ledger, "load_state_dict", lambda self, state: None)


@mutant("charged after the noise", {"replay": "charge after noise"})
def charged_after_noise(patch):
    charge, release, kept = Door.charge, Door.release, []

    def late(self, clipped, sample_rate, branch=None, gain=1.0, lot=None):
        out = release(self, clipped, sample_rate, branch, gain, lot)
        charge(self, *kept.pop())
        return out

    patch.setattr(Door, "charge", lambda self, *args: kept.append(args))
    patch.setattr(Door, "release", late)


@mutant("an abandoned lot not charged", {"replay": "abandoned lot"})
def abandoned_for_free(patch):
    original = Run.abandon_lot

    def abandon(self):
        self.door.charge = self.door.charge_measurement = lambda *args: None
        original(self)
        del self.door.charge, self.door.charge_measurement

    patch.setattr(Run, "abandon_lot", abandon)


# -- the clip -------------------------------------------------------------------------------


@mutant("clipped after the sum", {"replay": "query", "rows": "query"})
def clipped_after_sum(patch):
    clipped_sum = Run._clipped_sum

    def unclipped(original, clip, square_norms, group, scale, dtype, rounding):
        return torch.full_like(square_norms, scale, dtype=dtype)

    def after(self):
        total = self.capture.collector.total
        length, bound = float(total.norm()), self.capture.collector.clip.sensitivity
        total.mul_(min(1.0, bound / length) if length else 1.0)
        return clipped_sum(self)

    changed_factors(patch, unclipped)
    patch.setattr(Run, "_clipped_sum", after)


@mutant(
    "per-layer C not split",
    {"replay": "query", "rows": "query", **AUDIT},
    clipping="per_layer",
)
def bound_not_split(patch):
    def whole(original, clip, square_norms, group, scale, dtype, rounding):
        wide = replace(clip, bounds=tuple(c * math.sqrt(len(clip.bounds)) for c in clip.bounds))
        return original(wide, square_norms, group, scale, dtype, rounding)

    changed_factors(patch, whole)


@mutant("norms made exact for the whole batch where one is doubtful", {"rows": "query"})
def precision_of_the_batch(patch):
    """Cheap norms overstate by one per cent; a long row has those of all rows taken again."""

    def coarse(original, clip, square_norms, group, scale, dtype, rounding):
        doubtful = bool((square_norms * scale**2 > 16 * clip.bounds[group] ** 2).any())
        norms = square_norms if doubtful else square_norms * 1.01**2
        return original(clip, norms, group, scale, dtype, rounding)

    changed_factors(patch, coarse)


@mutant("clip bound learnt from raw counts", {"replay": "clip bounds"}, clipping="quantile")
def bound_from_raw_counts(patch):
    noisy_counts, following = Door._noisy_counts, QuantileControl._next

    def noisy(self, clipped):
        self.raw_counts = raw_counts(clipped)
        return noisy_counts(self, clipped)

    def raw(self, release):
        kept, release.counts = release.counts, release._door.raw_counts
        bounds = following(self, release)
        release.counts = kept
        return bounds

    patch.setattr(Door, "_noisy_counts", noisy)
    patch.setattr(QuantileControl, "_next", raw)


# -- what follows and what precedes a release -----------------------------------------------


@mutant("divisor len(lot)", {"replay": "weights"})
def divided_by_lot(patch):
    hand_out, release = Run.hand_out, Run._release

    def handed(self, batch):
        hand_out(self, batch)
        self.rows_at_hand = 0 if batch.empty else batch.rows

    def applied(self):
        release(self)
        self._gradient.mul_(self.plan.batch_size / max(1, self.rows_at_hand))

    patch.setattr(Run, "hand_out", handed)
    patch.setattr(Run, "_release", applied)


@mutant("the raw sum handed to the optimizer", {"replay": "weights"})
def raw_sum_applied(patch):
    release = Run._release

    def applied(self):
        release(self)
        self._gradient.copy_(self.capture.collector.total / self.plan.batch_size)

    patch.setattr(Run, "_release", applied)


@mutant("a gate that reads the current sum", {"replay": "branch"}, "fo", "sma")
def gate_reads_sum(patch):
    release = Run._release

    def gated(self):
        for part in self.parts:
            if part.branch is not None:
                length = float(self.capture.collector.total.norm())
                part.branch.values.mul_(1 + math.tanh(length))
        return release(self)

    patch.setattr(Run, "_release", gated)


@mutant("the branch recalled after the lot", {"replay": "branch after the lot"}, "fo")
def recalled_late(patch):
    recall, release = Recollection.lot_begins, Run._release

    def late(self):
        memory = self.part(Recollection)
        if memory is not None:
            recall(memory)
        return release(self)

    patch.setattr(Recollection, "lot_begins", lambda self: None)
    patch.setattr(Recollection, "stepped", lambda self: None)
    patch.setattr(Run, "_release", late)


@mutant("history of raw sums", {"replay": "branch"}, "fo", "sma", "uniform")
def history_of_raw_sums(patch):
    release, append = Door.release, History.append

    def noted(self, clipped, sample_rate, branch=None, gain=1.0, lot=None):
        memory = 0 if branch is None else branch.values
        self.raw_query = gain * clipped._values + memory
        return release(self, clipped, sample_rate, branch, gain, lot)

    def leaking(self, noisy):
        kept = noisy.values.clone()
        noisy.values.copy_(noisy._door.raw_query)
        append(self, noisy)
        noisy.values.copy_(kept)

    patch.setattr(Door, "release", noted)
    patch.setattr(History, "append", leaking)


@mutant(
    "a release of the raw sum, made with the proof of a branch",
    {check: "could not run" for check in CHECKS if check != "rows"},
    "fo",
)
def release_by_branch(patch):
    proofs, init, release = [], Branch.__init__, Door.release

    def noted(self, values, step, *, _certificate=None):
        proofs.append(_certificate)
        init(self, values, step, _certificate=_certificate)

    def forged(self, clipped, sample_rate, branch=None, gain=1.0, lot=None):
        out = release(self, clipped, sample_rate, branch, gain, lot)
        if branch is None:
            return out
        raw = clipped._values
        return Release(raw, out.step, self, out.stds, out.counts, _certificate=proofs[-1])

    patch.setattr(Branch, "__init__", noted)
    patch.setattr(Door, "release", forged)


# -- the lots -------------------------------------------------------------------------------


@mutant("an empty lot skipped", {"replay": "lots"})
def empty_lot_skipped(patch):
    original = LotSampler.__iter__

    def full(self):
        for number, batches in groupby(original(self), lambda _: self.batches[-1].lot):
            every = list(batches)
            if any(every):
                yield from every
                continue
            for batch in [batch for batch in self.batches if batch.lot == number]:
                self.batches.remove(batch)

    patch.setattr(LotSampler, "__iter__", full)


@mutant("as many physical batches as a lot needs", {"replay": "lots"})
def batches_follow_the_lot(patch):
    def needed(self):
        batches = self.batches = deque()
        self.first_lot = self.next_lot
        for number in range(self.next_lot, self.next_lot + self.lots):
            lot = self._drawing.lot(number).tolist()
            step = self.physical or max(1, len(lot))
            for first in range(0, max(1, len(lot)), step):
                rows = lot[first : first + step]
                batches.append(Batch(max(1, len(rows)), not rows, first + step >= len(lot), number))
                yield rows

    patch.setattr(LotSampler, "__iter__", needed)


@mutant("the stand-in row of an empty lot counted", {"replay": "query"})
def stand_in_counted(patch):
    def batch(rows, empty, *more):
        return Batch(rows, False, *more)

    patch.setattr(loader, "Batch", batch)


def drawn_otherwise(patch, change):
    original = Poisson.lot
    patch.setattr(Poisson, "lot", lambda self, number: change(self, number, original(self, number)))


@mutant("sampling rate 1.5 times what is charged", {"lots": "sampling rate"})
def drawn_too_often(patch):
    draw = lots.draw_lot
    patch.setattr(lots, "draw_lot", lambda r, step, size, rate: draw(r, step, size, 1.5 * rate))


@mutant("one record drawn more often than charged", {"lots": "sampling rate of a record"})
def favourite(patch):
    def with_first(self, number, lot):
        often = self._randomness.uniforms(b"favourite", number, 1)[0] < 0.5
        return np.union1d(lot, [0]) if often else lot

    drawn_otherwise(patch, with_first)


@mutant(
    "records drawn twice in a lot",
    {"replay": "query", "rows": "query", "lots": "record drawn twice", "audit": "epsilon"},
)
def drawn_twice(patch):
    drawn_otherwise(patch, lambda self, number, lot: np.repeat(lot, 2))


@mutant(
    "lots of a fixed size charged as Poisson lots",
    {"lots": "spread of the lots", "replay": "query"},  # one record less shifts the others
)
def fixed_size(patch):
    def fixed(self, number, lot):
        size = round(self._rate * self._size)
        return np.argsort(self._randomness.uniforms(b"fixed", number, self._size))[:size]

    drawn_otherwise(patch, fixed)


@mutant(
    "correlated noise with plain Poisson lots",
    {"lots": "record drawn twice", "noise": "charge"},
    FractionalNoise(order=0.5, bands=4),
)
def not_cyclic(patch):
    patch.setattr(FractionalNoise, "lots", lambda self, context: None)


# -- the rows -------------------------------------------------------------------------------


MISATTRIBUTED = {"rows": "mis-attributed rows"}
REFUSED = {"rows": "right model refused"}  # by what follows: labels that disagree meet


@mutant("rows read batch-major, whatever their order is", MISATTRIBUTED)
def rows_read_batch_major(patch):
    patch.setattr(Rows, "first", batch_major)


@mutant("rows that were sorted or turned round not put back", MISATTRIBUTED)
def order_of_rows_ignored(patch):
    patch.setattr(Rows, "canonical", lambda self: torch.arange(self.batch))


@mutant("rows of an elementwise parameter read batch-major", MISATTRIBUTED)
def rows_summed_batch_major(patch):
    def summed(self, value):
        if self.batch == 1:
            return value.unsqueeze(0)
        axis, _ = self.place(value.shape)
        return value.unflatten(axis, (self.batch, -1)).movedim(axis, 0).sum(axis + 1)

    patch.setattr(Rows, "summed", summed)


@mutant("views joined by cat taken for neighbouring rows", REFUSED)
def labels_of_cat_lost(patch):
    joined = FAMILIES["cat"]

    def lost(call):
        label, parts = joined(call), len(call.args[0])
        place = label.place(call.out.shape) if isinstance(label, Rows) else None
        if place is None or place[0] != 0:
            return label
        return label.at(call.out.shape, 0, parts)

    patch.setitem(FAMILIES, "cat", lost)
    patch.setattr(following, "_known", {})  # families that were looked up already


@mutant("axes exchanged without their rows", REFUSED)
def transposes_not_followed(patch):
    def stays(call):
        label = call.label
        place = label.place(call.value.shape) if isinstance(label, Rows) else None
        return label if place is None else label.at(call.out.shape, *place)

    patch.setitem(FAMILIES, "transpose", stays)
    patch.setattr(following, "_known", {})


@mutant("the self-check switched off", MISATTRIBUTED)
def self_check_off(patch):
    patch.setattr(Ways, "_check_way", lambda self, args, kwargs: None)
