"""The plot of an audit: error rates of the attack against the trade-off curves of the claim.

Left: is the canary in the data? Nothing may lie below the claim. Right, where there is a family:
was it in this lot? Lines differ in style as well as in colour, the region of confidence is shaded,
and nothing is said by colour alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri

from vestige.audit.bounds import Trials, clopper_pearson
from vestige.audit.plot_files import write_plot
from vestige.audit.result import AuditResult
from vestige.checks import round_down, round_up
from vestige.statement import curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of Okabe and Ito (2008), as in lab/templates/report.mplstyle: they survive print and colour
# blindness.
INK, MUTED, GRID, SHADE = "#1d2530", "#5c6773", "#e3e7ec", "#f0f4f8"
_BLUE, _VERMILLION, _GREEN = "#0072b2", "#d55e00", "#009e73"
_X = np.linspace(0, 1, 500)
_CLAIMED: Any = {"color": _VERMILLION, "ls": "--", "lw": 1.6}
_ALLOWED: Any = {"color": _GREEN, "ls": "-.", "lw": 1.6}


def write(result: AuditResult, path: Path) -> None:
    """Draw the audit into a PNG, PDF or SVG file."""
    from matplotlib.figure import Figure

    panels = 1 if result.evidence.family is None else 2
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
        y = [curves.misses(alpha, result.delta, claim) for alpha in _X]
        axes.fill_between(_X, 0, y, color=SHADE, hatch="//", edgecolor=GRID, lw=0, zorder=0)
        label = f"{_word(result)} ({round_up(claim)}, {result.delta:g})-DP: nothing below"
        axes.plot(_X, y, color=INK, lw=1.6, label=label)
    for events, words, style in (
        (evidence.claimed_events, "the claimed run, all deltas", _CLAIMED),
        (evidence.family_events, "most noise the family allows", _ALLOWED),
    ):
        if events and claim is not None:
            pairs = curves.epsilon_curve(events, result.delta, "pld")
            curve = curves.trade_off(events, "pld", pairs, alarms=_X.tolist())
            axes.plot(*zip(*curve, strict=True), label=words, **style)
    cut = evidence.cut
    _empirical(axes, evidence.whole, result)
    missed, alarm = 1 - cut.hits / cut.hit_trials, cut.false_alarms / cut.alarm_trials
    point = (alarm, missed) if cut.says_in else (missed, alarm)
    mark: Any = {"marker": "D", "ms": 7, "color": _BLUE, "mec": "white", "ls": "none"}
    axes.plot(*point, **mark, clip_on=False, zorder=5, label="chosen test")
    axes.legend(fontsize=8, loc="upper right", framealpha=0.95)


def _one_step(axes: Axes, result: AuditResult) -> None:
    assert result.evidence.family is not None
    _frame(axes, "One release: was the canary in the lot?")
    for multiplier, words, style in (
        (result.noise_multiplier_attacked, "claimed multiplier", _CLAIMED),
        (result.noise_multiplier_upper, "most noise allowed:", _ALLOWED),
    ):
        if multiplier:
            with np.errstate(all="ignore"):
                curve = ndtr(ndtri(1 - _X) - 1 / multiplier)
            axes.plot(_X, curve, label=f"{words} {multiplier:.3f}", **style)
    _empirical(axes, result.evidence.family, result)
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


def _empirical(axes: Axes, trials: Trials, result: AuditResult) -> None:
    """The attack's error rates with the pointwise Clopper-Pearson region."""
    scores, inside = trials.judged
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
