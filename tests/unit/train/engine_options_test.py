"""The settings of a run as `make_private` takes them: lots in pieces, and views of images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.own_tables import write_table
from tests.support.training import tiny, weights
from vestige.errors import ConfigError
from vestige.train import engine_options
from vestige.train.config import TrainConfig
from vestige.train.engine_options import augmentation
from vestige.train.training import load_data, train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_a_lot_in_pieces_is_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(noise_seed=5)
    whole = train(config)
    monkeypatch.setitem(engine_options.ROWS_AT_ONCE, "linear", 3)
    steps: list[int] = []
    pieces = train(config, progress=lambda p: steps.append(p.step))
    assert pieces["steps"] == whole["steps"] == 7
    assert steps == [0, 0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 7]
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(pieces)[name], value, rtol=1e-5, atol=1e-6)


def test_views_are_for_images(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=r"views are for images, and t\.csv"):
        train(TrainConfig(dataset=str(path), views=2, lot=8, steps=1, out=tmp_path / "run"))


@pytest.mark.parametrize(("name", "flips"), [("digits", False), ("cifar10", True)])
def test_a_digit_is_not_mirrored(name: str, flips: bool) -> None:
    data = load_data(TrainConfig(), 0)
    image = torch.arange(64.0).view(1, 8, 8)
    views = augmentation(name, data).views(image[None], 200)
    rising = (views.diff(dim=3) > 0).float().mean((1, 2, 3)) > 0.5
    assert bool((~rising).any()) == flips
