"""From "MODULE:factory" on the command line to somebody's method."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.methods import Method


def load(target: str) -> Method:
    """The method that "MODULE:factory" makes; ConfigError with one line where there is none.

    The module is looked for in the current folder first. The factory is a function without
    arguments that returns a Method or a subclass of it, or such a subclass itself.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"{target!r} is not of the form MODULE:factory: for example my_methods:MyMethod."
        )
    made: Any = attribute(module_name, name)
    if not isinstance(made, Method):
        if not callable(made):
            raise ConfigError(
                f"{target!r} is a {type(made).__name__}, which cannot be called: name a function "
                "without arguments that returns a vestige.methods.Method."
            )
        made = _called(target, made)
        if isinstance(made, type) and issubclass(made, Method):
            made = _called(target, made)
    if not isinstance(made, Method):
        raise ConfigError(
            f"{target!r} returned a {type(made).__name__}: return an instance of a subclass of "
            "vestige.methods.Method."
        )
    return made


def attribute(module_name: str, name: str) -> Any:
    """What a module defines under that name; the current folder is searched first."""
    try:
        with _current_folder_first():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"module {module_name!r} was not found: run this in the folder that holds it, or "
                "install it."
            ) from None
        raise ConfigError(f"module {module_name!r} needs another: {one_line(error)}.") from error
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"module {module_name!r} could not be imported: {why}") from error
    if not hasattr(module, name):
        raise ConfigError(f"module {module_name!r} has no {name!r}: name what it defines.")
    return getattr(module, name)


def _called(target: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"{target!r} raised {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def _current_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def one_line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or "without a message"
