"""The law of the noise: what releases of the real engine carry against what the ledger was charged.

    residual = release - gain * clipped sum - branch   ~   N(0, std_g^2)  in every group g,

independent from coordinate to coordinate, from release to release, and of sum and branch. What a
lot's releases reveal together is one Gaussian with 1/z^2 = sum over looks and groups of
(gain C_g / std_g)^2, plus (1/2 / count noise)^2 for every count; the ledger's charge for the lot
must not be weaker. Where it is, the residuals are measured against the larger noise that the charge
implies.

Tested on many releases, each at its share of a declared false-alarm rate: variances (chi-square),
the normal law (Kolmogorov-Smirnov), the directions of sum and branch, releases in a row, every pair
of releases and every pair of coordinates (correlations). The releases are those of a run and of
another that was resumed from the middle of it, so that noise which comes twice is a pair with
correlation 1. Correlated noise is made white first with its known covariance: see mixing.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.audit.findings import Finding, Report
from vestige.audit.mixing import Mixing
from vestige.audit.observation import SETTING, Observation, Stretch, observe, stretches
from vestige.audit.recording import Look, Recording
from vestige.gradients.clipping import Clipping
from vestige.methods import Method, resolve

FALSE_ALARM = 1e-6  # of one run of the check on a method that is right
_SLACK = 1e-6  # of the multipliers' arithmetic
Tested = tuple[Finding, float]  # what would be reported, and the chance of such a figure


@dataclass
class _Residuals:
    """Residuals in units of the noise that the charges imply: standard normal if all is well."""

    sums: list[Tensor] = field(default_factory=list)  # (releases, numbers) of each recording
    along: dict[str, list[float]] = field(default_factory=dict)  # the sum, and the branch
    counts: list[float] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)


def noise_check(
    method: str | Method,
    *,
    steps: int = SETTING.steps,
    seed: int | None = None,
    false_alarm: float = FALSE_ALARM,
    clipping: Clipping | None = None,
) -> list[Finding]:
    """Where the noise is not what the ledger was charged for: empty where all is well."""
    chosen = resolve(method)
    return list(examine(observations(chosen, steps, seed, clipping), false_alarm).findings)


def observations(
    method: Method,
    steps: int = SETTING.steps,
    seed: int | None = None,
    clipping: Clipping | None = None,
) -> list[Observation]:
    """Releases with one multiplier, and with one for each group where there are several groups."""
    first = observe(method, steps=steps, seed=seed, clipping=clipping)
    groups = len(first.plan.group_names)
    if groups == 1:
        return [first]
    return [first, observe(method, steps=steps, seed=seed, clipping=clipping, groups=groups)]


def examine(seen: list[Observation], false_alarm: float = FALSE_ALARM) -> Report:
    """The check on runs that were observed."""
    method = seen[0].method
    if not method.private:
        reason = "the method claims no guarantee: every charge is at multiplier 0"
        return Report("noise", not_applicable=reason)
    exact: list[Finding] = []
    tested: list[Tested] = []
    figures: dict[str, Any] = {"releases": 0, "numbers": 0}
    for one in seen:
        residuals = _Residuals()
        mixing = Mixing(method, one.plan, one.setting.steps) if one.correlated else None
        if one.forgotten:
            exact.append(_forgotten(one.forgotten))
        for recording in one.recordings:
            exact += _charges(one, recording, mixing, residuals)
        name = "noise by group: " if one.setting.groups else ""
        for finding, chance in _tests(residuals, one.whole):
            tested.append((_prefixed(name, finding), chance))
        figures["releases"] += sum(len(rows) for rows in residuals.sums)
        figures["numbers"] += sum(rows.numel() for rows in residuals.sums)
    level = false_alarm / max(1, len(tested))
    found = [finding for finding, chance in tested if not chance >= level]
    figures |= {"tests": len(tested), "false_alarm_rate": false_alarm}
    return Report("noise", tuple(_first_of_each([*exact, *found])), figures)


def _prefixed(name: str, finding: Finding) -> Finding:
    return Finding(
        finding.what, name + finding.sentence, finding.step, finding.figure, finding.bound
    )


def _first_of_each(findings: Iterable[Finding]) -> Iterator[Finding]:
    kinds: set[str] = set()
    for finding in findings:
        if finding.what not in kinds:
            kinds.add(finding.what)
            yield finding


def _charges(
    seen: Observation, recording: Recording, mixing: Mixing | None, residuals: _Residuals
) -> list[Finding]:
    """Compare every charge with what it pays for, and take the residuals in the implied units."""
    found: list[Finding] = []
    rows: list[Tensor] = []
    first = recording.looks[0].lot if recording.looks else 0
    for stretch in stretches(recording, seen.correlated):
        needed = _revealed(seen, recording, stretch, mixing, first)
        covered = math.inf if not stretch.multiplier else stretch.multiplier**-2
        if needed > covered * (1 + _SLACK):
            found.append(_weak(stretch, needed))
        # More noise than was told would have to be there for the charge to hold.
        implied = math.sqrt(needed / covered) if covered > 0 and math.isfinite(needed) else 1.0
        implied = max(1.0, implied)
        for look in stretch.looks:
            if look.kind == "measurement":
                residuals.numbers.append(_scaled(float(look.noise), look.stds[0] * implied))
                continue
            marginal = 1.0 if mixing is None else float(mixing.marginals[look.lot - first])
            rows.append(_row(look, recording.segments, implied / marginal))
            if look.counts is not None and look.noisy_counts is not None:
                noise = (seen.plan.count_noise or 0.0) * implied
                exact = look.counts.tolist()
                residuals.counts += [
                    _scaled(noisy - count, noise)
                    for noisy, count in zip(look.noisy_counts, exact, strict=True)
                ]
    if rows:
        white = torch.stack(rows)
        white = white if mixing is None else mixing.whitened(white)
        residuals.sums.append(white)
        for row, look in zip(white, recording.sums, strict=True):
            for name, other in (("sum", look.total), ("branch", look.branch)):
                if other is not None and bool(other.any()):
                    length = float(row @ other.double() / other.double().norm())
                    residuals.along.setdefault(name, []).append(length)
    return found


def _forgotten(charges: int) -> Finding:
    return Finding(
        "charges lost",
        f"{charges} charges that were saved are not on the ledger of the engine that resumed.",
        figure=float(charges),
        bound=0.0,
    )


def _row(look: Look, segments: list[slice], factor: float) -> Tensor:
    """The residual of one release in units of its noise; nothing where that is zero."""
    row = look.noise.double().clone()
    for segment, std in zip(segments, look.stds, strict=True):
        row[segment] = row[segment] / (std * factor) if std else 0.0
    return row


def _scaled(value: float, std: float) -> float:
    return value / std if std else 0.0


def _revealed(
    seen: Observation, recording: Recording, stretch: Stretch, mixing: Mixing | None, first: int
) -> float:
    """1/z^2 of everything that was let out for one charge."""
    if mixing is None:
        return sum(_inverse_square(look, seen) for look in stretch.looks)
    looks = stretch.looks
    # The told standard deviations hold the marginal ones of the mixing, which are taken out.
    unit = _inverse_square(looks[0], seen) * float(mixing.marginals[looks[0].lot - first]) ** 2
    numbers = set(stretch.lots)
    of_record: dict[int, list[int]] = {}
    for lot in recording.lots:
        for record in lot.records if lot.number in numbers else ():
            of_record.setdefault(record, []).append(lot.number - first)
    patterns = {tuple(sorted(set(lots))) for lots in of_record.values()}
    rows = len({look.lot for look in recording.looks})
    return unit * max((mixing.revealed(rows, lots) for lots in patterns), default=0.0)


def _inverse_square(look: Look, seen: Observation) -> float:
    """1/z^2 of one look: the sensitivity over the noise, squared, over groups and counts."""
    total = 0.0
    for bound, std in zip(look.bounds, look.stds, strict=True):
        total += (look.gain * bound / std) ** 2 if std else math.inf
    if look.counts is not None:
        noise = seen.plan.count_noise
        total += look.counts.numel() * (0.5 / noise) ** 2 if noise else math.inf
    return total


def _weak(stretch: Stretch, needed: float) -> Finding:
    multiplier = needed**-0.5 if math.isfinite(needed) else 0.0
    charged = f"charged {stretch.multiplier:.4g}" if stretch.rate else "not charged"
    return Finding(
        "charge",
        f"what was released of lot {stretch.lots[0]} has multiplier {multiplier:.4g} and was "
        f"{charged}; the charge must not be above.",
        step=stretch.looks[0].step,
        figure=stretch.multiplier,
        bound=multiplier,
    )


def _tests(residuals: _Residuals, recording: Recording) -> Iterator[Tested]:
    """Every test of one observation."""
    if residuals.sums:
        rows = torch.cat(residuals.sums)
        for name, segment in zip(recording.group_names, recording.segments, strict=True):
            yield from _law(f"the noise of group {name!r}", rows[:, segment].flatten().numpy())
        for name, lengths in residuals.along.items():
            yield _along(name, lengths)
        yield _in_a_row(residuals.sums)
        yield _pairs("noise repeated", "releases", rows)
        yield _pairs("noise shared by coordinates", "coordinates", rows.T)
    if residuals.counts:
        yield from _law("the noise of the counts", np.array(residuals.counts))
    if residuals.numbers:
        yield from _law("the noise of the measurements", np.array(residuals.numbers))


def _law(name: str, values: Any) -> Iterator[Tested]:
    """Variance by chi-square, both tails, and the whole law by Kolmogorov-Smirnov."""
    from scipy.stats import chi2, kstest

    count, power = len(values), float(values @ values)
    tails = float(chi2.cdf(power, count)), float(chi2.sf(power, count))
    yield (
        Finding(
            "variance",
            f"{name} has {power / count:.4g} times the variance that the ledger's charge implies "
            f"({count} numbers).",
            figure=power / count,
            bound=1.0,
        ),
        2 * min(tails),
    )
    distance = kstest(values, "norm")
    yield (
        Finding(
            "normal law",
            f"{name} is no normal law of the charged width: the distribution functions are "
            f"{distance.statistic:.3g} apart ({count} numbers).",
            figure=float(distance.statistic),
            bound=0.0,
        ),
        float(distance.pvalue),
    )


def _along(name: str, lengths: list[float]) -> Tested:
    """The noise along the sum or the branch that it was added to: it must not know of them."""
    from scipy.stats import norm

    mean = sum(lengths) / len(lengths)
    return (
        Finding(
            f"noise along the {name}",
            f"what a release holds beside gain * sum + branch points along the {name}: {mean:.3g} "
            "standard deviations of the noise on average; allowed is 0.",
            figure=mean,
            bound=0.0,
        ),
        2 * float(norm.sf(abs(mean) * math.sqrt(len(lengths)))),
    )


def _in_a_row(recordings: list[Tensor]) -> Tested:
    """The correlation of each release's noise with the next one's."""
    from scipy.stats import norm

    products = sum(float((rows[1:] * rows[:-1]).sum()) for rows in recordings)
    power = sum(float(rows.square().sum()) for rows in recordings)
    pairs = sum(rows[1:].numel() for rows in recordings)
    numbers = sum(rows.numel() for rows in recordings)
    correlation = products / pairs / (power / numbers) if power else 0.0
    return (
        Finding(
            "noise in a row",
            f"the noise of a release has correlation {correlation:.3g} with that of the next; it "
            "is charged as independent.",
            figure=correlation,
            bound=0.0,
        ),
        2 * float(norm.sf(abs(correlation) * math.sqrt(pairs))),
    )


def _pairs(what: str, of: str, rows: Tensor) -> Tested:
    """The largest correlation of two rows: its square is Beta(1/2, (n - 1)/2) for a pair."""
    from scipy.stats import beta

    lengths = rows.norm(dim=1, keepdim=True)
    units = torch.where(lengths > 0, rows / lengths, 0.0)
    gram = (units @ units.T).abs().fill_diagonal_(0.0)
    place = int(gram.argmax())
    one, other = sorted(divmod(place, len(rows)))
    largest = min(float(gram.max()), 1.0)
    pairs, numbers = len(rows) * (len(rows) - 1) / 2, rows.shape[1]
    return (
        Finding(
            what,
            f"the noise of {of} {one} and {other} has correlation {largest:.4g}; the largest of "
            f"{pairs:.0f} independent pairs would be about {_usual(pairs, numbers):.2g}.",
            step=one if of == "releases" else None,
            figure=largest,
            bound=_usual(pairs, numbers),
        ),
        min(1.0, pairs * float(beta.sf(largest**2, 0.5, (numbers - 1) / 2))),
    )


def _usual(pairs: float, numbers: int) -> float:
    """About where the largest of so many correlations lies."""
    return min(1.0, math.sqrt(2 * math.log(max(pairs, 2.0)) / numbers))
