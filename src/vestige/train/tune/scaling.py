"""Settings carried from small lots to large ones by a rule, without a search.

Guarantee: none of its own. The rule is a function of settings; where those were found by runs on
private data, those runs have to be paid for, however small their lots were.
"""

from __future__ import annotations

from vestige.train.config import TrainConfig


def at_lot(config: TrainConfig, lot: int) -> TrainConfig:
    """The same run at another lot: noise per lot, steps and rates stay (arXiv 2210.03403).

    The noise of a step is sigma C / lot on the mean gradient, and it governs how well a private
    run learns. So a run with lots k times smaller and a k times smaller noise multiplier, over as
    many steps, predicts the large run at a k-th of its work. Its epsilon is far larger: on private
    data that is no free trial. Use it on public data of the same kind, or on synthetic data.
    """
    noise = config.noise_multiplier
    if noise is None or config.steps is None:
        from vestige.errors import ConfigError

        raise ConfigError(
            f"noise_multiplier {noise} and steps {config.steps}: the rule keeps noise / lot and "
            "the number of steps, so give both."
        )
    return config.changed(lot=lot, noise_multiplier=noise * lot / config.chosen_lot)
