"""Rule for `nn.MultiheadAttention`, which torch runs as one operation on (positions, rows, width).

Its Python body is run with the capture active inside, so that its projections meet the rule for
linear layers. Only the check that would hand the call back to the capture is taken out.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from vestige.gradients.rules.base import rule

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

_BODY = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_BODY.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


@rule(F.multi_head_attention_forward)
def attention(capture: Capture, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Multi-head attention, operation by operation."""
    with capture:
        return _BODY(*args, **kwargs)
