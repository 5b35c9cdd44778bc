"""A small table of somebody's own, with its public schema."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = """
task = "{task}"
target = {target}
unknown = "{unknown}"
{more}
[columns.age]
kind = "number"
range = [0, 100]

[columns.town]
kind = "category"
categories = ["north", "south"]

[columns.ill]
kind = "category"
categories = ["no", "yes"]

[columns.tall]
kind = "category"
categories = ["no", "yes"]

[columns.days]
kind = "number"
range = [0, 40]
"""


def rows(count: int = 80) -> list[dict[str, Any]]:
    """Records with recognisable ages: town and age decide about the rest."""
    generator = np.random.default_rng(5)
    made = []
    for _ in range(count):
        age = round(float(generator.uniform(1, 99)), 6)
        town = str(generator.choice(["north", "south"]))
        ill = "yes" if age > 50 else "no"
        tall = "yes" if town == "north" else "no"
        days = round(age / 4 + float(generator.normal()), 6)
        made.append({"age": age, "town": town, "ill": ill, "tall": tall, "days": days})
    return made


def of_users(count: int = 300, each: int = 4) -> list[dict[str, Any]]:
    """The same with a column of ids: so many rows each, of users with recognisable names."""
    return [{**record, "who": f"zqx{place // each}qzx"} for place, record in enumerate(rows(count))]


def write_table(
    path: Path,
    records: list[dict[str, Any]] | None = None,
    task: str = "classification",
    target: str = '"ill"',
    unknown: str = "refuse",
    more: str = "",
) -> Path:
    """A CSV file with its schema beside it."""
    records = rows() if records is None else records
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    text = SCHEMA.format(task=task, target=target, unknown=unknown, more=more)
    path.with_name(f"{path.stem}.schema.toml").write_text(text)
    return path
