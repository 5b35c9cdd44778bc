"""Opacus' import name: see `vestige.compat.lightning`."""

from vestige.compat.lightning import DPLightningDataModule

__all__ = ["DPLightningDataModule"]
