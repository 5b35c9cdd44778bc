"""How numbers and names are written in reports: the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

NONE = "-"
PAPERS_FIGURE = "the papers' figure (no guarantee)"
_WEAK = 10
_SYMBOLS = {"noise_multiplier": "sigma", "clip": "C", "group_noise_multiplier": "sigma_g"}
_DATASETS = {
    "digits": "digits",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
}


def weak(value: float | None) -> str | None:
    """A warning for an epsilon that is finite and protects little; None where it does not."""
    if value is None or value < _WEAK:
        return None
    return (
        f"An epsilon of {_WEAK} or more protects little: it lets the odds of what an observer "
        "concludes about a record change by a factor of e to the epsilon."
    )


def number(value: Any, form: str = "g") -> str:
    """A number in a form, or a dash."""
    return format(value, form) if isinstance(value, int | float) else NONE


def value(setting: Any) -> str:
    """A setting's value as people write it."""
    if setting is None:
        return NONE
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, int):
        return f"{setting:,}"
    if isinstance(setting, float):
        return f"{setting:.6g}"
    if isinstance(setting, list | tuple):
        return f"[{', '.join(value(item) for item in setting)}]"
    return str(setting)


def settings(values: Mapping[str, Any]) -> str:
    """A method's settings in one line."""
    return ", ".join(f"{name} {value(v)}" for name, v in values.items()) or NONE


def dataset(name: str) -> str:
    """A dataset as it is usually written."""
    return _DATASETS.get(name, name)


def noted(name: str, notes: Mapping[str, str], called: Callable[[str], str] = dataset) -> str:
    """A dataset, with what an experiment notes of it: which version it is, say."""
    return called(name) + (f" ({notes[name]})" if name in notes else "")


def cell(values: Mapping[str, Any], notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """A part of an experiment: its dataset and the values of its grid."""
    return _cell(values, notes, dataset)


def plain_cell(values: Mapping[str, Any], notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """The same, with the dataset's name as commands take it."""
    return _cell(values, notes, str)


def _cell(values: Mapping[str, Any], notes: Mapping[str, str], called: Callable[[str], str]) -> str:
    return ", ".join(
        noted(v, notes, called) if name == "dataset" else f"{_SYMBOLS.get(name, name)} {value(v)}"
        for name, v in values.items()
    )


def images(span: Sequence[int] | None) -> str:
    """A range [first, end) of images."""
    return NONE if not span else f"{span[0]:,} to {span[1] - 1:,}"
