"""The ring of past releases, their trend, and the inner products between them.

    trend mu_0 = s~_0,   mu_t = ema * s~_t + (1 - ema) * mu_(t-1)

Every norm, cosine and distance that a memory rule asks for is read off the Gram matrix of the ring,
which costs one pass over it for each release. The ring is (window - 1) x P numbers and nothing else
grows with the window. What nearly cancels (a distance or a mixture of norm below about 3e-4 of the
releases in float32, 1e-8 in float64) is known to that precision only.

Guarantee: only a `Release` is accepted, so all of this is post-processing of what is public.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.errors import ConfigError
from vestige.memory.base import View
from vestige.release import _CERTIFICATE, Branch, Release

# Columns that are widened at a time where the ring has a narrower type than the releases.
_COLUMNS = 2**17


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
        dtype: torch.dtype | None = None,
    ) -> None:
        rows, parts = window - 1, len(segments)
        self._segments, self._ema = list(segments), ema
        self._wide = dtype in (None, like.dtype)
        # The trend is the row below the ring, so that one pass meets both; it stays wide.
        self._rows = like.new_zeros(rows + 1 if self._wide else 1, like.numel())
        self._trend = self._rows[-1]
        self._ring = (
            self._rows[:-1] if self._wide else like.new_zeros(rows, like.numel(), dtype=dtype)
        )
        self._mixed = torch.zeros_like(like)
        self.count = 0
        # Inner products by lag, newest first. So small that numpy on the CPU is the place for them.
        self._gram = np.zeros((parts, rows, rows))
        self._trend_dots = np.zeros((parts, rows))
        self._trend_square = np.zeros(parts)

    @property
    def depth(self) -> int:
        """The number of releases that can be recalled: min(window - 1, releases so far)."""
        return min(self.count, len(self._ring))

    @torch.no_grad()
    def append(self, release: Release) -> None:
        """Keep a copy of a release, and update the trend and the inner products."""
        if not isinstance(release, Release):
            raise TypeError(
                f"a history keeps releases only, not a {type(release).__name__}: what has no noise "
                "must never be remembered."
            )
        stored = self._ring[self.count % len(self._ring)].copy_(release.values)
        new = stored if self._wide else stored.to(self._trend.dtype)
        ema = self._ema if self.count else 1.0
        products = self._products(new)
        self._trend.lerp_(new, ema)
        self.count += 1
        along, with_trend = products[:, self._order()], products[:, -1]
        self._gram[:, 1:, 1:] = self._gram[:, :-1, :-1]
        self._gram[:, 0, :] = self._gram[:, :, 0] = along
        # <s_j, mu_t> and |mu_t|^2 follow from the products that are known already.
        self._trend_dots[:, 1:] = self._trend_dots[:, :-1]
        self._trend_dots[:, 0] = with_trend
        self._trend_dots = (1 - ema) * self._trend_dots + ema * along
        self._trend_square = (
            ema**2 * along[:, 0]
            + 2 * ema * (1 - ema) * with_trend
            + (1 - ema) ** 2 * self._trend_square
        )

    def view(self, exponents: Sequence[float | None] = ()) -> View:
        """What a memory rule sees: inner products by lag, newest release first."""
        n = self.depth
        return View(
            self.count,
            self._gram[:, :n, :n].copy(),
            self._trend_dots[:, :n].copy(),
            self._trend_square,
            tuple(exponents),
        )

    def release_norms(self) -> npt.NDArray[np.float64]:
        """The norm of the newest release in each part."""
        norms: npt.NDArray[np.float64] = np.sqrt(np.maximum(self._gram[:, 0, 0], 0))
        return norms

    @torch.no_grad()
    def mix(self, weights: npt.NDArray[np.float64]) -> Branch:
        """The weighted sum of the releases, `weights[part, lag - 1]`: the branch of the next step.

        It is valid until the next call.
        """
        by_row = np.zeros((len(self._segments), len(self._ring)))
        by_row[:, self._order()[: weights.shape[1]]] = weights
        factors = torch.from_numpy(by_row).to(self._mixed)
        for part, columns in self._blocks():
            ring = self._ring[:, columns].to(self._mixed.dtype)
            torch.mv(ring.t(), factors[part], out=self._mixed[columns])
        return Branch(self._mixed, self.count, _certificate=_CERTIFICATE)

    def _order(self) -> list[int]:
        """The rows of lags 1, 2, ..., window - 1."""
        rows = len(self._ring)
        return [(self.count - lag) % rows for lag in range(1, rows + 1)]

    def _products(self, new: Tensor) -> npt.NDArray[np.float64]:
        """Inner products of `new` with each row of the ring and, last, the trend, part by part."""
        found: list[list[Tensor]] = [[] for _ in self._segments]
        for part, columns in self._blocks():
            found[part].append(self._dots(columns, new[columns]))
        sums = [b[0] if len(b) == 1 else torch.stack(b).sum(0, dtype=torch.float64) for b in found]
        products: npt.NDArray[np.float64] = torch.stack(sums).double().cpu().numpy()
        return products

    def _dots(self, columns: slice, new: Tensor) -> Tensor:
        if self._wide:
            return torch.mv(self._rows[:, columns], new)
        along = torch.mv(self._ring[:, columns].to(new.dtype), new)
        return torch.cat([along, torch.dot(self._trend[columns], new)[None]])

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        """Each part's columns, in pieces where they have to be widened."""
        for part, segment in enumerate(self._segments):
            size = segment.stop - segment.start if self._wide else _COLUMNS
            for start in range(segment.start, segment.stop, size):
                yield part, slice(start, min(start + size, segment.stop))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers. All of it is public."""
        return {
            "count": self.count,
            "ring": self._ring.clone(),
            "trend": self._trend.clone(),
            "gram": torch.from_numpy(self._gram.copy()),
            "trend_dots": torch.from_numpy(self._trend_dots.copy()),
            "trend_square": torch.from_numpy(self._trend_square.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved history of the same shape."""
        ours = self.state_dict()
        for name, value in ours.items():
            saved = state.get(name)
            if name != "count" and (saved is None or saved.shape != value.shape):
                raise ConfigError(
                    f"the saved history's {name} does not fit: it was written by a run with "
                    "another model, window or clipping, or was damaged."
                )
        self.count = int(state["count"])
        self._ring.copy_(state["ring"])
        self._trend.copy_(state["trend"])
        self._gram = state["gram"].cpu().numpy().copy()
        self._trend_dots = state["trend_dots"].cpu().numpy().copy()
        self._trend_square = state["trend_square"].cpu().numpy().copy()
