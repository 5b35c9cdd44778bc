"""A first choice of lot, epochs, clip, rate, delta and noise, from public facts alone.

The rules are rules of thumb, each with its reason, and a starting point: what is best on the data
cannot be known without looking at it, and every look costs.

Guarantee: a suggestion is a function of the number of records (declared, or else read off the data
and treated as public), of the schema and of the model. No value of a record has a part in it.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.statement.words import strength
from vestige.train.config import TrainConfig
from vestige.train.training import load_data

EPOCHS = 30
LEAST_STEPS = 300  # with fewer, gradient descent does not get far at a moderate rate
LARGEST_RATE = 0.5
SMALLEST_LOT = 16


@dataclass(frozen=True)
class Facts:
    """What is public about data and model."""

    records: int
    declared: bool
    parameters: int
    outputs: int


@dataclass(frozen=True)
class Suggestion:
    """Settings for `vestige train`, with the reason for each."""

    facts: Facts
    epsilon: float
    delta: float
    lot: int
    epochs: int
    steps: int
    clip: float
    lr: float
    noise_multiplier: float
    reasons: dict[str, str]
    command: str

    def as_dict(self) -> dict[str, Any]:
        """The suggestion as plain JSON types."""
        return asdict(self)


def public_facts(config: TrainConfig) -> Facts:
    """The public facts of the data and the model that a configuration names.

    Where the schema and a dataset_size say all of it, the data is not opened.
    """
    from vestige.train import models
    from vestige.train.table_data import width

    schema = config.schema_of_data()
    if schema is not None and config.dataset_size is not None:
        shape, outputs = schema.image or (width(schema),), len(schema.labels)
        records = config.dataset_size
    else:
        data = load_data(config, config.seed)
        shape, outputs = data.input_shape, data.classes
        records = config.dataset_size or len(data.x_train)
    model = models.build(config.chosen_model, shape, outputs, seed=0)
    size = sum(parameter.numel() for parameter in model.parameters())
    return Facts(records, config.dataset_size is not None, size, outputs)


def suggest(config: TrainConfig, epsilon: float) -> Suggestion:
    """Settings that keep the run within `epsilon`, with their reasons."""
    facts = public_facts(config)
    if facts.records < 4 * SMALLEST_LOT:
        raise ConfigError(
            f"{facts.records} training records are too few to hide one among: with fewer than "
            f"{4 * SMALLEST_LOT} no setting learns much."
        )
    delta = 10.0 ** math.floor(-math.log10(10 * facts.records))
    lot = _lot(facts.records)
    steps = config.changed(lot=lot, epochs=EPOCHS).planned_steps(facts.records)
    noise = accounting.calibrate(epsilon, delta, lot / facts.records, steps).noise_multiplier
    # The norm of the noise on the mean gradient, in clipping norms: what a step is off by.
    loudness = noise * math.sqrt(facts.parameters) / lot
    lr = float(f"{LARGEST_RATE / max(1.0, loudness):.2g}")
    public = "declared" if facts.declared else "read off the data and treated as public"
    reasons = {
        "epsilon": f"{strength(epsilon)} by the measure of a guide for practitioners (arXiv "
        "2303.00654): at most 1 strong, up to 10 reasonable, more weak on its own",
        "delta": f"a power of ten below 1 / (10 x records), of which there are {facts.records} "
        f"({public}): above 1 / records it would allow a whole record to be published",
        "epochs": "the noise grows with about the square root of the epochs, and fewer passes "
        "learn less; 30 is the default of vestige train",
        "lot": f"the largest power of two that leaves {LEAST_STEPS} steps: noise is added once for "
        f"each lot, so a record costs the less the more share it, and a lot stays below a quarter "
        "of the records, so that sampling still hides who was in it",
        "clip": "only clip x rate matters once most gradients are clipped; 1 keeps the rate "
        "readable",
        "noise_multiplier": f"the least that keeps {steps} releases within epsilon {epsilon:g} at "
        f"delta {delta:g} (accountant pld)",
        "lr": f"the noise of a step has {loudness:.2g} times the norm of a clipped gradient over "
        f"the {facts.parameters} parameters: "
        + (
            f"below 1, so {LARGEST_RATE} may stay"
            if loudness <= 1
            else f"above 1, so {LARGEST_RATE} is divided by it; a smaller model would help"
        ),
    }
    options = {"dataset": "data", "target": "target", "schema_file": "schema", "task": "task"}
    options |= {"model": "model", "dataset_size": "dataset-size"}
    words = ["vestige train"]
    for name, option in options.items():
        value = getattr(config, name)
        if value:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words.append(f"--{option} {shlex.quote(text)}")
    words.append(f"--epsilon {epsilon:g} --delta {delta:g} --lot {lot} --epochs {EPOCHS}")
    words.append(f"--clip 1 --lr {lr:g}")
    return Suggestion(
        facts, epsilon, delta, lot, EPOCHS, steps, 1.0, lr, noise, reasons, " ".join(words)
    )


def _lot(records: int) -> int:
    """The largest power of two with enough steps, and at most a quarter of the records."""
    most = min(EPOCHS * records / LEAST_STEPS, records / 4)
    return max(SMALLEST_LOT, 1 << math.floor(math.log2(max(most, 1))))
