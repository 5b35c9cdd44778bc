"""Every method in one row: its name, its paper, its guarantee and its proof. No torch here.

A method is a row and a class, which the row names by its home; nothing else knows it by name. The
proof is what the privacy statement prints, so it is data, not a docstring.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vestige.plan import ADJACENCY

if TYPE_CHECKING:
    from vestige.methods.method import Method

AT_SIGMA = "proven: composition of Poisson-subsampled Gaussian releases at sigma"
AT_SIGMA_OVER_BETA = f"{AT_SIGMA}/beta"


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """What is true of a method whatever its settings.

    `home` is the class, or "module:Class"; `guarantee` is one line, `proof` the argument in
    sentences (the guarantee where it is left out); `touches` says how often a step looks at its
    lot; a method that is not `private` was published as private and is not: its epsilon is
    infinite.
    """

    name: str
    home: str | type[Method] = ""
    summary: str = ""
    paper: str = ""
    guarantee: str = ""
    proof: str = ""
    extra_memory: str = "none"
    touches: int = 1
    default_lr: float = 0.5  # of the command line
    private: bool = True
    adjacency: str = ADJACENCY
    sampler: str = "poisson"
    noise: str = "white"  # or "correlated" from lot to lot, or "on angles"
    raw_norms: bool = False  # whether clip bounds follow norms without noise

    def load(self) -> type[Method]:
        """The class, imported now where it is named by its home."""
        if not isinstance(self.home, str):
            return self.home
        module, _, name = self.home.partition(":")
        method: type[Method] = getattr(importlib.import_module(module), name)
        return method


def register(info: MethodInfo) -> None:
    """Make a method known by its name, to make_private, `vestige train` and the statement."""
    METHODS[info.name] = info


_PROOF_SGD = (
    "each release is a Poisson-subsampled Gaussian mechanism with noise multiplier "
    "sigma; epsilon is their composition. Whatever the optimizer does with a release "
    "is post-processing."
)
_JOINT = (
    "proven: composition of joint Poisson-subsampled Gaussian releases of all groups "
    "at 1/(beta sqrt(sum sigma_g^-2))"
)
_PROOF_SMA = (
    "given the earlier releases the branch is a constant, so the release of all "
    "groups is one Poisson-subsampled Gaussian with multiplier 1 / (beta * sqrt(sum_g "
    "sigma_g^-2)) (equation 19). The marginal sigma/beta of one group, which the "
    "paper plots, is not a guarantee."
)
_PROOF_SAT = "that of DP-SGD at sigma: e is a function of releases, known before the lot is drawn."
_PROOF_SAM = (
    "same sample: the two noisy sums of one lot are one Gaussian release at sigma / "
    "sqrt(2). Fresh sample: two releases at sigma. Per example: one release at sigma."
)
_PROOF_GEO = (
    "Box and tangent: one subsampled Gaussian at sigma (sqrt(2) sigma on the "
    "direction and on the length each)."
)
_ADAM = "2 x parameters (Adam's own)"
_RING = "(window + 1) x parameters"
_PROOF_ADAM = "that of DP-SGD at sigma: moments are functions of releases."
_PROOF_FILTER = "that of DP-SGD at sigma/beta: the filter sees releases only."
_PROOF_AS_FO = "as for FO, one Poisson-subsampled Gaussian at sigma/beta per step."

METHODS: dict[str, MethodInfo] = {}
for _info in (
    MethodInfo(
        name="dp-sgd",
        home="vestige.methods.sgd:DPSGD",
        summary="clipped sums with Gaussian noise; any torch optimizer",
        paper="Abadi et al. 2016, arXiv 1607.00133",
        guarantee=AT_SIGMA,
        proof=_PROOF_SGD,
    ),
    MethodInfo(
        name="fo",
        home="vestige.methods.memories:FO",
        summary="fractional memory of releases in the query",
        paper="FO-DP-SGD 2026, arXiv 2605.09890",
        guarantee=AT_SIGMA_OVER_BETA,
        proof=(
            "given the earlier releases the memory is a constant, so a release is a "
            "Poisson-subsampled Gaussian with multiplier sigma/beta; epsilon is their "
            "composition. It is the same mechanism as DP-SGD at sigma/beta with a filter "
            "after it (docs/methods/fo.md)."
        ),
        extra_memory=_RING,
    ),
    MethodInfo(
        name="sma",
        home="vestige.methods.memories:SMA",
        summary="memory per layer, tempered by the spectrum of its weights",
        paper="SMA-DP-SGD 2026, arXiv 2605.20450",
        guarantee=_JOINT,
        proof=_PROOF_SMA,
        extra_memory=_RING,
    ),
    MethodInfo(
        name="current-only",
        home="vestige.methods.sgd:CurrentOnly",
        summary="dp-sgd by the FO paper's name",
        paper="Abadi et al. 2016, arXiv 1607.00133",
        guarantee=AT_SIGMA,
        proof=_PROOF_SGD,
    ),
    MethodInfo(
        name="uniform",
        home="vestige.methods.memories:Uniform",
        summary="mean of the last releases in the query",
        paper="FO-DP-SGD 2026, arXiv 2605.09890, equation 24",
        guarantee=AT_SIGMA_OVER_BETA,
        proof=_PROOF_AS_FO,
        extra_memory=_RING,
    ),
    MethodInfo(
        name="exponential",
        home="vestige.methods.memories:Exponential",
        summary="geometric memory of releases in the query",
        paper="FO-DP-SGD 2026, arXiv 2605.09890, equation 26",
        guarantee=AT_SIGMA_OVER_BETA,
        proof=_PROOF_AS_FO,
        extra_memory=_RING,
    ),
    MethodInfo(
        name="post-fm",
        home="vestige.methods.memories:PostFM",
        summary="fractional memory after the release",
        paper="FO-DP-SGD 2026, arXiv 2605.09890, equations 13-18",
        guarantee=AT_SIGMA,
        proof=(
            "that of DP-SGD at sigma (not sigma/beta): the memory only filters what was released."
        ),
        extra_memory=_RING,
    ),
    MethodInfo(
        name="sma-shuffled",
        home="vestige.methods.memories:SMAShuffled",
        summary="sma with the layers' exponents exchanged (ablation)",
        paper="SMA-DP-SGD 2026, arXiv 2605.20450",
        guarantee=_JOINT,
        proof=_PROOF_SMA,
        extra_memory=_RING,
    ),
    MethodInfo(
        name="sma-fixed",
        home="vestige.methods.memories:SMAFixed",
        summary="sma with one tempering for all layers (ablation)",
        paper="SMA-DP-SGD 2026, arXiv 2605.20450",
        guarantee=_JOINT,
        proof=_PROOF_SMA,
        extra_memory=_RING,
    ),
    MethodInfo(
        name="dp-adam",
        home="vestige.methods.adam:DPAdam",
        summary="Adam on releases",
        paper="standard; see Tang et al. 2024, arXiv 2312.14334",
        guarantee=AT_SIGMA,
        proof=_PROOF_ADAM,
        extra_memory=_ADAM,
        default_lr=0.01,
    ),
    MethodInfo(
        name="dp-adambc",
        home="vestige.methods.adam:DPAdamBC",
        summary="Adam whose second moment is corrected by the known noise",
        paper="Tang et al. 2024, arXiv 2312.14334",
        guarantee=AT_SIGMA,
        proof=_PROOF_ADAM,
        extra_memory=_ADAM,
        default_lr=0.001,
    ),
    MethodInfo(
        name="dp-adamw",
        home="vestige.methods.adam:DPAdamW",
        summary="Adam on releases with decoupled weight decay",
        paper="Chooi et al. 2025, arXiv 2511.07843",
        guarantee=AT_SIGMA,
        proof=_PROOF_ADAM,
        extra_memory=_ADAM,
        default_lr=0.01,
    ),
    MethodInfo(
        name="dp-adamw-bc",
        home="vestige.methods.adam:DPAdamWBC",
        summary="dp-adambc with decoupled weight decay",
        paper="Chooi et al. 2025, arXiv 2511.07843",
        guarantee=AT_SIGMA,
        proof=_PROOF_ADAM,
        extra_memory=_ADAM,
        default_lr=0.001,
    ),
    MethodInfo(
        name="adp-adamw",
        home="vestige.methods.adam:ADPAdamW",
        summary="dp-adamw with noise that falls during the run",
        paper="after Chilukoti et al. 2025, arXiv 2502.11329 (rule not established)",
        guarantee="proven: composition of Poisson-subsampled Gaussian releases at sigma_t",
        proof=("composition of Poisson-subsampled Gaussian releases at sigma_t, fixed in advance."),
        extra_memory=_ADAM,
        default_lr=0.01,
    ),
    MethodInfo(
        name="dp-sat",
        home="vestige.methods.sharpness:DPSAT",
        summary="gradients at weights moved along the last release",
        paper="Park et al. 2023, arXiv 2306.05651",
        guarantee=AT_SIGMA,
        proof=_PROOF_SAT,
        extra_memory="2 x parameters",
    ),
    MethodInfo(
        name="dp-sat-momentum",
        home="vestige.methods.sharpness:DPSATMomentum",
        summary="gradients at weights moved back along their last step",
        paper="Park et al. 2023, arXiv 2306.05651",
        guarantee=AT_SIGMA,
        proof=_PROOF_SAT,
        extra_memory="2 x parameters",
    ),
    MethodInfo(
        name="doppler",
        home="vestige.methods.memories:Doppler",
        summary="low-pass filter of the releases",
        paper="Zhang et al. 2024, arXiv 2408.13460",
        guarantee=AT_SIGMA_OVER_BETA,
        proof=_PROOF_FILTER,
        extra_memory="1 (order 1) or 4 (order 2) x parameters",
    ),
    MethodInfo(
        name="kalman",
        home="vestige.methods.memories:Kalman",
        summary="steady-state Kalman filter of the releases, a gain per layer",
        paper="ours, after arXiv 2605.09890 and 2605.20450 (future work)",
        guarantee=AT_SIGMA_OVER_BETA,
        proof=_PROOF_FILTER,
        extra_memory="2 x parameters",
    ),
    MethodInfo(
        name="disk",
        home="vestige.methods.sharpness:Disk",
        summary="gradients ahead of the weights, averaged",
        paper="Zhang et al. 2025, arXiv 2410.03883",
        guarantee=AT_SIGMA,
        proof=(
            "that of DP-SGD at sigma: both gradients of an example are inside one clip, and "
            "the look-ahead point is known before the lot is drawn."
        ),
        extra_memory="3 x parameters",
    ),
    MethodInfo(
        name="dp-sam",
        home="vestige.methods.sharpness:DPSAM",
        summary="gradients uphill along a noisy gradient; needs step(closure)",
        paper="Park et al. 2023, arXiv 2306.05651",
        guarantee=(
            "proven: one subsampled Gaussian at sigma/sqrt(2) (same sample) or two at sigma (fresh)"
        ),
        proof=_PROOF_SAM,
        extra_memory="3 x parameters",
        touches=2,
    ),
    MethodInfo(
        name="dp-sam-per-example",
        home="vestige.methods.sharpness:DPSAMPerExample",
        summary="each example's gradient uphill of its own; needs step(closure)",
        paper="after Park et al. 2023, arXiv 2306.05651; this form is ours",
        guarantee=AT_SIGMA,
        proof="one release at sigma: an example climbs along its own gradient, inside its clip.",
        extra_memory="2 x rows x parameters",
        touches=2,
    ),
    MethodInfo(
        name="dp-is",
        sampler="importance",
        home="vestige.methods.sgd:DPIS",
        summary="examples drawn in proportion to their gradient norms",
        paper="Wei et al. 2022, arXiv 2210.09634",
        guarantee=(
            "proven: subsampled Gaussians at sigma and the capped rate, and one unsampled "
            "Gaussian at norm_noise for each epoch"
        ),
        proof=(
            "one unsampled Gaussian at norm_noise for each normaliser; each step a Gaussian "
            "at sigma, subsampled at the public rate batch_size / (floor * dataset_size)."
        ),
    ),
    MethodInfo(
        name="dp-adam-ac",
        raw_norms=True,
        home="vestige.methods.adam:DPAdamAC",
        summary="adaptive clipping by raw norms, for study",
        paper="Yang 2025, arXiv 2510.05288",
        guarantee="not private as published: raw norms steer clip and step size",
        extra_memory=_ADAM,
        default_lr=0.01,
        private=False,
    ),
    MethodInfo(
        name="dp-adam-ac-private",
        home="vestige.methods.adam:DPAdamACPrivate",
        summary="AdamW, clip and learning rate steered by a noisy count",
        paper="after Yang 2025, arXiv 2510.05288, and Andrew et al., arXiv 1905.03871",
        guarantee="proven: subsampled Gaussians, 1/z^2 = 1/sigma^2 + 1/(2 count_noise)^2",
        proof="1/z^2 = 1/sigma^2 + 1/(2 count_noise)^2 per step.",
        extra_memory=_ADAM,
        default_lr=0.01,
    ),
    MethodInfo(
        name="geodp",
        noise="on angles",
        home="vestige.methods.geodp:GeoDP",
        summary="noise on hyperspherical angles, for study",
        paper="Duan et al. 2025, arXiv 2504.05618",
        guarantee="not private as published: an angle's sensitivity is pi, not pi/B",
        private=False,
    ),
    MethodInfo(
        name="geodp-tangent",
        home="vestige.methods.geodp:GeoDPTangent",
        summary="sums of examples' turns away from the last direction",
        paper="after Duan et al. 2025, arXiv 2504.05618; this form is ours",
        guarantee=AT_SIGMA,
        proof=_PROOF_GEO,
        extra_memory="rows x parameters",
    ),
    MethodInfo(
        name="geodp-box",
        home="vestige.methods.geodp:GeoDPBox",
        summary="sums of examples' clipped angles around the last direction",
        paper="after Duan et al. 2025, arXiv 2504.05618; this form is ours",
        guarantee=AT_SIGMA,
        proof=_PROOF_GEO,
        extra_memory="rows x parameters",
        default_lr=2.0,
    ),
    MethodInfo(
        name="dp-ftrl",
        noise="correlated",
        sampler="fixed order",
        home="vestige.methods.correlated:DPFTRL",
        summary="noise of a binary tree, data in a fixed order, no sampling",
        paper="Kairouz et al. 2021, arXiv 2103.00039",
        guarantee="proven for zeroing out one record: one unsampled Gaussian for each tree",
        proof=(
            "for zeroing out one record (its gradient becomes zero, its place stays; the "
            "number of records is public), not for adding or removing one. Each tree is one "
            "Gaussian without sampling at sigma / sqrt(sum over nodes of (the record's lots "
            "in the node)^2)."
        ),
        extra_memory="(3 + log2 steps) x parameters (secret)",
        adjacency="zero out one record (fixed order, public number of records)",
    ),
    MethodInfo(
        name="fractional-noise",
        noise="correlated",
        sampler="cyclic poisson",
        home="vestige.methods.correlated:FractionalNoise",
        summary="noise that takes back a part of earlier noise",
        paper="after Choquette-Choo et al. 2023, arXiv 2306.08153",
        guarantee=(
            "proven: ceil(steps / bands) subsampled Gaussians at sigma, rate bands * lot / records"
        ),
        proof=(
            "lots of one record are at least `bands` steps apart, where the columns of the "
            "noise's matrix do not overlap: ceil(steps / bands) subsampled Gaussians at sigma "
            "and bands * sampling rate."
        ),
        extra_memory="bands x parameters (secret)",
    ),
    MethodInfo(
        name="banded-inverse",
        noise="correlated",
        sampler="groups in turn",
        home="vestige.methods.correlated:BandedInverse",
        summary="noise that takes back earlier noise, made again instead of kept",
        paper="Kalinin et al. 2025, arXiv 2505.12128",
        guarantee="proven: one unsampled Gaussian for each block of noise, at sigma / sensitivity",
        proof=(
            "a block's releases are one to one with C s + sigma z, C the inverse of the noise's "
            "banded matrix. C has full columns and no negative entry, so a record moves it by at "
            "most the norm of the sum of the columns at its lots, which are whole turns of its "
            "group apart: one Gaussian for each block at sigma over that norm, without "
            "amplification by sampling."
        ),
        extra_memory="1 x parameters (secret)",
    ),
):
    register(_info)

# Names from the papers that do not say which method they mean.
AMBIGUOUS = {
    "sa-dp-sgd": (
        "method 'sa-dp-sgd' is named in the FO paper, but the work it cites defines no optimizer "
        "of that name. It may mean a sharpness-aware method (here: dp-sam, dp-sat), or SA-DPSGD by "
        "simulated annealing (arXiv 2211.07218), whose acceptance test looks at the private loss. "
        "Choose a method by its own name."
    ),
}
