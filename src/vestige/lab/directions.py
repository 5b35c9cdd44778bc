"""Experiments of the kind "direction-error": sweeps of GeoDP's synthetic study, point by point.

A point is a `DirectionStudy` of vestige.geometry.study: it trains nothing and has no epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError

if TYPE_CHECKING:
    from vestige.lab.section import Section

_SETTINGS = (
    "dimension",
    "batch",
    "sigma",
    "bounding",
    "signal",
    "trials",
    "seed",
    "examples",
    "releases",
)


@dataclass(frozen=True)
class Sweep:
    """One panel: the setting `varied` takes each of `values`, the others are `fixed`."""

    name: str
    varied: str
    values: tuple[float, ...]
    fixed: Mapping[str, Any]

    def points(self) -> list[dict[str, Any]]:
        """The configuration of every point."""
        return [
            {"kind": "direction-error", **self.fixed, self.varied: value} for value in self.values
        ]

    def quickened(self, quick: Mapping[str, Any]) -> Sweep:
        """A smaller copy: settings divided down by whole numbers, and others set."""
        divide, put = quick.get("divide", {}), quick.get("set", {})

        def smaller(name: str, value: Any) -> Any:
            value = put.get(name, value)
            return max(2, int(value // divide[name])) if name in divide else value

        fixed = {name: smaller(name, value) for name, value in self.fixed.items()}
        values = tuple(dict.fromkeys(smaller(self.varied, value) for value in self.values))
        return replace(self, fixed=fixed, values=values)


def read_sweeps(top: Section) -> tuple[Sweep, ...]:
    """The sweeps of a file, each of them checked."""
    sweeps = []
    for section in top.tables("sweep"):
        fixed = section.table("fixed")
        values = section.raw("values", [])
        sweep = Sweep(
            name=section.text("name"),
            varied=section.choice("varied", _SETTINGS),
            values=tuple(values) if isinstance(values, list) else (),
            fixed=fixed.items() if fixed else {},
        )
        section.finish()
        if not sweep.values:
            raise section.refuse(f"values = {values!r} is wrong: it must be a list of numbers.")
        for name in sweep.fixed:
            if name not in _SETTINGS or name == sweep.varied:
                raise section.refuse(
                    f"fixed has {name!r}: it may have {', '.join(_SETTINGS)}, but not what varies."
                )
        sweeps.append(sweep)
    if not sweeps:
        raise top.refuse("there is no [[sweep]]: give at least one.")
    quick = top.table("quick")
    if quick:
        for key in ("divide", "set"):
            inner = quick.table(key)
            for name in inner.items() if inner else {}:
                if name not in _SETTINGS:
                    raise quick.refuse(f"{key} has {name!r}: choose from {', '.join(_SETTINGS)}.")
        quick.finish()
    return tuple(sweeps)


def measure(config: Mapping[str, Any]) -> dict[str, float]:
    """The errors at one point, by method and measure."""
    from vestige.geometry.study import DirectionStudy, direction_study

    settings = {name: value for name, value in config.items() if name != "kind"}
    try:
        study = DirectionStudy(**settings)
    except TypeError as error:
        raise ConfigError(f"a point lacks a setting ({error}): add it to the sweep.") from error
    return direction_study(study)
