"""Opacus' import name: see `vestige.compat.models`."""

from vestige.compat.models import DPMultiheadAttention as DPMultiheadAttention
