"""The plot of an audit: error rates of the attack against the trade-off curves of the claim.

Left: is the canary in the data? Nothing may lie below the claim. Right, where there is a family:
was it in this lot? Lines differ in style as well as in colour, the region of confidence is shaded,
and nothing is said by colour alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri

from vestige.audit.bounds import clopper_pearson
from vestige.audit.palette import GRID, INK, MUTED, SERIES, SHADE
from vestige.audit.plot_files import write_plot
from vestige.audit.result import Array, AuditResult, Flags
from vestige.checks import round_down, round_up
from vestige.privacy.ledger import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _VERMILLION, _GREEN = SERIES[:3]
_X = np.linspace(0, 1, 500)
_CLAIMED: Any = {"color": _VERMILLION, "ls": "--", "lw": 1.6}
_ALLOWED: Any = {"color": _GREEN, "ls": "-.", "lw": 1.6}


def write(result: AuditResult, path: Path) -> None:
    """Draw the audit into a PNG, PDF or SVG file."""
    from matplotlib.figure import Figure

    panels = 1 if result.evidence.family_scores is None else 2
    figure = Figure(figsize=(5.2 * panels, 4.9), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _whole_run(axes[0], result)
    if panels == 2:
        _one_step(axes[1], result)
    claim = round_up(result.limit, none="infinite")
    family = result.epsilon_lower_family
    bounds = f"at least {round_down(result.epsilon_lower)}"
    if family is not None:
        bounds += f" (free) and {round_down(family)} (family)"
    gap = "\n" if panels == 1 else " "
    figure.suptitle(
        f"{result.method}, {result.mode}: epsilon {_word(result)} {claim},{gap}{bounds} at "
        f"{result.level} confidence",
        fontsize=11,
        color=INK,
    )
    write_plot(figure, path)


def _word(result: AuditResult) -> str:
    return "published" if result.epsilon_claimed is None else "claimed"


def _whole_run(axes: Axes, result: AuditResult) -> None:
    _frame(axes, "Whole run: is the canary in the data?")
    evidence, claim = result.evidence, result.limit
    if claim is not None:
        y = dp_curve(_X, claim, result.delta)
        axes.fill_between(_X, 0, y, color=SHADE, hatch="//", edgecolor=GRID, lw=0, zorder=0)
        label = f"{_word(result)} ({round_up(claim)}, {result.delta:g})-DP: nothing below"
        axes.plot(_X, y, color=INK, lw=1.6, label=label)
    if evidence.claimed_events and claim is not None:
        curve = run_curve(_X, evidence.claimed_events, claim)
        axes.plot(_X, curve, label="the claimed run, all deltas", **_CLAIMED)
    if evidence.family_events and result.epsilon_lower_family:
        curve = run_curve(_X, evidence.family_events, result.epsilon_lower_family)
        axes.plot(_X, curve, label="most noise the family allows", **_ALLOWED)
    used, cut = ~evidence.choosing, evidence.cut
    _empirical(axes, evidence.scores[used], evidence.member[used], result)
    missed, alarm = 1 - cut.hits / cut.hit_trials, cut.false_alarms / cut.alarm_trials
    point = (alarm, missed) if cut.says_in else (missed, alarm)
    mark: Any = {"marker": "D", "ms": 7, "color": _BLUE, "mec": "white", "ls": "none"}
    axes.plot(*point, **mark, clip_on=False, zorder=5, label="chosen test")
    axes.legend(fontsize=8, loc="upper right", framealpha=0.95)


def _one_step(axes: Axes, result: AuditResult) -> None:
    evidence = result.evidence
    assert evidence.family_scores is not None
    assert evidence.family_inside is not None and evidence.family_choosing is not None
    _frame(axes, "One release: was the canary in the lot?")
    for multiplier, words, style in (
        (result.noise_multiplier_attacked, "claimed multiplier", _CLAIMED),
        (result.noise_multiplier_upper, "most noise allowed:", _ALLOWED),
    ):
        if multiplier:
            with np.errstate(all="ignore"):
                curve = ndtr(ndtri(1 - _X) - 1 / multiplier)
            axes.plot(_X, curve, label=f"{words} {multiplier:.3f}", **style)
    used = ~evidence.family_choosing
    _empirical(axes, evidence.family_scores[used], evidence.family_inside[used], result)
    axes.legend(fontsize=8, loc="upper right", framealpha=0.95)


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel("false positives: said in, was out", fontsize=9)
    axes.set_ylabel("false negatives: said out, was in", fontsize=9)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.grid(color=GRID, lw=0.6)
    axes.tick_params(labelsize=8, colors=MUTED)
    axes.plot([0, 1], [1, 0], color=MUTED, ls=":", lw=1.0, label="guessing")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _empirical(axes: Axes, scores: Array, inside: Flags, result: AuditResult) -> None:
    """The attack's error rates with the pointwise Clopper-Pearson region."""
    low, high = np.sort(scores[~inside]), np.sort(scores[inside])
    ranks = np.linspace(0, 1, 120)
    cuts = np.unique(np.concatenate([np.quantile(low, ranks), np.quantile(high, ranks)]))
    alarms = len(low) - np.searchsorted(low, cuts, side="right")
    misses = np.searchsorted(high, cuts, side="right")
    alpha = (1 - result.confidence) / 2
    near = clopper_pearson(alarms, len(low), alpha), clopper_pearson(misses, len(high), alpha)
    lower = np.stack([near[0][0], near[1][0]])
    upper = np.stack([near[0][1], near[1][1]])
    region = np.concatenate([lower, upper[:, ::-1]], axis=1)
    axes.fill(*region, color=_BLUE, alpha=0.18, lw=0, label=f"{result.level} region, pointwise")
    x, y = np.append(1.0, alarms / len(low)), np.append(0.0, misses / len(high))
    axes.plot(x, y, color=_BLUE, lw=1.8, clip_on=False, zorder=4, label="the attack")


def dp_curve(x: Array, epsilon: float, delta: float) -> Array:
    """The fewest false negatives that (epsilon, delta)-DP allows beside x false positives."""
    steep = 1 - delta - math.exp(min(epsilon, 700)) * x
    flat = math.exp(-epsilon) * (1 - delta - x)
    return np.maximum(0, np.maximum(steep, flat))


def run_curve(x: Array, events: tuple[Event, ...], epsilon: float) -> Array:
    """The trade-off curve of a run: the envelope of its (epsilon, delta) pairs, by PLD."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for event in events:
        one = dp_accounting.PoissonSampledDpEvent(
            event.sample_rate, dp_accounting.GaussianDpEvent(event.noise_multiplier)
        )
        accountant.compose(dp_accounting.SelfComposedDpEvent(one, event.count))
    pairs = ((e, accountant.get_delta(e)) for e in np.linspace(0, 1.5 * epsilon + 0.1, 60))
    envelope: Array = np.max([dp_curve(x, float(e), float(d)) for e, d in pairs], axis=0)
    return envelope
