"""Opacus' `DPLightningDataModule`, where Lightning is installed."""

from __future__ import annotations

from typing import Any

from vestige.compat.loading import DPDataLoader
from vestige.errors import ConfigError

try:
    from pytorch_lightning import LightningDataModule
except ImportError as error:
    raise ConfigError(
        "DPLightningDataModule needs pytorch_lightning: pip install pytorch-lightning."
    ) from error


class DPLightningDataModule(LightningDataModule):
    """A data module whose training loader hands out the engine's lots.

    Guarantee: that of DPDataLoader. It is one loader however often Lightning asks, so that the one
    which make_private was given is the one that trains.
    """

    def __init__(self, datamodule: Any, generator: Any = None) -> None:
        super().__init__()
        self.datamodule = datamodule
        self._private: DPDataLoader | None = None

    def train_dataloader(self) -> DPDataLoader:
        """The private loader."""
        if self._private is None:
            self._private = DPDataLoader.from_data_loader(self.datamodule.train_dataloader())
        return self._private


def _passed_on(name: str) -> Any:
    def hook(self: DPLightningDataModule, *args: Any, **options: Any) -> Any:
        return getattr(self.datamodule, name)(*args, **options)

    return hook


for _name in (
    *("prepare_data", "setup", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
):
    setattr(DPLightningDataModule, _name, _passed_on(_name))
