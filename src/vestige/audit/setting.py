"""What is audited, checked before anything slow begins: the method, the run's length, the trials.

A lot has a tenth of the data and a run has 32 of them: few enough to be quick, and enough that
epsilon falls steeply with the noise, which makes the bounds close. Both are public choices of the
auditor; a bound at other ones is as valid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vestige.checks import check_count, is_number
from vestige.errors import ConfigError
from vestige.gradients.clipping import taken_apart
from vestige.methods import Method, charged_weight, planned_charges, resolve
from vestige.plan import ADJACENCY, at
from vestige.privacy.accounting import Charge, noise_for

if TYPE_CHECKING:
    from vestige.gradients.clipping import Clipping

STEPS, SAMPLE_RATE, TRIALS, CONFIDENCE, DELTA, EPSILON = 32, 0.1, 4000, 0.95, 1e-5, 2.0
SCHEDULED_STEPS = 8  # where every step has noise of its own, which PLD is slow for
FEWEST_TRIALS = 100
_FEW_EVENTS = 4
LAYERS = 3  # of the canaries' model where every layer is a group


def usual_steps(method: Method) -> int:
    """The length of a run where none is given."""
    if not method.private:
        return 2  # whole runs are repeated, and the leaks show at once
    scheduled = method.noise_shape(STEPS) is not None
    return SCHEDULED_STEPS if scheduled else STEPS


@dataclass(frozen=True)
class Setting:
    """One audit: a method, its noise or its target, and how hard it is attacked.

    `target` is None where the noise was given. `records` is the declared size of the data: half of
    the canaries, or all of them where those that are out are zeroed.
    """

    method: Method
    target: float | None
    noise: float | None
    steps: int
    trials: int
    confidence: float
    delta: float
    seed: int | None
    clipping: Clipping
    rate: float
    layers: int  # of the audit's model, if each is a group; otherwise 1

    @classmethod
    def checked(
        cls,
        method: str | Method,
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        steps: int | None = None,
        trials: int = TRIALS,
        confidence: float = CONFIDENCE,
        delta: float = DELTA,
        seed: int | None = None,
        clipping: Any = None,
        sample_rate: float = SAMPLE_RATE,
        layers: int = LAYERS,
    ) -> Setting:
        """ConfigError unless all of this can be audited."""
        chosen = resolve(method)
        if epsilon is not None and noise_multiplier is not None:
            raise ConfigError(
                f"epsilon={epsilon} and noise_multiplier={noise_multiplier}: give one of them, the "
                "claim to reach or the noise to attack."
            )
        for name, value in (("epsilon", epsilon), ("noise_multiplier", noise_multiplier)):
            if value is not None and (not is_number(value) or value <= 0):
                raise ConfigError(
                    f"{name}={value!r} must be a finite number above 0: without noise there is no "
                    "claim to attack."
                )
        steps = usual_steps(chosen) if steps is None else check_count("steps", steps)
        if type(trials) is not int or trials < FEWEST_TRIALS:
            raise ConfigError(
                f"trials={trials!r} is too small: half of them choose the threshold and half give "
                f"the bound, so use at least {FEWEST_TRIALS} (4000 is usual)."
            )
        if not is_number(confidence) or not 0 < confidence < 1:
            raise ConfigError(
                f"confidence={confidence!r} must be strictly between 0 and 1: 0.95 lets one audit "
                "in twenty exceed the truth at most."
            )
        if not is_number(delta) or not 0 < delta < 1:
            raise ConfigError(f"delta={delta!r} must be strictly between 0 and 1; 1e-5 is usual.")
        if seed is not None and type(seed) is not int:
            raise ConfigError(f"seed={seed!r} must be a whole number, or None for fresh noise.")
        if not is_number(sample_rate) or not 0 < sample_rate < 1:
            raise ConfigError(
                f"sample_rate={sample_rate!r} must be strictly between 0 and 1: a trial needs lots "
                "with and lots without its canary."
            )
        form: Any = chosen.clipping if clipping is None else clipping
        partition, _ = taken_apart(form)
        if not isinstance(partition, str):
            raise ConfigError(
                "the audit brings its own model, whose parameters a partition cannot name: use "
                "clipping='flat', 'per_layer' or an automatic or quantile form of them."
            )
        target = epsilon if noise_multiplier is None else None
        return cls(
            chosen,
            EPSILON if target is None and noise_multiplier is None else target,
            noise_multiplier,
            steps,
            trials,
            float(confidence),
            float(delta),
            seed,
            form,
            float(sample_rate),
            layers if partition == "per_layer" else 1,
        )

    @property
    def zeroed(self) -> bool:
        """Whether a record that is out keeps its place with a gradient of zero."""
        return self.method.adjacency != ADJACENCY

    def batch_size(self, records: int) -> int:
        """The expected lot of `records` records."""
        return max(1, round(self.rate * records))

    def charges(self, records: int, batch: int | None = None) -> Counter[Charge]:
        """What the run will be charged, before its noise is known."""
        lot = self.batch_size(records) if batch is None else batch
        return planned_charges(
            self.method.tabulated(self.steps),
            self.clipping,
            self.layers,
            records,
            lot,
            lot / records,
            self.steps,
        )

    def noise_multiplier(self, charges: Counter[Charge]) -> float:
        """The noise that was given, or the one that reaches the target."""
        if self.noise is not None:
            return float(self.noise)
        assert self.target is not None
        # PLD takes many seconds for many different events. The Rényi bound solves for a little
        # more noise, and the claim that is attacked is the engine's own, below the target.
        accountant = "pld" if len(charges) <= _FEW_EVENTS else "rdp"
        return noise_for(self.target, self.delta, charges, accountant)[0]

    def multipliers(self, noise: float) -> list[float]:
        """The planned multiplier of every release of a run without correlated noise."""
        chosen = self.method.tabulated(self.steps)
        weights = charged_weight(chosen, self.steps)
        return [noise / (chosen.looks**0.5 * at(weights, t)) for t in range(self.steps)]
