"""Opacus' loaders: one to pass to make_private, and physical batches for the length of a loop."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from vestige.checks import check_count
from vestige.compat.faces import run_of
from vestige.compat.refusals import refuse
from vestige.errors import ConfigError, PrivacyError
from vestige.methods.method import Feature
from vestige.plan import lots_per_epoch
from vestige.sampling.loader import LotSampler, PrivateLoader, batches_of_a_lot, check_loader

_SOURCE = "_vestige_source"  # what private loaders remember


class DPDataLoader(DataLoader[Any], metaclass=abc.ABCMeta):
    """A loader that hands out an engine's lots once make_private was given it.

    `isinstance(loader, DPDataLoader)` also tells the loader that make_private returns.

    Guarantee: no batch comes out of it that no engine has drawn.
    """

    def __init__(self, dataset: Dataset[Any], *, sample_rate: float, **options: Any) -> None:
        size = max(1, round(sample_rate * len(dataset)))  # type: ignore[arg-type]
        for name in ("batch_first", "rand_on_empty", "drop_last", "generator"):
            options.pop(name, None)
        if options.pop("distributed", False):
            refuse("distributed", "DPDataLoader(distributed=True)")
        self._take(DataLoader(dataset, batch_size=size, **options))

    @classmethod
    def from_data_loader(
        cls, data_loader: DataLoader[Any], *, distributed: bool = False, **options: Any
    ) -> DPDataLoader:
        """The same data, batch size and workers, as Poisson lots."""
        if distributed:
            refuse("distributed", "DPDataLoader(distributed=True)")
        made = cls.__new__(cls)
        made._take(source_of(data_loader))
        return made

    def _take(self, source: DataLoader[Any]) -> None:
        self.sample_rate = check_loader(source) / len(source.dataset)  # type: ignore[arg-type]
        super().__init__(source.dataset, batch_size=source.batch_size)
        setattr(self, _SOURCE, source)
        self.private: PrivateLoader | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.private is None:
            raise PrivacyError(
                "the DPDataLoader was asked for a batch before an engine knew of it: pass it to "
                "make_private(data_loader=...), which draws and charges its lots."
            )
        return iter(self.private)

    def __len__(self) -> int:
        if self.private is not None:
            return len(self.private)
        return lots_per_epoch(len(self.dataset), self.batch_size or 1)  # type: ignore[arg-type]


DPDataLoader.register(PrivateLoader)


def source_of(loader: Any) -> Any:
    """The loader that a private one was made from, or the loader itself."""
    return getattr(loader, _SOURCE, loader)


def bind(given: Any, private: PrivateLoader) -> None:
    """Let later engines find the source, and the DPDataLoader that was given hand out the lots."""
    setattr(private, _SOURCE, source_of(given))
    if type(given) is DPDataLoader:
        given.private = private


class BatchMemoryManager:
    """`with BatchMemoryManager(...) as loader`: lots come in physical batches of at most that size.

    The same as make_private(max_physical_batch_size=...), for the length of the block. The loop
    calls optimizer.step() on every batch; the last one of a lot makes the release.

    Guarantee: pieces of a lot change neither its release nor its cost.
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: Any
    ) -> None:
        self.data_loader = getattr(data_loader, "private", None) or data_loader
        self.max_physical_batch_size = check_count(
            "max_physical_batch_size", max_physical_batch_size
        )
        lots = self.data_loader.batch_sampler
        run = run_of(optimizer)
        if not isinstance(lots, LotSampler) or run is None or run.lots is not lots:
            raise ConfigError(
                "BatchMemoryManager got a loader and an optimizer that are not of one private run: "
                "pass both as make_private has returned them."
            )
        if whole := run.excludes.get(Feature.PHYSICAL_BATCHES):
            words = whole.format(value=max_physical_batch_size)
            raise ConfigError(f"method {run.plan.method!r} {words}")
        self._lots, self._before = lots, (lots.physical, lots.pieces)
        self._expected = run.plan.expected_lot

    def __enter__(self) -> DataLoader[Any]:
        rows, self._before = self.max_physical_batch_size, (self._lots.physical, self._lots.pieces)
        self._lots.physical, self._lots.pieces = rows, batches_of_a_lot(self._expected, rows)
        return self.data_loader

    def __exit__(self, *error: Any) -> None:
        self._lots.physical, self._lots.pieces = self._before
