"""The law of the noise: what releases of the real engine carry against what the ledger was charged.

    residual = release - gain * clipped sum - branch   ~   N(0, std_g^2)  in every group g,

independent from coordinate to coordinate, from release to release, and of sum and branch. What a
lot's releases reveal together is one Gaussian with 1/z^2 = sum over looks and groups of
(gain C_g / std_g)^2, plus (1/2 / count noise)^2 for every count; the ledger's charge for the lot
must not be weaker. Where it is, the residuals are measured against the larger noise that the charge
implies. Correlated noise is made white first with its known covariance: see mixing.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from vestige.audit.mixing import Mixing
from vestige.audit.tape import Look, Recording
from vestige.audit.verify.findings import (
    FALSE_ALARM,
    Finding,
    Report,
    Tested,
    alarms,
    first_of_each,
)
from vestige.audit.verify.runs import OBSERVED, Observation, Stretch, observe, stretches
from vestige.gradients.clipping import Clipping
from vestige.methods import Method

_SLACK = 1e-6  # of the multipliers' arithmetic


def observations(
    method: Method,
    steps: int = OBSERVED.steps,
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
    if not seen[0].method.private:
        reason = "the method claims no guarantee: every charge is at multiplier 0"
        return Report("noise", not_applicable=reason)
    exact: list[Finding] = []
    tested: list[Tested] = []
    releases = numbers = 0
    for one in seen:
        residuals = _Residuals(one)
        exact += residuals.findings
        name = "noise by group: " if one.setting.groups else ""
        for finding, chance in _tests(residuals, one.whole):
            tested.append((replace(finding, sentence=name + finding.sentence), chance))
        releases += sum(len(rows) for rows in residuals.sums)
        numbers += sum(rows.numel() for rows in residuals.sums)
    figures = {
        "releases": releases,
        "numbers": numbers,
        "tests": len(tested),
        "false_alarm_rate": false_alarm,
    }
    return Report("noise", first_of_each([*exact, *alarms(tested, false_alarm)]), figures)


@dataclass
class _Residuals:
    """Residuals in units of the noise that the charges imply: standard normal if all is well.

    `findings` are charges that are weaker than what they pay for, or were lost.
    """

    seen: Observation
    findings: list[Finding] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # (releases, numbers) of each recording
    along: dict[str, list[float]] = field(default_factory=dict)  # the sum, and the branch
    counts: list[float] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        one = self.seen
        self._mixing = Mixing(one.method, one.plan, one.setting.steps) if one.correlated else None
        if one.forgotten:
            sentence = (
                f"{one.forgotten} charges that were saved are not on the ledger of the engine "
                "that resumed."
            )
            self.findings.append(Finding("charges lost", sentence, None, float(one.forgotten), 0.0))
        for recording in one.recordings:
            self._read(recording)

    def _read(self, recording: Recording) -> None:
        """Compare every charge with what it pays for, and take the residuals in its units."""
        rows: list[Tensor] = []
        first = recording.looks[0].lot if recording.looks else 0
        for stretch in stretches(recording, self.seen.correlated):
            needed = self._revealed(recording, stretch, first)
            covered = math.inf if not stretch.multiplier else stretch.multiplier**-2
            if needed > covered * (1 + _SLACK):
                self.findings.append(_weak(stretch, needed))
            # More noise than was told would have to be there for the charge to hold.
            implied = math.sqrt(needed / covered) if covered > 0 and math.isfinite(needed) else 1.0
            implied = max(1.0, implied)
            for look in stretch.looks:
                if look.kind == "measurement":
                    self.numbers.append(_scaled(float(look.noise), look.stds[0] * implied))
                    continue
                marginal = self._marginal(look, first)
                rows.append(_row(look, recording.segments, implied / marginal))
                self._count(look, implied)
        if rows:
            white = torch.stack(rows)
            white = white if self._mixing is None else self._mixing.whitened(white)
            self.sums.append(white)
            self._point(white, recording.sums)

    def _count(self, look: Look, implied: float) -> None:
        """The noise of the counts of quantile clipping."""
        if look.counts is not None and look.noisy_counts is not None:
            noise = (self.seen.plan.count_noise or 0.0) * implied
            pairs = zip(look.noisy_counts, look.counts.tolist(), strict=True)
            self.counts += [_scaled(noisy - count, noise) for noisy, count in pairs]

    def _point(self, white: Tensor, looks: list[Look]) -> None:
        """How far every residual reaches along the sum and the branch of its release."""
        for row, look in zip(white, looks, strict=True):
            for name, other in (("sum", look.total), ("branch", look.branch)):
                if other is not None and bool(other.any()):
                    length = float(row @ other.double() / other.double().norm())
                    self.along.setdefault(name, []).append(length)

    def _marginal(self, look: Look, first: int) -> float:
        return 1.0 if self._mixing is None else float(self._mixing.marginals[look.lot - first])

    def _revealed(self, recording: Recording, stretch: Stretch, first: int) -> float:
        """1/z^2 of everything that was let out for one charge."""
        if self._mixing is None:
            return sum(self._inverse_square(look) for look in stretch.looks)
        look = stretch.looks[0]
        # The told standard deviations hold the marginal ones of the mixing, which are taken out.
        unit = self._inverse_square(look) * self._marginal(look, first) ** 2
        numbers = set(stretch.lots)
        of_record: dict[int, set[int]] = {}
        for lot in recording.lots:
            for record in lot.records if lot.number in numbers else ():
                of_record.setdefault(record, set()).add(lot.number - first)
        patterns = {tuple(sorted(lots)) for lots in of_record.values()}
        rows = len({look.lot for look in recording.looks})
        return unit * max((self._mixing.revealed(rows, lots) for lots in patterns), default=0.0)

    def _inverse_square(self, look: Look) -> float:
        """1/z^2 of one look: the sensitivity over the noise, squared, over groups and counts."""
        total = 0.0
        for bound, std in zip(look.bounds, look.stds, strict=True):
            total += (look.gain * bound / std) ** 2 if std else math.inf
        if look.counts is not None:
            noise = self.seen.plan.count_noise
            total += look.counts.numel() * (0.5 / noise) ** 2 if noise else math.inf
        return total


def _row(look: Look, segments: list[slice], factor: float) -> Tensor:
    """The residual of one release in units of its noise; nothing where that is zero."""
    row = look.noise.double().clone()
    for segment, std in zip(segments, look.stds, strict=True):
        row[segment] = row[segment] / (std * factor) if std else 0.0
    return row


def _scaled(value: float, std: float) -> float:
    return value / std if std else 0.0


def _weak(stretch: Stretch, needed: float) -> Finding:
    multiplier = needed**-0.5 if math.isfinite(needed) else 0.0
    charged = f"charged {stretch.multiplier:.4g}" if stretch.rate else "not charged"
    sentence = (
        f"what was released of lot {stretch.lots[0]} has multiplier {multiplier:.4g} and was "
        f"{charged}; the charge must not be above."
    )
    return Finding("charge", sentence, stretch.looks[0].step, stretch.multiplier, multiplier)


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
    count, power = len(values), float(values @ values)
    tails = float(stats.chi2.cdf(power, count)), float(stats.chi2.sf(power, count))
    sentence = (
        f"{name} has {power / count:.4g} times the variance that the ledger's charge implies "
        f"({count} numbers)."
    )
    yield Finding("variance", sentence, None, power / count, 1.0), 2 * min(tails)
    distance = stats.kstest(values, "norm")
    apart = float(distance.statistic)
    sentence = (
        f"{name} is no normal law of the charged width: the distribution functions are "
        f"{apart:.3g} apart ({count} numbers)."
    )
    yield Finding("normal law", sentence, None, apart, 0.0), float(distance.pvalue)


def _along(name: str, lengths: list[float]) -> Tested:
    """The noise along the sum or the branch that it was added to: it must not know of them."""
    mean = sum(lengths) / len(lengths)
    sentence = (
        f"what a release holds beside gain * sum + branch points along the {name}: {mean:.3g} "
        "standard deviations of the noise on average; allowed is 0."
    )
    chance = 2 * float(stats.norm.sf(abs(mean) * math.sqrt(len(lengths))))
    return Finding(f"noise along the {name}", sentence, None, mean, 0.0), chance


def _in_a_row(recordings: list[Tensor]) -> Tested:
    """The correlation of each release's noise with the next one's."""
    products = sum(float((rows[1:] * rows[:-1]).sum()) for rows in recordings)
    power = sum(float(rows.square().sum()) for rows in recordings)
    pairs = sum(rows[1:].numel() for rows in recordings)
    numbers = sum(rows.numel() for rows in recordings)
    correlation = products / pairs / (power / numbers) if power else 0.0
    sentence = (
        f"the noise of a release has correlation {correlation:.3g} with that of the next; it "
        "is charged as independent."
    )
    chance = 2 * float(stats.norm.sf(abs(correlation) * math.sqrt(pairs)))
    return Finding("noise in a row", sentence, None, correlation, 0.0), chance


def _pairs(what: str, of: str, rows: Tensor) -> Tested:
    """The largest correlation of two rows: its square is Beta(1/2, (n - 1)/2) for a pair."""
    lengths = rows.norm(dim=1, keepdim=True)
    units = torch.where(lengths > 0, rows / lengths, 0.0)
    gram = (units @ units.T).abs().fill_diagonal_(0.0)
    one, other = sorted(divmod(int(gram.argmax()), len(rows)))
    largest = min(float(gram.max()), 1.0)
    pairs, numbers = len(rows) * (len(rows) - 1) / 2, rows.shape[1]
    usual = min(1.0, math.sqrt(2 * math.log(max(pairs, 2.0)) / numbers))
    sentence = (
        f"the noise of {of} {one} and {other} has correlation {largest:.4g}; the largest of "
        f"{pairs:.0f} independent pairs would be about {usual:.2g}."
    )
    chance = min(1.0, pairs * float(stats.beta.sf(largest**2, 0.5, (numbers - 1) / 2)))
    return Finding(what, sentence, one if of == "releases" else None, largest, usual), chance
