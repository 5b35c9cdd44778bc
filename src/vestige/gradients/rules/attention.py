"""Rule for `nn.MultiheadAttention`, which torch runs as one operation on (positions, rows, width).

Its Python body is run with the capture active inside, so that its projections meet the rule for
linear layers. Only the check that would hand the call back to the capture is taken out.
"""

from __future__ import annotations

import types
from typing import Any

import torch.nn.functional as F

from vestige.gradients.capture import Capture

_BODY = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_BODY.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


def attention(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multi-head attention, operation by operation."""
    with capture:
        return _BODY(*args, **kwargs)


TABLE: dict[Any, Any] = {F.multi_head_attention_forward: attention}
