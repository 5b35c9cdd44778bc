"""Somebody's own records as a dataset: a table or a folder of images, by its public schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vestige.errors import ConfigError
from vestige.train import table_data
from vestige.train.dataset import Dataset
from vestige.train.schema import FOLDER, TABLES, Schema, draft, draft_images

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def load_own(
    path: Path,
    schema: Schema,
    train_size: int | None = None,
    test_size: int | None = None,
    units: str | None = None,
) -> Dataset:
    """The records at `path` as their schema describes them.

    `train_size` and `test_size` keep the first records of each split. The split is public. `units`
    is the column with the ids of users, each of whom is in one split alone.
    """
    x, y, known, held_out = (_images if schema.image else _table)(path, schema)
    ids: NDArray[Any] | None = None
    if units is not None:
        ids = table_data.ids(table_data.read_table(path), units)
        held_out = table_data.in_held_out((one.encode() for one in ids), schema.held_out)
    splits = []
    for name, rows, size in (
        ("train", known & ~held_out, train_size),
        ("test", known & held_out, test_size),
    ):
        chosen = np.flatnonzero(rows)[:size]
        if not len(chosen) or (size is not None and len(chosen) < size):
            raise ConfigError(
                f"the {name} split of {path.name} holds {len(chosen)} records, and "
                f"{size or 1} are needed: give more records, or change held_out in the schema."
            )
        splits.append((torch.from_numpy(x(chosen)), torch.from_numpy(y[chosen])))
    trained = np.flatnonzero(known & ~held_out)[:train_size]
    weights = tuple(1 / (len(schema.frequencies) * share) for share in schema.frequencies)
    return Dataset(
        str(path),
        *splits[0],
        *splits[1],
        classes=len(schema.labels),
        task=schema.task,
        labels=schema.labels,
        preprocessing={"kind": "schema", "schema": schema.as_json()},
        own=True,
        weights=weights or None,
        ranges=tuple(schema.columns[name].bounds for name in schema.target)
        if schema.task == "regression"
        else (),
        units=None if ids is None else tuple(ids[trained]),
    )


Loaded = tuple[Callable[[NDArray[Any]], NDArray[Any]], NDArray[Any], NDArray[Any], NDArray[Any]]


def _table(path: Path, schema: Schema) -> Loaded:
    """Inputs by their places, targets, which rows have one, and which are held out."""
    table = table_data.read_table(path)
    y, known = table_data.targets(schema, table)
    x = table_data.encode(schema, table, training=True)
    known &= ~np.isnan(x).any(axis=1)
    held_out = table_data.in_held_out(table_data.row_bytes(table), schema.held_out)
    return x.__getitem__, y, known, held_out


def _images(path: Path, schema: Schema) -> Loaded:
    files = image_files(path)
    y, known = table_data.targets(schema, {FOLDER: [file.parent.name for file in files]})
    contents = (file.read_bytes() for file in files)
    held_out = table_data.in_held_out(contents, schema.held_out)
    return lambda rows: read_images([files[row] for row in rows], schema), y, known, held_out


def image_files(folder: Path) -> list[Path]:
    """The images in the folders of a folder, in the order of their names."""
    found = sorted(p for p in folder.glob("*/*") if p.suffix.lower() in _IMAGES)
    if not found:
        raise ConfigError(
            f"the folder {str(folder)!r} holds no images: put them into one folder for each "
            "class, as FOLDER/CLASS/NAME.png."
        )
    return found


def read_images(files: Iterable[Path], schema: Schema) -> NDArray[np.float32]:
    """Images as (rows, channels, height, width) from -1 to 1, resized to the declared shape."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise ConfigError(
            "images need pillow, which is not installed: pip install 'vestige-dp[data]', or give "
            "the data as an .npz file."
        ) from error
    channels, height, width = schema.image
    rows = []
    for file in files:
        try:
            with Image.open(file) as image:
                made = image.convert("L" if channels == 1 else "RGB").resize((width, height))
        except (OSError, UnidentifiedImageError) as error:
            raise ConfigError(f"{file} is no image that can be read: remove or mend it.") from error
        pixels = np.asarray(made, dtype=np.float32).reshape(height, width, channels)
        rows.append((pixels.transpose(2, 0, 1) / 255 - 0.5) / 0.5)
    return np.stack(rows)


def encode_file(path: Path, schema: Schema) -> NDArray[np.float32]:
    """The inputs of a file to predict for: a table, an image, or a folder of them."""
    if schema.image:
        return read_images(images_at(path), schema)
    if path.is_dir():
        raise ConfigError(
            f"{str(path)!r} is a folder, and this model was trained on a table: give a CSV or "
            f"parquet file with the columns {', '.join(schema.features)}."
        )
    return table_data.encode(schema, table_data.read_table(path))


def images_at(path: Path) -> list[Path]:
    """The image at a path, or those in a folder or in its folders, in the order of their names."""
    if path.suffix.lower() in TABLES:
        raise ConfigError(
            f"{path} is a table, and this model was trained on images: give an image or a folder "
            "of them."
        )
    if not path.is_dir():
        return [path]
    direct = sorted(p for p in path.iterdir() if p.suffix.lower() in _IMAGES)
    return direct or image_files(path)


def drafted(path: Path, target: Iterable[str], task: str) -> str:
    """The text of a schema for the data at `path`, without any value of it."""
    if path.is_dir():
        return draft_images(path.name, {file.parent.name for file in image_files(path)})
    return draft(path.name, table_data.kinds(table_data.read_table(path)), target, task)
