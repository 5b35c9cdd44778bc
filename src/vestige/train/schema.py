"""The public schema of somebody's own data: which columns there are, and what they can hold.

Ranges, categories and frequencies are declared by a person, from a codebook or from general
knowledge, and never computed from records: a minimum is somebody's value, and a rare category is
somebody. Everything in a schema is published with the model. Nothing here imports torch.

Guarantee: what a schema makes of a record is a function of that record alone.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from vestige.errors import ConfigError
from vestige.privacy.options import OneOf, Options

TASKS = ("classification", "multi-label", "regression")
KINDS = ("number", "category", "date")
UNKNOWN = ("refuse", "drop")
TABLES = (".csv", ".tsv", ".parquet")
FOLDER = "folder"
"""The target of an image folder: the name of the folder that an image lies in."""


_EXAMPLES = {
    "number": ("finite numbers", "[0, 120]"),
    "date": ("dates", "[2015-01-01, 2024-12-31]"),
}


def number(value: Any) -> float | None:
    """The number that a cell holds; None for text, an empty cell and what is not finite."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def days(value: Any) -> float | None:
    """The days to a date, or to a date and time, from the first of the calendar; None for others.

    Text is read as ISO 8601 writes it, 2015-12-31 or 2015-12-31 23:59. A time zone is passed over.
    """
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value.replace(tzinfo=None) - datetime.min) / timedelta(days=1)
    return float(value.toordinal() - 1) if isinstance(value, date) else None


class Column(Options):
    """What one column can hold. Raises ConfigError for a bad value.

    A number or a date is clipped to `range` and scaled to -1 ... 1; an empty cell becomes
    `missing`, by default the middle of the range. A category that is not among `categories` is
    "other". Dates are written as in ISO 8601.
    """

    kind: Annotated[str, OneOf(KINDS)]
    range: tuple[float | str, ...] = ()
    missing: float | str | None = None
    categories: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Column:
        names = self.categories
        # Text is a date, and a number is none.
        read = [
            None if isinstance(value, str) != (self.kind == "date") else self.place(value)
            for value in self.range
        ]
        what, example = _EXAMPLES.get(self.kind, _EXAMPLES["number"])
        if read and (len(read) != 2 or None in read or self.bounds[0] >= self.bounds[1]):
            raise ConfigError(
                f"range {list(self.range)} must be two {what}, the smaller one first: for example "
                f"{example}."
            )
        if self.missing is not None and self.place(self.missing) is None:
            raise ConfigError(
                f"missing {self.missing!r} must be one of the {what} that stand in {example}."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"categories {list(names)} names one twice: name each once.")
        return self

    @property
    def declared(self) -> bool:
        """Whether a person has said what the column can hold."""
        return bool(self.categories if self.kind == "category" else self.range)

    @property
    def bounds(self) -> tuple[float, float]:
        """The declared range as numbers."""
        low, high = (self.place(value) for value in self.range)
        return float(low or 0), float(high or 0)

    def place(self, value: Any) -> float | None:
        """The number that a cell stands for; None for an empty cell and what is none."""
        return days(value) if self.kind == "date" else number(value)


class Schema(Options):
    """The public facts about a file of records. Raises ConfigError for a bad value.

    `target` names what is predicted: one column, for multi-label and regression also several. With
    `image` the records are images of that shape (channels, height, width) in one folder for each
    class. `held_out` is the share of records that no run trains on. `frequencies` of the classes,
    where they are declared, weigh the loss. `unknown` says what happens to a record without a known
    class, or with text for a number: the run is refused, or the record is left out.
    """

    task: Annotated[str, OneOf(TASKS)] = "classification"
    target: tuple[str, ...]
    columns: Mapping[str, Column]
    image: tuple[int, ...] = ()
    held_out: float = Field(default=0.2, gt=0, lt=1)
    frequencies: tuple[float, ...] = ()
    unknown: Annotated[str, OneOf(UNKNOWN)] = "refuse"

    @model_validator(mode="after")
    def _check(self) -> Schema:
        missing = [name for name in self.target if name not in self.columns]
        if missing or not self.target:
            raise ConfigError(
                f"target {', '.join(missing) or '(none)'} is no column of the schema: it has "
                f"{', '.join(self.columns)}."
            )
        if self.task == "classification" and len(self.target) > 1:
            raise ConfigError(
                f"target {', '.join(self.target)} has {len(self.target)} columns, and "
                'classification takes one: give one, or task = "multi-label".'
            )
        wanted = "number" if self.task == "regression" else "category"
        for name in self.target:
            if self.columns[name].kind != wanted:
                raise ConfigError(
                    f"the target {name} is a {self.columns[name].kind}, and {self.task} needs a "
                    f'{wanted}: write kind = "{wanted}".'
                )
        if not self.image and self.target == (FOLDER,) and len(self.columns) == 1:
            raise ConfigError(
                "undeclared is image: write the channels (1 or 3), height and width that images "
                "are resized to, for example [3, 32, 32]."
            )
        if not self.image and len(self.columns) == len(self.target):
            raise ConfigError("the schema has no column but the target: add those to learn from.")
        if self.image and (len(self.image) != 3 or self.image[0] not in (1, 3)):
            raise ConfigError(
                f"image {list(self.image)} must be channels (1 or 3), height and width: for "
                "example [3, 32, 32]."
            )
        self._check_frequencies()
        return self

    def _check_frequencies(self) -> None:
        shares = self.frequencies
        if not shares:
            return
        right = len(shares) == len(self.labels) and all(0 < share < 1 for share in shares)
        if self.task != "classification" or not right or not 0.99 < sum(shares) < 1.01:
            raise ConfigError(
                f"frequencies {list(shares)} must be one share for each of the "
                f"{len(self.labels)} classes, with a sum of 1, and are for classification alone."
            )

    @property
    def features(self) -> list[str]:
        """The columns to learn from, in the order of the schema."""
        return [name for name in self.columns if name not in self.target]

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, or the names of several labels or targets."""
        if self.task == "classification":
            return self.columns[self.target[0]].categories
        return self.target

    def check_declared(self) -> None:
        """Refuse a schema that leaves to the data what a person has to say."""
        open_ones = [
            f"{'categories' if column.kind == 'category' else 'range'} of {name}"
            for name, column in self.columns.items()
            if not column.declared
        ]
        if open_ones:
            raise ConfigError(
                f"undeclared are {', '.join(open_ones)}. Write in what is publicly known about "
                "them, not what these records hold."
            )
        for name in self.target if self.task != "regression" else ():
            count = len(self.columns[name].categories)
            if count < 2 or (self.task == "multi-label" and count > 2):
                raise ConfigError(
                    f"the target {name} has {count} categories, and {self.task} needs "
                    f"{'two' if self.task == 'multi-label' else 'at least two'}: name them, the "
                    "one that means no first."
                )

    def as_json(self) -> dict[str, Any]:
        """The schema as plain JSON types; `restored` reads it."""
        return self.model_dump(mode="json", exclude_defaults=True)


def restored(saved: Mapping[str, Any]) -> Schema:
    """The schema that a TOML file or `Schema.as_json` holds."""
    columns = saved.get("columns")
    if not isinstance(columns, Mapping) or not all(
        isinstance(c, Mapping) for c in columns.values()
    ):
        raise ConfigError("the schema has no [columns.NAME] tables: draft one with vestige schema.")
    made = {}
    for name, facts in columns.items():
        try:
            made[name] = Column(**_mended(facts))
        except ConfigError as error:
            raise ConfigError(f"column {name}: {error}") from None
    return Schema(**_mended(saved) | {"columns": made})


def _mended(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What people write otherwise: 1 for 1.0, 1 for the category "1", a target without a list."""

    def plain(value: Any) -> Any:
        if isinstance(value, date):  # TOML has dates, JSON has not
            return value.isoformat()
        whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if whole else value

    changed = dict(facts)
    for name in ("range", "frequencies", "missing"):
        value = changed.get(name)
        if isinstance(value, list | tuple):
            changed[name] = tuple(map(plain, value))
        elif value is not None:
            changed[name] = plain(value)
    if isinstance(changed.get("categories"), list | tuple):
        changed["categories"] = tuple(
            str(c) if isinstance(c, int) and not isinstance(c, bool) else c
            for c in changed["categories"]
        )
    if isinstance(changed.get("target"), str):
        changed["target"] = (changed["target"],)
    return changed


def is_own(data: Path) -> bool:
    """Whether a path is data that a schema describes: a table, or a folder of images."""
    return data.is_dir() or data.suffix.lower() in TABLES


def default_path(data: Path) -> Path:
    """Where the schema of a file lies unless somebody says otherwise."""
    data = data if data.name else data.absolute()
    return data.with_name(f"{data.stem}.schema.toml")


def read_schema(data: Path, path: Path | None, target: Iterable[str] = ()) -> Schema:
    """The schema of `data`, complete; `target` takes the place of the one that it names."""
    path = default_path(data) if path is None else path
    if not path.is_file():
        wanted = " ".join(f"--target {name}" for name in target) or "--target COLUMN"
        raise ConfigError(
            f"{data} has no public schema {str(path)!r}: draft one with `vestige schema "
            f"{data} {wanted}`, declare its ranges and categories, and train again."
        )
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as TOML ({error}): mend it.") from error
    try:
        schema = restored(facts | ({"target": tuple(target)} if target else {}))
        schema.check_declared()
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    return schema


HEAD = """\
# Public schema of {name}. Everything in this file is published with the model.
# Complete each line that says DECLARE from a codebook or from general knowledge. Do not look at the
# records for it: the largest value in a column is somebody's, and a rare category is somebody.
# Columns that are not to be used: delete their part. What each column holds (number, category or
# date) was read off the file; check it.

task = {task}  # {tasks}
target = {target}
held_out = 0.2  # share of records that no run trains on; keep it the same for all runs
unknown = "refuse"  # records without a known class or number: "refuse" the run, or "drop" them
# frequencies = []  # DECLARE if the loss is to weigh classes: their public shares, never counts
# The number of training records is published too. Where it is confidential, give a public one:
# vestige train --dataset-size N
"""


def draft(name: str, kinds: Mapping[str, str], target: Iterable[str], task: str) -> str:
    """The text of a schema to be completed. It holds names and kinds of columns, and no value."""
    wanted = list(target)
    if not wanted:
        raise ConfigError(
            f"no target is named: say what is to be predicted, --target COLUMN; {name} has the "
            f"columns {', '.join(kinds)}."
        )
    missing = [column for column in wanted if column not in kinds]
    if missing:
        raise ConfigError(
            f"target {', '.join(missing)} is no column of {name}: it has {', '.join(kinds)}."
        )
    if task == "classification" and len(wanted) > 1:
        raise ConfigError(
            f"target {', '.join(wanted)} has {len(wanted)} columns, and classification takes one: "
            "give one, or --task multi-label (yes or no for each) or regression (numbers)."
        )
    parts = [
        HEAD.format(
            name=name,
            task=json.dumps(task),
            tasks=", ".join(TASKS),
            target=_quoted(wanted),
        )
    ]
    for column, found in kinds.items():
        kind = found
        if column in wanted:
            kind = "number" if task == "regression" else "category"
        key = column if re.fullmatch("[A-Za-z0-9_-]+", column) else _quoted(column)
        lines = [f"[columns.{key}]", f'kind = "{kind}"']
        if kind == "number":
            lines.append("range = []  # DECLARE smallest and largest; values beyond are clipped")
        elif kind == "date":
            lines.append("range = []  # DECLARE earliest and latest, such as 2015-01-01")
        else:
            other = "" if column in wanted else '; all else is "other"'
            lines.append(f"categories = []  # DECLARE every category, as text{other}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def draft_images(name: str, folders: Iterable[str]) -> str:
    """The same for a folder of images, whose classes are the names of the folders in it."""
    text = HEAD.format(
        name=name, task='"classification"', tasks="classification alone", target=f'["{FOLDER}"]'
    )
    listed = _quoted(sorted(folders))
    return (
        f"{text}image = []  # DECLARE channels (1 or 3), height and width; images are resized\n\n"
        f'[columns.{FOLDER}]\nkind = "category"\n'
        f"categories = {listed}  # DECLARE: names of folders; check that each is public\n"
    )


def _quoted(value: Any) -> str:
    """Text, or a list of texts, as TOML writes them."""
    return json.dumps(value, ensure_ascii=False)
