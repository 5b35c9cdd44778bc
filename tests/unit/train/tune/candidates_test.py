"""The public list that a search draws from, and what is refused in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vestige.errors import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.tune.candidates import candidates, from_file, from_grid


def test_a_grid_is_every_combination() -> None:
    assert from_grid({"lr": (0.1, 0.5), "method": "fo", "beta": 0.8}) == [
        {"lr": 0.1, "method": "fo", "beta": 0.8},
        {"lr": 0.5, "method": "fo", "beta": 0.8},
    ]
    assert len(from_grid({"lr": (1, 2, 3), "clip": (1, 2)})) == 6


def test_candidates_are_the_base_but_for_what_is_tried() -> None:
    base = TrainConfig(method="fo", settings={"window": 5}, lr=0.3)
    first, second = candidates(base, [{"beta": 0.8, "lr": 1}, {"clip": (0.5, 0.1)}])
    assert first.config.settings == {"window": 5, "beta": 0.8} and first.config.lr == 1.0
    assert second.config.clip == (0.5, 0.1) and second.config.lr == 0.3
    assert str(first) == "beta 0.8, lr 1"


def test_a_list_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text("[[candidate]]\nlr = 0.1\n[[candidate]]\nlr = 0.5\nlot = 32\n")
    assert from_file(path) == [{"lr": 0.1}, {"lr": 0.5, "lot": 32}]
    for text in ("", "lr = 1", "[candidate]\nlr = 1", "[[candidate]]\nlr=1\n[other]", "]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"\[\[candidate\]\]"):
            from_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_file(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("rows", "shared", "message"),
    [
        ([{"lr": 0.1}], {}, "1 candidates"),
        ([{"lr": 0.1}, {"lr": 0.1}], {}, "1 of them different"),
        ([{"lr": k} for k in range(1, 1003)], {}, "1001 candidates"),
        ([{"lr": 0.1}, {"lr": -1}], {}, "lr"),
        ([{"lr": 0.1}, {"beta": 1}], {}, "beta"),
        ([{"lr": 0.1}, {"seed": 1}], {}, "seed is not for trying"),
        ([{"lr": 0.1}, {"method": "geodp", "bounding": 0.1}], {}, "'geodp' has no guarantee"),
        ([{"lr": 0.1}, {"noise_multiplier": 2.0}], {"epsilon": 3.0}, "both given"),
        ([{"lr": 0.1}, {"lr": 1.0}], {"max_epsilon": 3.0}, "max_epsilon 3.0 does not go"),
        ([{"lr": 0.1}, {"lr": 1.0}], {"train_loss": True}, "train_loss True does not go"),
        ([{"lr": 0.1}, {"lr": 1.0}], {"compile": True}, "compile True does not go"),
        ([{"lr": 0.1}, {"lr": 1.0}], {"features": "scatter"}, "features scatter does not go"),
        ([{"lr": 0.1}, {"lr": 1.0}], {"model": "wrn", "weights": "a.pt"}, "weights a.pt does not"),
        ([{"lr": 0.1}, {"model": "least-squares"}], {}, "has nothing to search"),
    ],
)
def test_bad_lists_are_refused(rows: Any, shared: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        candidates(TrainConfig(**shared), rows)
