"""The ring of past releases, their trend, and the inner products between them.

    trend mu_0 = s~_0,   mu_t = ema * s~_t + (1 - ema) * mu_(t-1)

Every norm, cosine and distance that a memory rule asks for is read off the Gram matrix of the ring,
which costs one pass over it for each release, on a GPU by one program (ring_program.py). The ring
is (window - 1) x P numbers; apart from the Gram matrix, window^2 numbers in each part, nothing else
grows with the window. What nearly cancels (a distance or a mixture of norm below about 3e-4 of the
releases in float32, 1e-8 in float64) is known to that precision only.

Guarantee: only a `Release` is accepted, so all of this is post-processing of what is public.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.checks import check_state
from vestige.errors import ConfigError
from vestige.memory.products import Products
from vestige.memory.rules import View
from vestige.release.door import Branch, Release, recalled

if TYPE_CHECKING:
    from vestige.memory.ring_program import Pieces

# Columns at a time: float32 sums over more of them would lose digits, and a ring of a narrower type
# is widened that much at a time.
_COLUMNS = 2**18
Find = Callable[[Sequence[Tensor]], Sequence[float | None]]
_LINE = 128  # numbers: no vector unit looks further


@dataclass(frozen=True)
class Keeping:
    """How releases are kept: their type and device, those of the sums if None.

    `add` adds a few numbers up over all ranks that keep shards of releases, in place. `divide` has
    each rank of several find a number for its share of the matrices, and gives all of them to all.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    add: Callable[[Tensor], Tensor] | None = None
    divide: Callable[[Sequence[Tensor], Find], list[float | None]] | None = None


class History:
    """The last `window - 1` releases of a run, oldest overwritten first.

    `segments` are the parts of the flat release that inner products are taken over: the groups, or
    one part that is the whole.
    """

    def __init__(
        self,
        segments: Sequence[slice],
        like: Tensor,
        window: int,
        ema: float,
        keeping: Keeping | None = None,
    ) -> None:
        rows, keeping = window - 1, keeping or Keeping()
        self._segments, self._add = list(segments), keeping.add
        self._wide = keeping.dtype in (None, like.dtype)
        # The trend is the row below the ring, so that one pass meets both; it stays wide, and on
        # the device of the sums.
        self._whole = self._wide and keeping.device is None
        self._rows = like.new_zeros(rows + 1 if self._whole else 1, like.numel())
        self._trend = self._rows[-1]
        self._ring = self._rows[:-1] if self._whole else _elsewhere(rows, like, keeping)
        self._mixed = torch.zeros_like(like)
        self._pieces = _pieces(segments, self._ring)
        self.count = 0  # the step of the release that is expected next
        self._kept = 0  # releases since the start, or since `restart`
        # So small that numpy on the CPU is the place for them.
        self._inner = Products(len(segments), rows, ema)

    @property
    def depth(self) -> int:
        """The number of releases that can be recalled: min(window - 1, releases so far)."""
        return min(self._kept, len(self._ring))

    @torch.no_grad()
    def append(self, release: Release) -> None:
        """Keep a copy of a release, and update the trend and the inner products."""
        if not isinstance(release, Release):
            raise TypeError(
                f"a history keeps releases only, not a {type(release).__name__}: what has no noise "
                "must never be remembered."
            )
        if release.step != self.count:
            raise RuntimeError(f"release {release.step} came where {self.count} was expected")
        stored = self._ring[self._kept % len(self._ring)].copy_(release.values)
        new = release.values if self._wide else stored.to(self._trend)
        products = self._products(new)
        if not np.isfinite(products).all():
            self.restart(self.count + 1, "the squares of the releases exceed their precision")
            return
        self._trend.lerp_(new, self._inner.ema) if self._kept else self._trend.copy_(new)
        self._kept += 1
        self._inner.append(products[:, self._order()], products[:, -1])
        self.count += 1

    def restart(self, step: int, why: str) -> None:
        """Forget everything before `step`. Nothing private decides it, so nothing is revealed."""
        warnings.warn(f"the memory starts afresh at step {step}: {why}.", UserWarning, stacklevel=2)
        self.count, self._kept = step, 0
        self._inner.restart()

    def view(self, exponents: Sequence[float | None] = ()) -> View:
        """What a memory rule sees: inner products by lag, newest release first."""
        return self._inner.view(self.count, self.depth, exponents)

    def release_norms(self) -> npt.NDArray[np.float64]:
        """The norm of the newest release in each part."""
        norms: npt.NDArray[np.float64] = np.sqrt(np.maximum(self._inner.gram[:, 0, 0], 0))
        return norms

    @torch.no_grad()
    def mix(self, weights: npt.NDArray[np.float64]) -> Branch:
        """The weighted sum of the releases, `weights[part, lag - 1]`: the branch of the next step.

        It is valid until the next call.
        """
        by_row = np.zeros((len(self._segments), len(self._ring)))
        by_row[:, self._order()[: weights.shape[1]]] = weights
        # Host numbers that a copy has staged when it returns: no device is waited for.
        factors = torch.from_numpy(by_row).to(self._mixed.dtype)
        factors = factors.to(self._mixed.device, non_blocking=True)
        if self._pieces is not None:
            self._pieces.mix(self._ring, factors, self._mixed)
            return recalled(self._mixed, self.count)
        for part, columns in self._blocks():
            ring = self._brought(columns)[: len(self._ring)]
            torch.mv(ring.t(), factors[part], out=self._mixed[columns])
        return recalled(self._mixed, self.count)

    def _order(self) -> list[int]:
        """The rows of lags 1, 2, ..., window - 1."""
        rows = len(self._ring)
        return [(self._kept - lag) % rows for lag in range(1, rows + 1)]

    def _products(self, new: Tensor) -> npt.NDArray[np.float64]:
        """Inner products of `new` with each row of the ring and, last, the trend, part by part."""
        all_parts = (
            self._sums(new) if self._pieces is None else self._sums_in_one(self._pieces, new)
        )
        if self._add is not None:
            self._add(all_parts)
        products: npt.NDArray[np.float64] = all_parts.cpu().numpy()
        return products

    def _sums(self, new: Tensor) -> Tensor:
        found = [new.new_zeros(len(self._ring) + 1, dtype=torch.float64) for _ in self._segments]
        for part, columns in self._blocks():
            found[part] += self._dots(columns, new[columns])
        return torch.stack(found)

    def _sums_in_one(self, pieces: Pieces, new: Tensor) -> Tensor:
        if self._whole:
            return pieces.dots(self._rows, new)
        return torch.cat([pieces.dots(rows, new) for rows in (self._ring, self._rows)], 1)

    def _dots(self, columns: slice, new: Tensor) -> Tensor:
        if self._whole:
            return torch.mv(self._rows[:, columns], new)
        rows = self._brought(columns)
        if self._wide:
            return torch.mv(rows, new)
        return torch.cat([torch.mv(rows[:-1], new), torch.dot(rows[-1], new)[None]])

    def _brought(self, columns: slice) -> Tensor:
        """Columns of the ring and the trend, wide, on the device of the sums.

        Products of vectors round by where rows begin within a line of memory: a copy has them
        begin where they would in the whole.
        """
        if self._whole:
            return self._rows[:, columns]
        rows, length = len(self._ring) + 1, columns.stop - columns.start
        step, first = length + (self._trend.numel() - length) % _LINE, columns.start % _LINE
        memory = self._trend.new_empty(first + rows * step)
        brought = memory.as_strided((rows, length), (step, 1), first)
        for to, row in zip(brought, (*self._ring, self._trend), strict=True):
            to.copy_(row[columns], non_blocking=True)
        return brought

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        """Each part's columns, in pieces."""
        for part, segment in enumerate(self._segments):
            for start in range(segment.start, segment.stop, _COLUMNS):
                yield part, slice(start, min(start + _COLUMNS, segment.stop))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers. All of it is public."""
        return {
            "count": self.count,
            "kept": self._kept,
            "ring": self._ring.clone(),
            "trend": self._trend.clone(),
            "products": self._inner.state_dict(),
        }

    def check_state(self, state: Any, step: int) -> None:
        """Refuse a saved history that does not fit this one or does not end before `step`."""
        check_state("history", state, self.state_dict(), finite_entries=True)
        if state["count"] != step or state["kept"] > step:
            raise ConfigError(
                f"the saved history's count is not that of the {step} releases: it was written by "
                "a run with another model, window or clipping, or was damaged."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved history that `check_state` has let through."""
        self.count, self._kept = state["count"], state["kept"]
        self._ring.copy_(state["ring"])
        self._trend.copy_(state["trend"])
        self._inner.load_state_dict(state["products"])


def _pieces(segments: Sequence[slice], ring: Tensor) -> Pieces | None:
    """What goes over a ring on a GPU in one pass; None elsewhere."""
    if not ring.is_cuda or find_spec("triton") is None:
        return None
    from vestige.memory.ring_program import Pieces

    return Pieces(segments, ring.device)


def _elsewhere(rows: int, like: Tensor, keeping: Keeping) -> Tensor:
    """An empty ring apart from the trend; in host memory, pages that a GPU can copy from fast."""
    device = like.device if keeping.device is None else keeping.device
    pinned = like.is_cuda and device.type == "cpu"
    dtype = keeping.dtype or like.dtype
    return torch.zeros(rows, like.numel(), dtype=dtype, device=device, pin_memory=pinned)
