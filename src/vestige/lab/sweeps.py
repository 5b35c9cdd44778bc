"""A study of directions: one panel of it, and the settings that its points have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from vestige.lab.fields import Model, Number, Text, one_of, refuse

STUDY = "dimension batch sigma bounding signal trials seed examples releases".split()
StudySetting = Annotated[str, one_of(STUDY)]
StudySettings = dict[StudySetting, Number]


class Sweep(Model):
    """One panel of a direction study: the setting `varied` takes each of `values`."""

    name: Text
    varied: StudySetting
    values: Annotated[list[Number], Field(min_length=1)]
    fixed: StudySettings = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Sweep:
        if self.varied in self.fixed:
            raise refuse(f"fixed has {self.varied!r}, which varies: leave it out.")
        return self

    def points(self) -> list[dict[str, Any]]:
        """The configuration of every point."""
        return [
            {"kind": "direction-error", **self.fixed, self.varied: value} for value in self.values
        ]

    def quickened(self, divide: Mapping[str, float], new: Mapping[str, Any]) -> Sweep:
        """A smaller copy: settings divided down by whole numbers, and others set."""

        def smaller(name: str, value: Any) -> Any:
            value = new.get(name, value)
            return max(2, int(value // divide[name])) if name in divide else value

        fixed = {name: smaller(name, value) for name, value in self.fixed.items()}
        values = list(dict.fromkeys(smaller(self.varied, value) for value in self.values))
        return self.model_copy(update={"fixed": fixed, "values": values})
