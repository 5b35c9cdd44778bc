"""Statements of small runs that were never made, for the tests of their parts."""

from __future__ import annotations

import math
from typing import Any

from vestige import statement
from vestige.plan import PrivacyPlan
from vestige.privacy.ledger import Event
from vestige.privacy.noise_scales import joint_multiplier

# Event sets of every kind: sampled, unsampled, mixed, a schedule, hardly any and hardly no noise.
EVENTS = {
    "sampled": [Event(0.05, 1.1, 200)],
    "unsampled": [Event(1.0, 4.0, 3)],
    "mixed": [Event(1.0, 50.0, 2), Event(0.02, 0.8, 100)],
    "schedule": [Event(0.1, 1 + step / 5, 4) for step in range(6)],
    "quiet": [Event(0.01, 40.0, 10)],
    "loud": [Event(0.5, 0.3, 20)],
    "silent": [Event(0.1, math.inf, 3)],
}


def plan_of(**changes: Any) -> PrivacyPlan:
    values: dict[str, Any] = {
        "method": "dp-sgd",
        "dataset_size": 1000,
        "size_declared": False,
        "batch_size": 50,
        "sample_rate": 0.05,
        "clipping": "flat",
        "group_names": ("all",),
        "bounds": (1.0,),
        "noise_multiplier": 1.1,
        "noise_stds": (1.1,),
        "steps": 200,
    }
    return PrivacyPlan(**values | changes)


def grouped(**changes: Any) -> PrivacyPlan:
    three = {"clipping": "per_layer", "group_names": ("a", "b", "c"), "bounds": (0.5, 1.0, 2.0)}
    return plan_of(**three | changes)


def made(events: list[Event] | None = None, **changes: Any) -> dict[str, Any]:
    """A statement of a run of DP-SGD, with some of its facts changed."""
    options: dict[str, Any] = {
        "delta": 1e-5,
        "accountant": "rdp",
        "released": 200,
        "repeatable": False,
        "caveats": [],
    }
    plan = changes.pop("plan", plan_of())
    charged = EVENTS["sampled"] if events is None else events
    return statement.build(plan, charged, **options | changes)


def whole() -> dict[str, Any]:
    """A statement with every part filled."""
    sigma = joint_multiplier([2.0] * 3)
    return made(
        [Event(0.05, sigma, 200), Event(0.05, math.inf, 2)],
        plan=grouped(noise_multiplier=sigma, noise_stds=(1.0, 2.0, 4.0), count_noise=None),
        earlier=[Event(0.1, 2.0, 3)],
        caveats=["a caveat"],
        run={"dataset": "d", "model": "m", "seed": 1, "classes": 2, "target_epsilon": 9.0},
    )
