"""Caches of keys, values and states, which language models keep for generation.

A cache belongs to no row and outlives the layer that fills it, so a layer that runs one row at a
time cannot keep one. Training has no use for it. It is off while the model runs, as it is under
gradient checkpointing; a call that asks for it (`use_cache=True`) is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class Caches:
    """The configurations of a model's parts that may ask for a cache."""

    def __init__(self, module: nn.Module) -> None:
        found: Iterator[Any] = (getattr(part, "config", None) for part in module.modules())
        self._configs = list({id(c): c for c in found if hasattr(c, "use_cache")}.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """No configuration asks for a cache, for a while."""
        asking = [config for config in self._configs if config.use_cache is True]
        for config in asking:
            config.use_cache = False
        try:
            yield
        finally:
            for config in asking:
                config.use_cache = True


def handed(kwargs: Mapping[str, Any]) -> str | None:
    """The argument with which a layer is handed a cache, if it is."""
    return next((name for name in ARGUMENTS if kwargs.get(name) is not None), None)
