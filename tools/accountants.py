"""Epsilon by Vestige's accountants and by Opacus', on twelve settings.

python tools/accountants.py          prints the table of docs/from-opacus.md; needs opacus
"""

from __future__ import annotations

import warnings

from vestige.checks import round_up
from vestige.privacy.accounting import epsilon
from vestige.privacy.events import Event

# Sampling rate, noise multiplier, releases, delta.
SETTINGS = [
    (0.001, 0.8, 10_000, 1e-6),
    (0.001, 1.1, 50_000, 1e-6),
    (0.004, 1.1, 5_000, 1e-5),
    (0.004, 0.7, 5_000, 1e-5),
    (0.01, 0.6, 1_000, 1e-5),
    (0.01, 1.0, 1_000, 1e-5),
    (0.01, 2.0, 10_000, 1e-5),
    (0.02, 1.5, 2_000, 1e-5),
    (0.04, 1.0, 500, 1e-5),
    (0.04, 3.0, 5_000, 1e-5),
    (0.1, 2.0, 500, 1e-5),
    (0.2, 5.0, 1_000, 1e-5),
]


def row(rate: float, noise: float, steps: int, delta: float) -> list[float]:
    """Epsilon by pld, prv, rdp and Opacus' rdp."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    event = [Event(rate, noise, steps)]
    found = []
    for ours, kind in (("pld", PRVAccountant), ("rdp", RDPAccountant)):
        theirs = kind()
        theirs.history = [(noise, rate, steps)]
        found += [epsilon(event, delta, ours), theirs.get_epsilon(delta=delta)]
    return found


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print("| rate | noise | releases | delta | pld | Opacus prv | rdp | Opacus rdp |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for setting in SETTINGS:
        rate, noise, steps, delta = setting
        values = " | ".join(str(round_up(value, 3)) for value in row(*setting))
        print(f"| {rate} | {noise} | {steps:,} | {delta:g} | {values} |")


if __name__ == "__main__":
    main()
