"""Record and replay: a run on D, then one on a neighbour of D with everything released frozen.

Whatever is computed outside the clipped sum must come out identical, bit for bit, since it may
depend on the releases alone; and what a lot or all records are asked may move by its gain times its
bound, no further:

    |query_t(D) - query_t(D')| <= gain_t C_g  in every group g;   a centred count by 1/2

The replay draws other noise, which the frozen releases hide from everything that may see them.

Guarantee: none by itself. The replay couples the lots of D and D' (the same draws for the records
that both have) and looks at one pair of data sets; a violation is a proof, a pass is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.audit.tape import Look, Recording, Tape, flat_charges
from vestige.audit.verify.findings import Finding, Report, first_of_each
from vestige.audit.verify.runs import Setting, neighbour, records, small_run
from vestige.errors import VestigeError
from vestige.gradients.clipping import Clipping
from vestige.methods import Method

ORDINARY = Setting()
# Room for eight bands of correlated noise, and lots that hold nothing, or one record; in physical
# batches, whose number must not follow the lot.
SPARSE = Setting(size=12, lot=1, steps=64, physical=2)
SEED = 9  # of lots and noise: both runs of a pair need the same
_SLACK = 1 + 1e-6  # of float64 arithmetic
_NUMBER_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Pair:
    """The recordings of a run and of its replay on the neighbour."""

    first: Recording
    second: Recording

    @property
    def sums(self) -> list[tuple[Look, Look]]:
        """The looks at sums, one beside the other, as far as both go."""
        return list(zip(self.first.sums, self.second.sums, strict=False))

    @property
    def used(self) -> list[float]:
        """How much of its bound the record used in each look at a sum."""
        return [
            float((a.query - b.query).norm()) / (a.gain * math.hypot(*a.bounds))
            for a, b in self.sums
            if a.query.shape == b.query.shape
        ]


def examine(method: Method, *, clipping: Clipping | None = None, seed: int = SEED) -> Report:
    """What a neighbouring data set changes that it must not change: both settings, and a lot that
    is given up."""
    findings: list[Finding] = []
    figures: dict[str, Any] = {}
    for name, setting in (("ordinary lots", ORDINARY), ("sparse lots", SPARSE)):
        setting = replace(setting, clipping=clipping)
        first = record(method, setting, seed)
        try:
            pair = Pair(first, record(method, setting, seed, frozen=first.looks))
        except (VestigeError, RuntimeError, ValueError, TypeError) as error:
            sentence = (
                f"{name}: the run on the neighbour stopped ({type(error).__name__}: {error}), "
                "the first one did not."
            )
            findings.append(Finding("error on one side", sentence))
            continue
        findings += [replace(f, sentence=f"{name}: {f.sentence}") for f in compare(pair)]
        lots = zip(pair.first.lots, pair.second.lots, strict=False)
        figures[name.replace(" ", "_")] = {
            "looks": len(pair.first.looks),
            "largest_move": max(pair.used, default=0.0),
            "empty_on_one_side": sum(bool(a.records) != bool(b.records) for a, b in lots),
        }
    findings += _given_up(method, replace(ORDINARY, clipping=clipping), seed)
    return Report("replay", first_of_each(findings), figures)


def record(
    method: Method,
    setting: Setting,
    seed: int = SEED,
    *,
    frozen: list[Look] | None = None,
    data: Any = None,
) -> Recording:
    """Run `method`; with `frozen`, on the neighbour, with those releases in place of its own.

    `data` is a pair (D, neighbour) to use instead of the setting's own records.
    """
    whole = records(setting) if data is None else data[0]
    if frozen is not None:
        whole = neighbour(whole, method) if data is None else data[1]
    run = small_run(method, whole, setting, noise_seed=seed)
    with Tape(run.engine, frozen=frozen) as tape:
        run.go(tape, setting.steps)
    return tape.finished()


def compare(pair: Pair) -> list[Finding]:
    """Everything in which the two recordings differ more than they may."""
    first, second = pair.first, pair.second
    theirs = public(second)
    findings = [
        *(f for what, ours in public(first).items() for f in _difference(what, ours, theirs[what])),
        *_moves(pair),
        *_counts(pair),
        *_measurements(first, second),
        *_order(first),
    ]
    if not any(pair.used) and len(first.looks) == len(second.looks):
        sentence = (
            "the record that was taken away never moved a query, so this replay shows nothing."
        )
        findings.append(Finding("nothing was tested", sentence, figure=0.0))
    return findings


def public(recording: Recording) -> dict[str, list[Any]]:
    """What may depend on releases alone: by look, by lot, or once."""
    looks = recording.looks
    return {
        "number of releases": [len(looks), [look.kind for look in looks]],
        "lots": [(lot.number, lot.batches) for lot in recording.lots],
        "branch": [look.branch for look in looks],
        "clip bounds": [look.bounds for look in looks],
        "noise scales": [look.stds for look in looks],
        "gain": [look.gain for look in looks],
        "charges": [look.charges for look in looks],
        "diagnostics": recording.told,
        "gradients handed on": recording.gradients,
        "weights": recording.weights,
        "optimizer and model state": recording.states,
        "saved state": [recording.state],
    }


def _difference(what: str, ours: list[Any], theirs: list[Any]) -> Iterable[Finding]:
    """The first place where two lists differ, in a sentence."""
    if len(ours) != len(theirs):
        sentence = (
            f"{what}: {len(ours)} with the record and {len(theirs)} without it; the number must "
            "be the same."
        )
        yield Finding(what, sentence, None, float(abs(len(ours) - len(theirs))), 0.0)
        return
    differing = [t for t, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not same(a, b)]
    if differing:
        first, apart = differing[0], max(_apart(ours[t], theirs[t]) for t in differing)
        sentence = (
            f"{what}: differs with the record, though the releases are the same, first at step "
            f"{first}, at {len(differing)} of {len(ours)}, by up to {apart:.3g}; allowed is 0."
        )
        yield Finding(what, sentence, first, apart, 0.0)


def _moves(pair: Pair) -> Iterable[Finding]:
    """How far a query moves, as a whole and in every group."""
    worst: tuple[float, int, str] = (0.0, 0, "")
    for t, (a, b) in enumerate(pair.sums):
        if a.query.shape != b.query.shape:
            continue
        move = a.query - b.query
        parts = [("the whole query", move, math.hypot(*a.bounds))]
        for group, segment in enumerate(pair.first.segments):
            parts.append((f"group {group} of the query", move[segment], a.bounds[group]))
        for name, part, bound in parts:
            worst = max(worst, (float(part.norm()) / (a.gain * bound), t, name))
    share, step, name = worst
    if not share <= _SLACK:
        sentence = (
            f"one record moves {name} by {share:.4g} times gain * bound at step {step}; allowed "
            "is 1."
        )
        yield Finding("query", sentence, step, share, 1.0)


def _counts(pair: Pair) -> Iterable[Finding]:
    """How far the centred counts of quantile clipping move."""
    for t, (a, b) in enumerate(pair.sums):
        if a.counts is not None and b.counts is not None:
            moved = float((a.counts - b.counts).abs().max())
            if not moved <= 0.5 * _NUMBER_SLACK:
                sentence = (
                    f"one record moves a centred count by {moved:.4g} at step {t}; allowed is 1/2."
                )
                yield Finding("count", sentence, t, moved, 0.5)
                return


def _measurements(first: Recording, second: Recording) -> Iterable[Finding]:
    """How far the numbers of the whole data move."""
    for t, (a, b) in enumerate(zip(first.measurements, second.measurements, strict=False)):
        moved, bound = float((a.total - b.total).abs()), a.bounds[0]
        if not moved <= bound * _NUMBER_SLACK:
            sentence = f"one record moves measurement {t} by {moved:.4g}; allowed is {bound:.4g}."
            yield Finding("measurement", sentence, t, moved, bound)
            return


def _order(recording: Recording) -> Iterable[Finding]:
    """Charge before the noise, recall before the lot."""
    late = [t for t, look in enumerate(recording.looks) if look.late]
    if late:
        sentence = (
            f"the ledger was charged after the noise was drawn, first at step {late[0]}: a crash "
            "between the two would leave a release unpaid."
        )
        yield Finding("charge after noise", sentence, late[0], float(len(late)), 0.0)
    moved = [
        t
        for t, look in enumerate(recording.looks)
        if not same(look.recalled, look.recalled_at_release)
        or not (look.branch is None or same(look.branch, look.recalled))
    ]
    if moved:
        sentence = (
            f"the memory's branch changed after the lot was handed out, first at step {moved[0]}, "
            f"at {len(moved)} of {len(recording.looks)}; it must be recalled before."
        )
        yield Finding("branch after the lot", sentence, moved[0], float(len(moved)), 0.0)


def _given_up(method: Method, setting: Setting, seed: int) -> Iterable[Finding]:
    """A lot that was drawn and given up is paid for."""
    run = small_run(method, records(setting), setting, noise_seed=seed)
    for _ in run.loader:
        run.engine.abandon_lot()
        break
    if not flat_charges(run.engine):
        sentence = (
            "a lot that was drawn and given up left no charge in the ledger; it must be charged "
            "like a release, since the loop has seen it."
        )
        yield Finding("abandoned lot", sentence, 0, 0.0, 1.0)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, tensors and what holds them included; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a.nan_to_num(7e77), b.nan_to_num(7e77)))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and bool(a == b)


def _apart(a: Any, b: Any) -> float:
    """How far two unequal things are apart; infinity where that has no number."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((_apart(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return max((_apart(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if same(a, b):
        return 0.0
    number = isinstance(a, int | float) and isinstance(b, int | float)
    return abs(float(a) - float(b)) if number else math.inf
