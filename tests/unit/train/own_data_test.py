"""Own data from the file to the split: tables and folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.own_tables import of_users, rows, write_table
from vestige.errors import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.dataset import Dataset
from vestige.train.own_data import drafted, encode_file, load_own
from vestige.train.schema import read_schema
from vestige.train.training import load_data


def load(path: Path, sizes: tuple[int | None, int | None] = (None, None)) -> Dataset:
    return load_own(path, read_schema(path, None), *sizes)


def test_a_table_becomes_two_splits_that_share_no_record(tmp_path: Path) -> None:
    data = load(write_table(tmp_path / "t.csv"))
    assert data.own and (data.task, data.labels, data.classes) == (
        "classification",
        ("no", "yes"),
        2,
    )
    assert data.input_shape == (8,)  # age, days, and three for town and for tall
    assert len(data.x_train) + len(data.x_test) == len(rows())
    everything = torch.cat([data.x_train, data.x_test])
    assert len(everything.unique(dim=0)) == len(rows())
    assert data.x_train.dtype == torch.float32 and data.y_train.dtype == torch.int64
    assert float(everything.abs().max()) <= 1


def test_a_record_less_takes_nothing_else_along(tmp_path: Path) -> None:
    whole = load(write_table(tmp_path / "a.csv"))
    less = load(write_table(tmp_path / "b.csv", rows()[1:]))
    gone = len(whole.x_train) - len(less.x_train)
    kept = {row.tobytes() for row in less.x_train.numpy()}
    assert gone in (0, 1)
    assert sum(row.tobytes() not in kept for row in whole.x_train.numpy()) == gone


def test_a_record_with_text_for_a_number_is_left_out_of_both_splits(tmp_path: Path) -> None:
    records = rows()
    whole = load(write_table(tmp_path / "a.csv", records, unknown="drop"))
    for record in records[:20]:
        record["age"] = f"{record['age']} years"
    data = load(write_table(tmp_path / "b.csv", records, unknown="drop"))
    assert len(data.x_train) + len(data.x_test) == len(rows()) - 20
    before, after = (torch.cat([one.x_train, one.x_test]).numpy() for one in (whole, data))
    assert {row.tobytes() for row in after} < {row.tobytes() for row in before}


def test_runs_of_any_seed_and_schema_hold_out_the_same_records(tmp_path: Path) -> None:
    """Else a record could be trained on by one run and be on another's held-out ledger."""
    path = write_table(tmp_path / "t.csv")
    fewer = read_schema(path, None).changed(target=("tall",))
    whole, other = load(path), load_own(path, fewer)
    assert len(whole.x_test) == len(other.x_test)
    ages = [data.x_test[:, 0].tolist() for data in (whole, other)]
    assert ages[0] == ages[1]
    config = TrainConfig(dataset=str(path), lot=8)
    splits = [load_data(config.changed(seed=seed), seed) for seed in (0, 5)]
    assert torch.equal(splits[0].x_test, splits[1].x_test)


def test_class_weights_come_from_declared_frequencies(tmp_path: Path) -> None:
    data = load(write_table(tmp_path / "t.csv", more="frequencies = [0.8, 0.2]"))
    assert data.weights == pytest.approx((0.625, 2.5))


def test_sizes_are_checked(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv")
    assert len(load(path, (10, 3)).x_train) == 10
    with pytest.raises(ConfigError, match=r"the train split of t\.csv holds \d+ records, and 999"):
        load(path, (999, None))


def images(folder: Path, shape: str = "[3, 4, 5]") -> Path:
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 256, (6, 6, 3)).astype(np.uint8)
            image.fromarray(pixels).save(folder / name / f"{number}.png")
    text = drafted(folder, (), "classification")
    assert 'categories = ["cat", "dog"]' in text
    (folder.parent / f"{folder.name}.schema.toml").write_text(
        text.replace("image = []", f"image = {shape}")
    )
    return folder


def test_a_folder_of_images_becomes_two_splits(tmp_path: Path) -> None:
    folder = images(tmp_path / "pets")
    data = load(folder)
    assert (data.input_shape, data.labels) == ((3, 4, 5), ("cat", "dog"))
    assert len(data.x_train) + len(data.x_test) == 40
    assert float(data.x_train.min()) >= -1 and float(data.x_train.max()) <= 1
    schema = read_schema(folder, None)
    one = encode_file(folder / "cat" / "0.png", schema)
    several = encode_file(folder / "cat", schema)
    assert (one.shape, several.shape) == ((1, 3, 4, 5), (20, 3, 4, 5))
    assert encode_file(folder, schema).shape == (40, 3, 4, 5)


def test_a_folder_of_images_that_are_none_is_refused(tmp_path: Path) -> None:
    folder = images(tmp_path / "pets", shape="[1, 4, 4]")
    (folder / "cat" / "bad.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match="is no image that can be read"):
        encode_file(folder / "cat" / "bad.png", read_schema(folder, None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no images"):
        drafted(tmp_path / "empty", (), "classification")


def by_user(path: Path, **sizes: int) -> Dataset:
    return load_own(path, read_schema(path, None), units="who", **sizes)


def test_whole_users_are_trained_on_or_held_out(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", of_users())
    data = by_user(path)
    assert data.units is not None
    assert len(data.units) == len(data.x_train)
    assert (len(data.units) % 4, len(data.x_test) % 4) == (0, 0)
    assert data.protected == len(set(data.units)) == len(data.x_train) // 4
    ages = {age: one["who"] for one in of_users() for age in [np.float32(one["age"] / 50 - 1)]}
    assert all(ages[x[0]] == who for x, who in zip(data.x_train.numpy(), data.units, strict=True))
    assert "zqx" not in repr(data)


def test_a_split_of_users_is_cut_like_any_other(tmp_path: Path) -> None:
    data = by_user(write_table(tmp_path / "t.csv", of_users()), train_size=10)
    assert data.units is not None
    assert len(data.units) == 10
    assert load(write_table(tmp_path / "u.csv")).protected == len(
        load(write_table(tmp_path / "u.csv")).x_train
    )


def test_a_row_of_nobody_is_refused(tmp_path: Path) -> None:
    records = of_users(8)
    records[2]["who"] = ""
    with pytest.raises(ConfigError, match="row 3 has no who"):
        by_user(write_table(tmp_path / "t.csv", records))
    with pytest.raises(ConfigError, match="no column 'who'"):
        by_user(write_table(tmp_path / "u.csv"))


def test_a_model_does_not_learn_from_ids(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", of_users())
    with pytest.raises(ConfigError, match="has it as a column to learn from"):
        TrainConfig(dataset=str(path), units="town", rows_per_unit=2)
