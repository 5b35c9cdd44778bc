"""Synthetic rows for the self-check, and a model that meets no chance while it runs on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vestige.gradients.capture import Capture
from vestige.gradients.following import name_of
from vestige.gradients.tracker import VALUES


@dataclass(frozen=True)
class Kind:
    """How rows are made up; the first kind that the model takes is used."""

    positive: bool = False  # numbers in (0, 1), for logarithms
    tokens: bool = True  # any token of the smallest embedding, else 0 and 1
    masks: bool | None = None  # all of this, else the first few positions of each row


KINDS = (
    Kind(),
    Kind(tokens=False),
    Kind(tokens=False, masks=True),
    Kind(tokens=False, masks=False),
    Kind(positive=True, tokens=False, masks=True),
    Kind(positive=True, tokens=False, masks=False),
)
_SCALES = (1.0, -0.3, 3.0, -10.0, 0.03)


class RowMaker:
    """Makes rows in the shape of the real ones of a call: random numbers, never the data."""

    def __init__(self, capture: Capture, real: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._real, self._axis = real, capture.axis
        self.rows = capture.count_rows(*real)
        leaves = pytree.tree_leaves(real)
        self.batched = [self._has_rows(value) for value in leaves]  # which leaves have rows
        self.sizes = {s for t in leaves if isinstance(t, Tensor) for s in t.shape}
        self.lengths = {  # of all axes but that of the rows, whose number is secret
            size
            for value, batched in zip(leaves, self.batched, strict=True)
            if isinstance(value, Tensor)
            for axis, size in enumerate(value.shape)
            if not (batched and axis == self._axis)
        }
        embeddings = [m for m in capture.module.modules() if isinstance(m, nn.Embedding)]
        self._vocabulary = min((m.num_embeddings for m in embeddings), default=2)
        long = (t.shape[1 - self._axis] for t in leaves if self._has_rows(t) and t.ndim > 1)
        self._length = next(long, 1)  # positions in a row

    def _has_rows(self, value: Any) -> bool:
        wide = isinstance(value, Tensor) and value.ndim > self._axis
        return wide and value.shape[self._axis] == self.rows

    def make(self, count: int, kind: Kind, double: bool) -> Any:
        """The inputs with their rows replaced by `count` random ones."""
        length = self._length
        lengths = (torch.randperm(max(length, count))[:count] % max(length, 1)) + 1

        def fake(path: Any, value: Any) -> Any:
            if not self._has_rows(value):
                return value
            shape = list(value.shape)
            shape[self._axis] = count
            if value.is_floating_point():
                content = self._numbers(shape, kind).to(value.device)
                return content.double() if double else content.to(value.dtype)
            if value.dtype == torch.bool or "mask" in pytree.keystr(path).lower():
                return self._mask(shape, kind, lengths).to(value)
            if value.ndim == 1 and length > 1 and kind.tokens:
                return lengths.to(value)  # beside rows with positions: their lengths
            if value.dtype == torch.uint8:
                return torch.randint(0, 256, shape).to(value)
            return torch.randint(0, self._vocabulary if kind.tokens else 2, shape).to(value)

        return pytree.tree_map_with_path(fake, self._real)

    def _numbers(self, shape: list[int], kind: Kind) -> Tensor:
        """Rows that differ in sign and scale."""
        if kind.positive:
            return torch.rand(shape) * 0.98 + 0.01
        count = shape[self._axis]
        scale = torch.tensor(list(itertools.islice(itertools.cycle(_SCALES), count)))
        return torch.randn(shape) * scale.view(-1, *[1] * (len(shape) - 1 - self._axis))

    def _mask(self, shape: list[int], kind: Kind, lengths: Tensor) -> Tensor:
        """The first few positions of each row."""
        if kind.masks is not None or len(shape) < 2:
            return torch.full(shape, bool(kind.masks))
        positions = shape[1 - self._axis]
        mask = torch.arange(positions) < lengths.unsqueeze(1).clamp(max=max(1, positions - 1))
        mask = mask.t() if self._axis else mask
        return mask.view(*mask.shape, *[1] * (len(shape) - 2)).expand(shape)


# -- without chance ---------------------------------------------------------------------------


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Leave the generators that the user seeded as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class NoChance(TorchFunctionMode):
    """Random numbers are fixed, the same for every row: what is left depends on the rows alone.
    The branches that the model takes are noted."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = name_of(func)
        if name in _RECURRENT and len(args) == 9:
            args = (*args[:5], 0.0, *args[6:])
        elif name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
            args = args[:4] if len(args) > 4 else args
        elif name == "multi_head_attention_forward":
            # It runs as a whole, so that the dropout inside it is not seen here.
            if len(args) > 13:
                args = (*args[:13], False, *args[14:])
            else:
                kwargs["training"] = False
        stand_in = _STAND_INS.get(name)
        if stand_in is None:
            out = func(*args, **kwargs)
            if self._capture.paused and isinstance(out, bool) and name in VALUES:
                self._capture.tracker.answered(out)
            return out
        return stand_in(func, args, kwargs)


def _copied(_: Any, args: Any, kwargs: Any) -> Any:
    value = kwargs["input"] if "input" in kwargs else args[0]
    return value.clone()


def _filled(content: float) -> Callable[[Any, Any, Any], Any]:
    def stand_in(func: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            out = func(*args, **kwargs)
            return out.fill_(content)

    return stand_in


def _backwards(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs).sort(descending=True).values


def _gumbel(_: Any, args: Any, kwargs: Any) -> Any:
    names = ("logits", "tau", "hard", "eps", "dim")
    given = {"tau": 1.0, "dim": -1, **dict(zip(names, args, strict=False)), **kwargs}
    return F.softmax(given["logits"] / given["tau"], given["dim"])


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_DROPPED = """
dropout dropout_ alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d feature_dropout
rrelu
""".split()
_CONTINUOUS = """
rand randn rand_like randn_like normal normal_ uniform_ exponential_ log_normal_ cauchy_
""".split()
_DISCRETE = "randint randint_like random_ bernoulli bernoulli_ geometric_".split()
_STAND_INS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_DROPPED, _copied),
    **dict.fromkeys(_CONTINUOUS, _filled(0.37)),
    **dict.fromkeys(_DISCRETE, _filled(1)),
    "randperm": _backwards,
    "gumbel_softmax": _gumbel,
}
