"""Rows as a report needs them: what is missing or no number is refused by name.

Whoever edits rows.jsonl by hand, or joins files of different versions, is told which row it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vestige.checks import is_number
from vestige.errors import ConfigError, VestigeError

_NUMBERS = ("final_accuracy", "best_accuracy", "seconds", "delta", "lr")
_OPTIONAL = ("epsilon", "epsilon_marginal", "final_loss")
_TEXTS = ("method", "dataset", "model")
_CURVES = ("epoch", "accuracy", "loss", "epsilon")


@contextmanager
def naming_damage(what: str, remedy: str) -> Iterator[None]:
    """Whatever a page stumbles over, in files that anybody can edit, becomes one sentence."""
    try:
        yield
    except (VestigeError, OSError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{what} is damaged ({type(error).__name__}: {said}): {remedy}."
        ) from error


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """ConfigError for the first row that a report could not be made of."""
    for row in rows:
        errors = row.get("errors")
        if "config" in row and "kind" in _table(row, "config"):
            if not isinstance(errors, dict) or not all(is_number(v) for v in errors.values()):
                raise _broken(row, f"errors is {errors!r}, not a table of finite numbers")
            continue
        _check_training(row)


def _check_training(row: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            raise _broken(row, f"{name} is {row.get(name)!r}, not a text")
    if type(row.get("seed")) is not int:
        raise _broken(row, f"seed is {row.get('seed')!r}, not a whole number")
    for name in _NUMBERS:
        if not is_number(row.get(name)):
            raise _broken(row, f"{name} is {row.get(name)!r}, not a finite number")
    for name in _OPTIONAL:
        if name not in row or not (row[name] is None or is_number(row[name])):
            raise _broken(row, f"{name} is {row.get(name)!r}, neither a finite number nor null")
    for name in ("settings", "versions", "hardware"):
        _table(row, name)
    curve = _table(row, "curve")
    lengths = set()
    for name in _CURVES:
        values = curve.get(name)
        if not isinstance(values, list) or not all(v is None or is_number(v) for v in values):
            raise _broken(row, f"curve.{name} is no list of numbers")
        lengths.add(len(values))
    if len(lengths) > 1 or None in curve["epoch"]:
        raise _broken(row, "the lists of its curve do not belong together")
    if row.get("diagnostics") is not None:
        _check_diagnostics(row, _table(row, "diagnostics"))


def _check_diagnostics(row: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    groups, epochs = facts.get("groups"), facts.get("epoch")
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise _broken(row, "diagnostics lacks its groups")
    if not isinstance(epochs, list) or not all(map(is_number, epochs)):
        raise _broken(row, "diagnostics lacks its epochs")
    for name, blocks in facts.items():
        if name in ("groups", "epoch", "steps", "mean"):
            continue
        whole = isinstance(blocks, list) and len(blocks) == len(epochs)
        if not whole or not all(_is_block(block, len(groups)) for block in blocks):
            raise _broken(row, f"diagnostics.{name} has not one number for each epoch and group")
    _table(facts, "mean", row)


def _table(
    values: Mapping[str, Any], name: str, row: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    found = values.get(name)
    if not isinstance(found, dict):
        raise _broken(values if row is None else row, f"{name} is no table of values")
    return found


def _is_block(block: Any, groups: int) -> bool:
    return (
        isinstance(block, list)
        and len(block) == groups
        and all(value is None or is_number(value) for value in block)
    )


def _broken(row: Mapping[str, Any], what: str) -> ConfigError:
    return ConfigError(
        f"the row {row.get('hash', '(without a hash)')} ({row.get('label', 'without a label')}) "
        f"cannot be reported: {what}; take its line out of rows.jsonl, and `vestige reproduce` "
        "runs it again."
    )
