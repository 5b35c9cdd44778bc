"""The noise that each method needs for the same epsilon: the figures of these pages."""

from vestige.gradients.clipping import Quantile
from vestige.methods import planned_charges, resolve
from vestige.privacy.accounting import noise_for

METHODS = [
    ("dp-sgd", {}),
    ("dp-sam", {}),
    ("dp-sam", {"sample": "fresh"}),
    ("dp-sam-per-example", {}),
    ("dp-is", {"floor": 1.0}),
    ("dp-is", {"floor": 0.5}),
    ("dp-is", {"floor": 0.25}),
    ("fractional-noise", {}),
    ("banded-inverse", {}),
    ("dp-ftrl", {}),
    ("dp-ftrl", {"restart": 10}),
]


def main() -> None:
    """5,000 records, lot 200, 2,500 lots, delta 1e-5, RDP."""
    for name, settings in METHODS:
        method = resolve(name, settings)
        charges = planned_charges(method, method.clipping, 1, 5000, 200, 0.04, 2500)
        found = [noise_for(epsilon, 1e-5, charges, "rdp")[0] for epsilon in (3.0, 8.0)]
        print(f"{name:20} {settings!s:22} epsilon 3: {found[0]:8.3f}   epsilon 8: {found[1]:8.3f}")
    for groups in (1, 3, 20):
        charges = planned_charges(resolve("dp-sgd"), Quantile(), groups, 5000, 200, 0.04, 2500)
        noise, _ = noise_for(8.0, 1e-5, charges, "rdp")
        print(f"quantile clipping, {groups} groups: epsilon 8: {noise:.3f}")


if __name__ == "__main__":
    main()
