"""Rows against records: does a record move anything but its own clipped gradient?

Small models fold the rows of a batch with positions, views or heads in the ways that people do. A
record that is clipped together with parts of another, or whose parts are clipped apart, moves the
sum by more than C (sensitivity.py); the check knows nothing of the models. They are measured with
the self-check off, so that the following of rows is held to its word by itself.

Guarantee: none. R > 1 is a counterexample; R <= 1 says that these models are attributed rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.verify.findings import Finding, Report
from vestige.audit.verify.sensitivity import Moved, sensitivity
from vestige.errors import PrivacyError

MISATTRIBUTED = "mis-attributed rows"
POSITIONS, WIDTH, CLASSES, HEADS = 8, 12, 5, 3
_LOUD, _QUIET = 50.0, 0.01
_SEED = 1  # of the models and records: public, as all of this is


class Folded(nn.Module):
    """A layer and a scale on rows that `fold` has folded, and a layer after `unfold`."""

    def __init__(
        self,
        fold: Callable[[Tensor], Tensor] = lambda x: x,
        unfold: Callable[[Tensor, int], Tensor] = lambda x, rows: x,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._fold, self._unfold = fold, unfold

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, width) to (rows, positions, classes)."""
        inner = self._unfold(self.first(self._fold(x)).relu() * self.scale, len(x))
        return self.second(inner)  # type: ignore[no-any-return]


class Sorted(nn.Module):
    """Rows sorted by what is in them around a recurrent layer, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, width) to (rows, positions, classes)."""
        order = x.square().sum((1, 2)).argsort(descending=True)
        return self.last(self.inner(x[order])[0][order.argsort()])  # type: ignore[no-any-return]


class Headed(nn.Module):
    """Attention whose heads are folded into the batch, heads first, layers and a norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH // HEADS, WIDTH // HEADS) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, width) to (rows, positions, classes)."""
        rows, positions, _ = x.shape
        heads = x.view(rows, positions, HEADS, -1).permute(2, 0, 1, 3).flatten(0, 1)
        query, key, value = (layer(heads) for layer in self.layers)
        mixed = self.norm(F.scaled_dot_product_attention(query, key, value))
        mixed = mixed.view(HEADS, rows, positions, -1).permute(1, 2, 0, 3).flatten(2)
        return self.last(mixed)  # type: ignore[no-any-return]


class Layered(nn.Module):
    """A norm and a table of embeddings on rows that are folded with their positions time-major."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, width) to (rows, positions, classes)."""
        rows, positions, _ = x.shape
        folded = x.transpose(0, 1).flatten(0, 1)
        inner = self.norm(folded) + self.table(folded.argmax(1))
        return self.last(inner.view(positions, rows, -1).transpose(0, 1))  # type: ignore[no-any-return]


class Gated(Folded):
    """Takes another way if the batch as a whole is loud: rows meet in a Python `if`."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, width) to (rows, positions, classes)."""
        out = super().forward(x)
        return out if x.abs().mean() < 1 else -out


PLAIN = "rows alone"
GATED = "a gate on the batch"
MODELS: dict[str, Callable[[], nn.Module]] = {
    PLAIN: Folded,
    "batch-major": lambda: Folded(
        lambda x: x.flatten(0, 1), lambda h, rows: h.unflatten(0, (rows, -1))
    ),
    "time-major": lambda: Folded(
        lambda x: x.transpose(0, 1).reshape(-1, WIDTH),
        lambda h, rows: h.view(-1, rows, WIDTH).transpose(0, 1),
    ),
    "views by cat": lambda: Folded(
        lambda x: torch.cat([x, x.flip(1)]), lambda h, rows: h.view(2, rows, -1, WIDTH).sum(0)
    ),
    "rows turned round": lambda: Folded(lambda x: x.flip(0), lambda h, rows: h.flip(0)),
    "sorted rows": Sorted,
    "heads in the batch": Headed,
    "time-major, other layers": Layered,
}


def losses(model: nn.Module, batch: Any) -> Tensor:
    """The sum of a record's losses over its positions."""
    x, y = batch
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return each.view(y.shape).sum(1)


def records(positions: int = POSITIONS) -> TensorDataset:
    """One loud record, the same at every position, then quiet ones.

    Without one of them there are as many records as positions: neither can be told by its length.
    """
    made = torch.Generator().manual_seed(_SEED)
    x = _QUIET * torch.randn(positions + 1, positions, WIDTH, generator=made)
    y = torch.randint(0, CLASSES, (positions + 1, positions), generator=made)
    x[0] = _LOUD * torch.randn(WIDTH, generator=made)
    y[0] = 1
    return TensorDataset(x, y)


def measure(model: nn.Module, **options: Any) -> Moved:
    """How far the loud record, or a quiet one, moves the clipped sum at most."""
    data = records()
    return sensitivity(model, data, losses, records=(0, len(data) - 1), **options)[0]


def made(name: str) -> nn.Module:
    """A built-in model with weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return MODELS[name]() if name in MODELS else Gated()


def examine() -> Report:
    """R of every built-in model, by record and by layer; above 1 is a finding."""
    moved: dict[str, Moved] = {}
    findings = []
    for name in MODELS:
        for clipping in ("flat", "per_layer"):
            try:
                moved[f"{name}, {clipping}"] = measure(
                    made(name), clipping=clipping, self_check=False
                )
            except PrivacyError as error:
                sentence = f"the model {name!r}, whose rows stay apart, is refused: {error}"
                findings.append(Finding("right model refused", sentence))
    with suppress(PrivacyError):  # as it must be
        moved[GATED] = measure(made(GATED))
    # Rows alone cannot be taken for others: what moves them too far is the clip or the draw.
    apart = all(one.within for name, one in moved.items() if name.startswith(PLAIN))
    what = MISATTRIBUTED if apart else "query"
    for name, one in moved.items():
        if not one.within:
            sentence = (
                f"{what}: record {one.record} of the model {name!r} moves the clipped sum by "
                f"{one.ratio:.4g} times its bound; allowed is 1."
            )
            findings.append(Finding(what, sentence, figure=one.ratio, bound=1.0))
    largest = max((one.ratio for one in moved.values()), default=0.0)
    figures = {"models": len(MODELS) + 1, "largest_move": largest}
    return Report("rows", tuple(findings), figures)
