"""The page's module of a transformers model, as it is printed, under `--recipe probe`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vestige.train.config import TrainConfig
from vestige.train.training import train

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[hf]'")

PAGE = Path(__file__).parents[4] / "docs/recipes.md"
WORDS, LENGTH = 50, 12


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    """The page's code in a file of the current folder, on a tiny Bert that was saved there."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (code,) = (block for block in blocks if "class Sentences" in block)
    assert code.count('"a public model"') == 1
    code = code.replace('"a public model"', repr(str(tmp_path / "bert")))
    (tmp_path / "sent.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    yield "sent:sentences"
    sys.modules.pop("sent", None)


def test_a_probe_learns_on_a_language_model(sentences, tmp_path):
    random = np.random.default_rng(0)
    x = random.integers(0, WORDS, (600, LENGTH))
    y = x[:, 0] % 2  # the first word says the class
    arrays = {"x_train": x[:500], "y_train": y[:500], "x_test": x[500:], "y_test": y[500:]}
    for name in ("x_train", "x_test"):
        arrays[name] = arrays[name].astype("float32")
    np.savez(tmp_path / "texts.npz", classes=2, **arrays)
    made = {"recipe": "probe", "epsilon": 8.0, "delta": 1e-3, "accountant": "rdp", "noise_seed": 1}
    made |= {"lot": 100, "epochs": 10, "out": tmp_path / "run"}
    result = train(TrainConfig(dataset=str(tmp_path / "texts.npz"), features=sentences, **made))
    assert result["accuracy"] > 0.7
    assert result["parameters"] == 33 * 2 + sum(
        p.numel() for p in transformers.BertModel.from_pretrained(tmp_path / "bert").parameters()
    )
