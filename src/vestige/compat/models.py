"""Opacus' validator and layers: torch's own layers are followed natively, so these add nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from vestige.engine.fixing import fix
from vestige.engine.validation import check_model
from vestige.errors import ConfigError, UnsupportedModel, VestigeError


class ModuleValidator:
    """Whether a model can be trained privately, and a copy that can."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[VestigeError]:
        """What is wrong with each layer; with `strict`, the first of it is raised."""
        errors: list[VestigeError] = []
        for name, part in module.named_modules():
            if not any(part.children()):
                errors += _errors(part, name)
        errors = errors or _errors(module, "")
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether `validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        """`vestige.fix`: a copy with GroupNorm for BatchNorm; build the optimizer from it."""
        return fix(module)

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """`fix`, then `validate`, which raises."""
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed


def _errors(module: nn.Module, name: str) -> list[VestigeError]:
    try:
        check_model(module)
    except (UnsupportedModel, ConfigError) as error:
        return [type(error)(str(error).replace("'(root)'", repr(name or "(root)")))]
    return []


# Their gates and packed projections are followed as they are.
DPRNN, DPGRU, DPLSTM, DPMultiheadAttention = nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention
