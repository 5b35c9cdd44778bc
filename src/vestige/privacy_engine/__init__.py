"""Opacus' import name: see `vestige.compat.engine`."""

from vestige.compat.engine import PrivacyEngine as PrivacyEngine
