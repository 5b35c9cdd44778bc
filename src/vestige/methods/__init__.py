"""The named methods. `method="fo"` or an instance such as `methods.FO(beta=0.8)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vestige.checks import check_share
from vestige.errors import ConfigError
from vestige.gradients.clip_forms import Quantile, taken_apart
from vestige.methods.adp_adamw import ADPAdamW
from vestige.methods.base import Method
from vestige.methods.disk import Disk
from vestige.methods.doppler import Doppler
from vestige.methods.dp_adam import DPAdam, DPAdamBC, DPAdamW, DPAdamWBC
from vestige.methods.dp_adam_ac import DPAdamAC, DPAdamACPrivate
from vestige.methods.dp_ftrl import DPFTRL
from vestige.methods.dp_is import DPIS
from vestige.methods.dp_sam import DPSAM, DPSAMPerExample
from vestige.methods.dp_sat import DPSAT, DPSATMomentum
from vestige.methods.dp_sgd import DPSGD, CurrentOnly
from vestige.methods.exponential import Exponential
from vestige.methods.fo import FO
from vestige.methods.fractional_noise import FractionalNoise
from vestige.methods.geodp import GeoDP, GeoDPBox, GeoDPTangent
from vestige.methods.kalman import Kalman
from vestige.methods.post_fm import PostFM
from vestige.methods.sma import SMA, SMAFixed, SMAShuffled
from vestige.methods.uniform import Uniform
from vestige.plan import Schedule, Table, at, constant, lots_per_epoch, tabulate

if TYPE_CHECKING:
    from vestige.gradients.clip_forms import Clipping
    from vestige.privacy.accounting import Charge

__all__ = [
    "DPFTRL",
    "DPIS",
    "DPSAM",
    "DPSAT",
    "DPSGD",
    "FO",
    "METHODS",
    "SMA",
    "ADPAdamW",
    "CurrentOnly",
    "DPAdam",
    "DPAdamAC",
    "DPAdamACPrivate",
    "DPAdamBC",
    "DPAdamW",
    "DPAdamWBC",
    "DPSAMPerExample",
    "DPSATMomentum",
    "Disk",
    "Doppler",
    "Exponential",
    "FractionalNoise",
    "GeoDP",
    "GeoDPBox",
    "GeoDPTangent",
    "Kalman",
    "Method",
    "PostFM",
    "SMAFixed",
    "SMAShuffled",
    "Uniform",
    "charged_weight",
    "planned_charges",
    "query_weight",
    "resolve",
    "share",
]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        DPSGD,
        FO,
        SMA,
        CurrentOnly,
        Uniform,
        Exponential,
        PostFM,
        SMAShuffled,
        SMAFixed,
        DPAdam,
        DPAdamBC,
        DPAdamW,
        DPAdamWBC,
        ADPAdamW,
        DPSAT,
        DPSATMomentum,
        Doppler,
        Kalman,
        Disk,
        DPSAM,
        DPSAMPerExample,
        DPIS,
        DPAdamAC,
        DPAdamACPrivate,
        GeoDP,
        GeoDPTangent,
        GeoDPBox,
        DPFTRL,
        FractionalNoise,
    )
}

# Names from the papers that do not say which method they mean.
AMBIGUOUS = {
    "sa-dp-sgd": (
        "method 'sa-dp-sgd' is named in the FO paper, but the work it cites defines no optimizer "
        "of that name. It may mean a sharpness-aware method (here: dp-sam, dp-sat), or SA-DPSGD by "
        "simulated annealing (arXiv 2211.07218), whose acceptance test looks at the private loss. "
        "Choose a method by its own name."
    ),
}


def charged_weight(method: Method, steps: int | None) -> Table:
    """What the noise multiplier is divided by in a step's charge: beta over the noise's shape."""
    beta, shape = query_weight(method, steps), method.noise_shape(steps)
    if shape is None:
        return beta
    return constant([at(beta, t) / factor for t, factor in enumerate(shape)])


def planned_charges(
    method: Method,
    clipping: Clipping,
    groups: int,
    dataset_size: int,
    batch_size: int,
    rate: Table,
    steps: int,
) -> Counter[Charge]:
    """What a run of `steps` releases will be charged, before its noise is known.

    `rate` is batch_size / dataset_size or what was declared instead, `groups` the number of
    clipping groups. Refuses a method that has no guarantee.
    """
    if not method.private:
        raise ConfigError(
            f"method {method.name!r} has no guarantee ({method.guarantee}), so no noise reaches a "
            "target epsilon: give a noise multiplier, for study."
        )
    _, beyond = taken_apart(clipping)
    beside = beyond.beside(batch_size, groups) if isinstance(beyond, Quantile) else 0.0
    return method.charges(
        method.charged_rate(rate),
        charged_weight(method, steps),
        steps,
        lots_per_epoch(dataset_size, batch_size),
        beside,
    )


def query_weight(method: Method, steps: int | None) -> Table:
    """The method's beta in the query, as a number or a table."""
    return _beta_table(method.query_weight, steps)


def share(method: Method, steps: int | None) -> Table:
    """The method's beta beside its memory, in the query or after the release."""
    return _beta_table(method.share, steps)


def _beta_table(beta: Schedule, steps: int | None) -> Table:
    return tabulate("beta", beta, steps, lambda value: check_share("beta", value))


def resolve(method: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and its settings, or the instance itself."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method in AMBIGUOUS:
        raise ConfigError(AMBIGUOUS[method])
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown: choose from {', '.join(METHODS)}.")
    known = [field.name for field in fields(METHODS[method])]
    for key in settings or {}:
        if key not in known:
            options = ", ".join(known) or "none"
            raise ConfigError(f"method {method!r} has no setting {key!r}; it has: {options}.")
    return METHODS[method](**(settings or {}))
