"""Rows as a report needs them: what is missing or no number is refused by name.

Whoever edits rows.jsonl by hand, or joins files of different versions, is told which row it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vestige.errors import ConfigError, VestigeError
from vestige.lab.fields import refuse

Finite = Annotated[float, Field(gt=-1e300, lt=1e300, allow_inf_nan=False)]
Measured = list[Finite | None]


@contextmanager
def naming_damage(what: str, remedy: str) -> Iterator[None]:
    """Whatever a page stumbles over, in files that anybody can edit, becomes one sentence."""
    try:
        yield
    except (VestigeError, OSError):
        raise
    except ImportError as error:
        raise ConfigError(
            f"a report needs {error.name}, which is not installed: pip install 'vestige-dp[all]'."
        ) from error
    except Exception as error:
        said = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{what} is damaged ({type(error).__name__}: {said}): {remedy}."
        ) from error


class Checked(BaseModel):
    """Values of a file that anybody can edit: of the right kind; others beside them are let be."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class _Curve(Checked):
    epoch: list[Finite]
    accuracy: Measured
    loss: Measured
    epsilon: Measured

    @model_validator(mode="after")
    def _check(self) -> _Curve:
        if (
            len({len(values) for values in (self.epoch, self.accuracy, self.loss, self.epsilon)})
            > 1
        ):
            raise refuse("its lists do not belong together")
        return self


class _Diagnostics(Checked):
    groups: list[str]
    epoch: list[Finite]
    mean: dict[str, Finite | None]
    steps: list[int] = Field(default=[])
    __pydantic_extra__: dict[str, list[Measured]] = Field(init=False)

    @model_validator(mode="after")
    def _check(self) -> _Diagnostics:
        for name, blocks in self.__pydantic_extra__.items():
            sizes = {len(block) for block in blocks}
            if len(blocks) != len(self.epoch) or sizes - {len(self.groups)}:
                raise refuse(f"{name} has not one number for each epoch and group")
        return self


class _TrainingRow(Checked):
    method: str
    dataset: str
    model: str
    seed: int
    final_accuracy: Finite
    best_accuracy: Finite
    seconds: Finite
    delta: Finite | None
    lr: Finite
    epsilon: Finite | None
    epsilon_marginal: Finite | None
    final_loss: Finite | None
    settings: dict[str, Any]
    versions: dict[str, Any]
    hardware: dict[str, Any]
    curve: _Curve
    diagnostics: _Diagnostics | None = None


class _StudyRow(Checked):
    errors: dict[str, Finite]
    seconds: Finite


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """ConfigError for the first row that a report could not be made of."""
    for row in rows:
        config = row.get("config")
        study = isinstance(config, dict) and config.get("kind") == "direction-error"
        model = _StudyRow if study else _TrainingRow
        try:
            model.model_validate(row)
        except ValidationError as error:
            label = row.get("label", "without a label")
            raise ConfigError(
                f"the row {row.get('hash', '(without a hash)')} ({label}) cannot be reported: "
                f"{what_is_wrong(error)}; take its line out of rows.jsonl, and `vestige reproduce` "
                "runs it again."
            ) from error


def what_is_wrong(error: ValidationError) -> str:
    """The first thing that pydantic found, with its place and its value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "sentence":
        return f"{place}: {first['msg']}"
    value = repr(first["input"])
    shown = value if len(value) <= 40 else f"{value[:40]}..."
    return f"{place} is {shown} ({first['msg'].replace('Input should', 'it must')})"
