"""Opacus' import name: see `vestige.compat.models`."""

from vestige.compat.models import DPGRU, DPLSTM, DPRNN

__all__ = ["DPGRU", "DPLSTM", "DPRNN"]
