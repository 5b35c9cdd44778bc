"""The named methods. `method="dp-sgd"` or an instance such as `methods.DPSGD()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vestige.errors import ConfigError
from vestige.methods.base import Method
from vestige.methods.dp_sgd import DPSGD

__all__ = ["DPSGD", "METHODS", "Method", "resolve"]

METHODS: dict[str, type[Method]] = {method.name: method for method in (DPSGD,)}


def resolve(method: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and its settings, or the instance itself."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown: choose from {', '.join(METHODS)}.")
    known = [field.name for field in fields(METHODS[method])]
    for key in settings or {}:
        if key not in known:
            options = ", ".join(known) or "none"
            raise ConfigError(f"method {method!r} has no setting {key!r}; it has: {options}.")
    return METHODS[method](**(settings or {}))
