"""`vestige.PrivacyEngine`: the engine, with what Opacus' users pass to it and read from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vestige.compat import faces
from vestige.compat.accountants import EngineAccountant
from vestige.compat.loading import bind, source_of
from vestige.compat.models import ModuleValidator
from vestige.compat.refusals import BEFORE_1, explain_grad_sample, gone, refuse
from vestige.engine.privacy_engine import PrivacyEngine as Engine
from vestige.errors import ConfigError
from vestige.gradients.clipping import Quantile

_MODES = ("hooks", "functorch", "ew", "ghost")
_SHARDED = ("ghost_fsdp", "ghost_tp")
_QUANTILE = {
    "target_unclipped_quantile": "target",
    "clipbound_learning_rate": "rate",
    "unclipped_num_std": "count_noise",
    "min_clipbound": "lowest",
    "max_clipbound": "highest",
}
_NOT_NEEDED = ("wrap_model", "rand_on_empty", "alphas", "epsilon_tolerance", "eps_error")


class PrivacyEngine(Engine):
    """Makes a model, an optimizer and a data loader train with differential privacy.

    All of it is `vestige.engine.privacy_engine.PrivacyEngine`. Added here are Opacus' names:
    `accountant.get_epsilon(delta)` and `accountant.history`; `grad_sample_mode=` (with "ghost" the
    criterion is returned too, third of four) and the arguments of adaptive clipping; what Opacus
    shows on a private optimizer and module; `is_compatible`, `validate`, `get_compatible_module`.

    Guarantee: that of the engine. Names are translated; what would break it is refused.
    """

    accountant: EngineAccountant
    _warned: set[str]
    _mode: str
    attach = gone("attach", "engine")
    get_privacy_spent = gone("get_privacy_spent", "engine")

    if not TYPE_CHECKING:  # their signatures are the engine's

        @wraps(Engine.__init__)
        def __init__(self, accountant: str = "pld", *others: Any, **options: Any) -> None:
            if others or isinstance(accountant, nn.Module) or BEFORE_1 & options.keys():
                refuse("attach", "PrivacyEngine(model, ...)")
            if accountant == "gdp":
                refuse("gdp", "accountant='gdp'")
            super().__init__(accountant, **options)
            self.accountant = EngineAccountant.of(self.accountant, self)
            self._warned, self._mode = set(), "hooks"

        @wraps(Engine.make_private)
        def make_private(self, **arguments: Any) -> Any:
            return self._translated(super().make_private, arguments)

        @wraps(Engine.make_private_with_epsilon)
        def make_private_with_epsilon(self, **arguments: Any) -> Any:
            self._mode = _mode(arguments)  # which make_private, that this one calls, answers to
            try:
                made = super().make_private_with_epsilon(**_ours(arguments))
            finally:
                self._mode = "hooks"
            bind(arguments.get("data_loader"), made[-1])
            return made

    def _translated(self, make: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What `make` returns for our names, dressed; with its criterion in ghost mode."""
        given, mode = arguments.get("data_loader"), _mode(arguments, self._mode)
        things = [arguments.get("module"), arguments.get("optimizer")]
        earlier = [faces.run_of(thing) if isinstance(thing, _DRESSED) else None for thing in things]
        for thing in things:
            faces.undress(thing)
        try:
            module, optimizer, loader = make(**_ours(arguments))
        except BaseException:
            for thing, run in zip(things, earlier, strict=True):
                if run is not None:
                    _dress(thing, run)
            raise
        explain_grad_sample()
        run = self._attached()
        for thing in (run.capture.module, run.optimizer):  # inside wrappers of other libraries
            _dress(thing, run)
        bind(given, loader)
        if mode == "ghost":
            return module, optimizer, _loss(arguments.get("criterion"), arguments), loader
        return module, optimizer, loader

    def get_epsilon(self, delta: float, accountant: str | None = None) -> float:
        """As the engine's; what was seen of losses and shapes and weakens it is warned of, once."""
        said = self._run.losses.caveats if self._run else []
        for sentence in sorted(set(said) - self._warned):
            self._warned.add(sentence)
            warnings.warn(f"epsilon has a caveat: {sentence}.", UserWarning, stacklevel=3)
        return super().get_epsilon(delta, accountant)

    def detach(self) -> None:
        """Take the hooks off the model and the optimizer, so that they can be used elsewhere."""
        run = self._attached()
        super().detach()
        faces.undress(run.capture.module)
        faces.undress(run.optimizer)

    def save_checkpoint(self, path: Any, **others: Any) -> None:
        """As the engine's; module and optimizer are in it anyway, and may be named."""
        super().save_checkpoint(path, **self._beside(others))

    def load_checkpoint(self, path: Any, **others: Any) -> dict[str, Any]:
        """As the engine's; module and optimizer are in it anyway, and may be named."""
        return super().load_checkpoint(path, **self._beside(others))

    def _beside(self, others: dict[str, Any]) -> dict[str, Any]:
        run, others = self._attached(), dict(others)
        for name, own in (("module", run.capture.module), ("optimizer", run.optimizer)):
            if others.pop(name, own) not in (own, None):
                raise ConfigError(f"{name} is not the one of this engine: leave it out.")
        return others | (others.pop("checkpoint_dict", None) or {})

    def is_compatible(self, *, module: nn.Module, **others: Any) -> bool:
        """Whether the model can be trained privately."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, **others: Any) -> None:
        """Raise what makes the model impossible to train privately."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the model that can be trained privately: `vestige.fix`."""
        return ModuleValidator.fix_and_validate(module)


_DRESSED = (nn.Module, Optimizer)


def _dress(thing: Any, run: Any) -> None:
    if isinstance(thing, Optimizer):
        faces.dress(thing, run, faces.OPTIMIZER, faces.DPOptimizer)
    else:
        faces.dress(thing, run, faces.MODULE)


def _mode(arguments: dict[str, Any], default: str = "hooks") -> str:
    """The way to per-example gradients that was asked for, if it is one that Vestige can be for."""
    mode = arguments.get("grad_sample_mode", default)
    if mode not in _MODES:
        name = "no_op" if mode == "no_op" else "sharded" if mode in _SHARDED else "wrong_mode"
        refuse(name, f"grad_sample_mode={mode!r}")
    return str(mode)


def _ours(arguments: dict[str, Any]) -> dict[str, Any]:
    """Opacus' arguments in Vestige's words."""
    ours = {
        name: value
        for name, value in arguments.items()
        if name not in (*_NOT_NEEDED, "grad_sample_mode")
    }
    if isinstance(ours.get("data_loader"), DataLoader):
        ours["data_loader"] = source_of(ours["data_loader"])
    bounds, module = ours.get("max_grad_norm"), ours.get("module")
    if ours.get("clipping") == "per_layer" and isinstance(bounds, list | tuple):
        names = [name for name, p in module.named_parameters() if p.requires_grad] if module else []
        if len(bounds) == len(names):  # Opacus' layers are parameters, each with its own bound
            ours["clipping"] = {name: [name] for name in names}
    if ours.get("clipping") == "adaptive":
        values = {ours_: ours.pop(name) for name, ours_ in _QUANTILE.items() if name in ours}
        ours["clipping"] = Quantile(**values)
    return ours


def _loss(criterion: Any, arguments: dict[str, Any]) -> Any:
    """The criterion of ghost mode: the user's own, reduced as declared where it is not."""
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    if getattr(criterion, "reduction", None) != "none":
        return criterion

    def reduced(*inputs: Any, **options: Any) -> Tensor:
        losses: Tensor = criterion(*inputs, **options)
        return losses.sum() if arguments.get("loss_reduction") == "sum" else losses.mean()

    return reduced
