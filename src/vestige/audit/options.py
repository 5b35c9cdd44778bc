"""What is audited, declared once and checked before anything slow begins: `AuditOptions`.

A lot has a tenth of the data and a run has 32 of them: few enough to be quick, and enough that
epsilon falls steeply with the noise, which makes the bounds close. Both are public choices of the
auditor; a bound at other ones is as valid.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from vestige import methods
from vestige.errors import ConfigError
from vestige.gradients.clipping import split_clipping
from vestige.plan import ADJACENCY, at
from vestige.privacy.accounting import Charge, epsilon, events_of, noise_for
from vestige.privacy.options import Options, Positive

if TYPE_CHECKING:
    from vestige.methods import Method

EPSILON = 2.0  # the claim where neither a claim nor noise is given
STEPS = 32
SCHEDULED_STEPS = 8  # where every step has noise of its own, which PLD is slow for
PUBLISHED_STEPS = 2  # of methods that are not private: whole runs are repeated, and leak at once
TRIALS = {"canary": 4000, "one-run": 1000}
FEWEST_TRIALS = 100
LAYERS = {"canary": 3, "one-run": 2}  # of the audit's model where every layer is a group
_FEW_EVENTS = 4


def _option(default: Any, rule: str, text: str, **limits: Any) -> Any:
    """A field: what a refusal says after the value, the help, and the range."""
    return Field(default, description=text, json_schema_extra={"rule": rule}, **limits)


_NOISELESS = "must be a finite number above 0: without noise there is no claim to attack."


class AuditOptions(Options):
    """One audit: a method, its noise or the claim to reach, and how hard it is attacked.

    ConfigError says which value cannot be audited, why, and what to give instead.
    """

    method: str | Any = _option(..., "", f"The method to attack: {', '.join(methods.METHODS)}.")
    mode: Literal["canary", "one-run"] = _option(
        "canary",
        "is unknown: choose from canary, one-run.",
        "canary: worst-case gradients, reading every release. one-run: random records, reading the "
        "losses of the final model.",
    )
    epsilon: Positive | None = _option(
        None, _NOISELESS, "The claim that the noise is solved for. Default: 2."
    )
    noise_multiplier: Positive | None = _option(
        None, _NOISELESS, "The noise to attack, instead of a claim."
    )
    steps: int | None = _option(
        None,
        "must be a whole number of at least 1.",
        "Releases of a run. Default: 32; 8 where every step has noise of its own; 2 for methods "
        "that are not private, whose whole runs are repeated in mode canary.",
        ge=1,
    )
    trials: int | None = _option(
        None,
        "is too small: half of them choose the threshold and half give the bound, so use at least "
        f"{FEWEST_TRIALS} (4000 is usual).",
        "Number of canaries. Default: 4000, or 1000 in mode one-run.",
        ge=FEWEST_TRIALS,
    )
    confidence: float = _option(
        0.95,
        "must be strictly between 0 and 1: 0.95 lets one audit in twenty exceed the truth at most.",
        "Confidence of each bound.",
        gt=0,
        lt=1,
    )
    delta: float = _option(
        1e-5,
        "must be strictly between 0 and 1; 1e-5 is usual.",
        "The delta of (epsilon, delta).",
        gt=0,
        lt=1,
    )
    sample_rate: float = _option(
        0.1,
        "must be strictly between 0 and 1: a trial needs lots with and lots without its canary.",
        "A record's chance to be in a lot: lot / records.",
        gt=0,
        lt=1,
    )
    clipping: str | Any | None = _option(
        None,
        "is no clipping.",
        "flat, per_layer, auto, auto_per_layer, quantile, quantile_per_layer. Default: the "
        "method's own.",
    )
    seed: int | None = _option(
        None,
        "must be a whole number, or None for fresh noise.",
        "Repeatable coins, lots and noise. Default: fresh ones.",
    )

    @model_validator(mode="after")
    def _fits(self) -> AuditOptions:
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ConfigError(
                f"epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier}: give one of "
                "them, the claim to reach or the noise to attack."
            )
        if not isinstance(self.method, str) or self.method not in methods.METHODS:
            methods.resolve(self.method)  # says what is wrong with it
        if self.clipping is not None and not isinstance(split_clipping(self.clipping)[0], str):
            raise ConfigError(
                "the audit brings its own model, whose parameters a partition cannot name: use "
                "clipping='flat', 'per_layer' or an automatic or quantile form of them."
            )
        return self

    @cached_property
    def chosen(self) -> Method:
        """The method itself: its class is imported now, and torch with it."""
        return methods.resolve(self.method)

    @cached_property
    def length(self) -> int:
        """The number of releases of a run."""
        if self.steps is not None:
            return self.steps
        if not self.chosen.private:
            return PUBLISHED_STEPS if self.mode == "canary" else STEPS
        return STEPS if self.chosen.noise_shape(STEPS) is None else SCHEDULED_STEPS

    @cached_property
    def canaries(self) -> int:
        """The number of canaries, in or out."""
        return TRIALS[self.mode] if self.trials is None else self.trials

    @property
    def form(self) -> Any:
        """The clipping: the one that was given, or the method's own."""
        return self.chosen.clipping if self.clipping is None else self.clipping

    @property
    def layers(self) -> int:
        """The layers of the audit's model, if each is a group; otherwise 1."""
        return LAYERS[self.mode] if split_clipping(self.form)[0] == "per_layer" else 1

    @property
    def zeroed(self) -> bool:
        """Whether a record that is out keeps its place with a gradient of zero."""
        return self.chosen.adjacency != ADJACENCY

    @property
    def records(self) -> int:
        """The declared size: half of the canaries, or all where those that are out are zeroed."""
        return self.canaries if self.zeroed else self.canaries // 2

    @property
    def declared(self) -> int | None:
        """The size to tell the engine; None where it counts the records itself."""
        return None if self.zeroed else self.records

    def batch_size(self, records: int) -> int:
        """The expected lot of `records` records."""
        return max(1, round(self.sample_rate * records))

    def charges(self, records: int) -> Counter[Charge]:
        """What the run will be charged, before its noise is known."""
        lot, length = self.batch_size(records), self.length
        chosen = self.chosen.tabulated(length)
        return methods.planned_charges(
            chosen, self.form, self.layers, records, lot, lot / records, length
        )

    def noise(self, charges: Counter[Charge]) -> float:
        """The noise that was given, or the one that reaches the claim with these charges."""
        if self.noise_multiplier is not None:
            return float(self.noise_multiplier)
        # PLD takes many seconds for many different events. The Rényi bound solves for a little
        # more noise, and the claim that is attacked is the engine's own, below the target.
        accountant = "pld" if len(charges) <= _FEW_EVENTS else "rdp"
        target = EPSILON if self.epsilon is None else self.epsilon
        return noise_for(target, self.delta, charges, accountant)[0]

    def published(self, rate: float) -> tuple[float, float]:
        """Noise and epsilon by the papers of methods that are not private: a Gaussian each step."""
        paper = Counter({Charge(rate): self.length})
        noise = self.noise(paper)
        return noise, epsilon(events_of(paper, noise), self.delta)

    def multipliers(self, noise: float) -> list[float]:
        """The planned multiplier of every release of a run without correlated noise."""
        chosen = self.chosen.tabulated(self.length)
        weights = methods.charged_weight(chosen, self.length)
        return [noise / (chosen.looks**0.5 * at(weights, t)) for t in range(self.length)]
