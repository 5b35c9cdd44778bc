"""Names of Opacus that stay refused: each says why, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from vestige.errors import PrivacyError

_NO_ROWS = "per-example gradients never leave the engine, which clips and sums them in backward"
_ANY_LAYER = "every operation is followed, and one without a rule runs row by row"
_PLANNED = "it is part of the plan, which is fixed before the first lot, as composition asks"
_NOISE_TABLE = (
    "Pass make_private(noise_multiplier=lambda step: ..., steps=...), or use ExponentialNoise, "
    "StepNoise or LambdaNoise of vestige.schedulers."
)
_CLIP_MOVES = (
    "Use ExponentialGradClip, StepGradClip or LambdaGradClip of vestige.schedulers, or pass "
    "make_private(clipping='quantile')."
)
_ONE_PROCESS = "the engine adds up what ranks have itself, once, before the noise: docs/scaling.md"
_FAST = "FastGradientClipping"
_WRAPPERS = (("", ""), ("", _FAST), ("", f"{_FAST}TP"), ("Abstract", ""))
_PLAIN_OPTIMIZERS = (
    *("DPOptimizer", "DistributedDPOptimizer", "SimpleDistributedPerLayerOptimizer"),
    *(f"{kind}Optimizer{_FAST}" for kind in ("DP", "DistributedDP", "FSDP")),
)
OPTIMIZERS = (*_PLAIN_OPTIMIZERS, "DPPerLayerOptimizer", "AdaClipDPOptimizer")
_LOTS = "lots are drawn by the engine, from its secret key, at the rate that it charges"

# Arguments of the engine before Opacus 1.0 that today's does not have.
BEFORE_1 = frozenset(
    "module batch_size sample_size sample_rate alphas noise_multiplier max_grad_norm poisson "
    "secure_rng batch_first target_delta target_epsilon epochs loss_reduction".split()
)

REASONS = {
    "grad_sample": f"{_NO_ROWS}. Take norms or influence from torch.func on public data.",
    **dict.fromkeys(
        [f"{kind}GradSampleModule{more}" for kind, more in _WRAPPERS],
        f"{_NO_ROWS}. Pass the plain module to make_private; it comes back itself.",
    ),
    **dict.fromkeys(
        [f"register_{what}" for what in ("grad_sampler", "norm_sampler", "module_validator")],
        f"{_ANY_LAYER}. Leave the registration out.",
    ),
    "register_module_fixer": f"{_ANY_LAYER}. Change the model before ModuleValidator.fix.",
    "make_functional": f"{_NO_ROWS}. Call loss.backward() and leave grad_sample_mode='no_op' out.",
    "no_op": f"{_NO_ROWS}. Leave grad_sample_mode='no_op' out and call loss.backward().",
    "sharded": f"{_ONE_PROCESS}. Use fully_shard(model) and make_private(sharded=True).",
    "wrong_mode": "the way to per-example gradients is chosen by the engine. Leave it out.",
    **dict.fromkeys(
        _PLAIN_OPTIMIZERS,
        f"{_NO_ROWS}. Pass a torch.optim optimizer to make_private.",
    ),
    "DifferentiallyPrivateDistributedDataParallel": f"{_ONE_PROCESS}. Pass the module inside it.",
    "DPPerLayerOptimizer": f"{_NO_ROWS}. Pass make_private(clipping='per_layer').",
    "AdaClipDPOptimizer": f"{_NO_ROWS}. Pass make_private(clipping='adaptive') and its numbers.",
    "wrap_collate_with_empty": (
        "an empty lot is one blank row that counts for nothing, without a collate function of its "
        "own. Leave it out."
    ),
    "attach": (
        "before Opacus 1.0 an engine was made of a model and attached to an optimizer, and never "
        "saw the loader. Call model, optimizer, loader = PrivacyEngine().make_private(module=model,"
        " optimizer=optimizer, data_loader=loader, noise_multiplier=..., max_grad_norm=...)."
    ),
    "get_privacy_spent": (
        "it gave an order beside epsilon, which belongs to one accountant alone. Call "
        "get_epsilon(delta)."
    ),
    "privacy_engine": (
        "the optimizer stays yours, and its engine is an object beside it. Call "
        "get_epsilon(delta) of the engine whose make_private was called."
    ),
    "virtual_step": (
        "pieces of a lot are added up by the engine, however many there are. Use "
        "make_private(max_physical_batch_size=...), and step on every batch."
    ),
    "UniformWithReplacementSampler": f"{_LOTS}. Give the DataLoader a batch_size and no sampler.",
    "DistributedUniformWithReplacementSampler": f"{_LOTS}, in one process. Give a batch_size.",
    "wrap_data_loader": f"{_LOTS}. Use `with BatchMemoryManager(...) as loader`.",
    "distributed": f"{_ONE_PROCESS}. Leave distributed=True out.",
    "accountant.step": (
        "the ledger is charged at the door, before each draw, so that a call by hand would count a "
        "release that never was. Read get_epsilon(delta); what another run has spent composes by "
        "PrivacyEngine(ledger=...)."
    ),
    "accountant.load_state_dict": (
        "replacing charges could lower what was spent. Go on by engine.load_checkpoint, or "
        "keep a file: PrivacyEngine(ledger=FILE)."
    ),
    "gdp": (
        "its central limit theorem gives an estimate that can be below the true epsilon, which is "
        "no guarantee. Use accountant='prv' (answered by pld) or 'rdp'."
    ),
    "register_accountant": "epsilon must be an upper bound that was proven. Use 'prv' or 'rdp'.",
    "noise_multiplier": f"{_PLANNED}. {_NOISE_TABLE}",
    "max_grad_norm": f"{_PLANNED}. {_CLIP_MOVES}",
    "expected_batch_size": f"{_PLANNED}. Give the DataLoader another batch_size.",
    "last_epoch": (
        "where a schedule stands is a fact of the run, which its checkpoint holds. Build it "
        "afresh, then call engine.load_checkpoint(PATH)."
    ),
}


class Refused(PrivacyError, AttributeError):  # noqa: N818 - as UnsupportedModel
    """A name of Opacus that is refused; an AttributeError too, so that `hasattr` says no."""


def refuse(name: str, shown: str = "") -> NoReturn:
    """Raise the reason and the remedy of a refused name."""
    raise Refused(f"{shown or name} is refused: {REASONS[name]}")


def refused(name: str, shown: str = "") -> type[Any]:
    """A class to import and to ask `isinstance` of; making one says why not."""

    def stop(self: Any, *args: Any, **options: Any) -> None:
        refuse(name, shown)

    return type(name, (), {"__init__": stop, "__doc__": f"Refused: {REASONS[name]}"})


def gone(name: str, shown: str) -> property:
    """An attribute that says what takes its place, and that `hasattr` does not see."""
    return property(lambda self: refuse(name, f"{shown}.{name}"))


def absent(module: str, instead: str) -> NoReturn:
    """Refuse to import a module of Opacus whose names have no counterpart."""
    raise ImportError(
        f"Opacus' {module} has no counterpart: {instead}. docs/from-opacus.md has the names."
    )


class _GradSample:
    """What reading `parameter.grad_sample` answers where nobody has set it."""

    def __get__(self, parameter: Any, owner: type | None = None) -> Any:
        refuse("grad_sample", "parameter.grad_sample")


def explain_grad_sample() -> None:
    """Let a missing `parameter.grad_sample` say why; what others set there is read as ever."""
    if "grad_sample" not in vars(nn.Parameter):
        nn.Parameter.grad_sample = _GradSample()  # type: ignore[attr-defined]
