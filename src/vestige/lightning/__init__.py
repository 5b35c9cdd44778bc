"""Opacus' import name: see `vestige.compat.lightning`."""

from vestige.compat.lightning import DPLightningDataModule as DPLightningDataModule
