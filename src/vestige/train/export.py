"""The model of a run for other programs: torch.export, ONNX, and a folder for the Hugging Face hub.

Guarantee: an export is a function of the weights and of public facts, and costs nothing. Weights
that are not those of the run's statement are refused.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from vestige import statement
from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.train.saved_model import (
    MODEL_FILE,
    SAFE_FILE,
    WEIGHTS_FILE,
    TrainedModel,
    load,
    sha256,
)

_ONE_ONNX_FILE = 2**31 - 2**24


def checked(run: Path, model: str | None = None) -> tuple[TrainedModel, dict[str, Any]]:
    """The model of a run and its statement, which must belong together."""
    stated, loaded = statement.read(run), load(run, model)
    if sha256((run / WEIGHTS_FILE).read_bytes()) != stated["run"].get("weights_sha256"):
        raise ConfigError(
            f"{run / WEIGHTS_FILE} is not the model of the statement beside it: its SHA-256 is "
            "another. Restore it, or train again."
        )
    return loaded, stated


def to_torch(model: TrainedModel, path: Path) -> Path:
    """A program of torch.export, which runs without Vestige and without the model's source."""
    buffer = io.BytesIO()
    torch.export.save(_program(model), buffer)
    write_whole(path, buffer.getvalue())
    return path


def to_onnx(model: TrainedModel, path: Path) -> Path:
    """An ONNX file; weights beyond its limit of 2 GiB lie beside it as NAME.data."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"ONNX needs {package}, which is not installed: pip install 'vestige-dp[export]', "
                "or give --torch-export."
            )
    # The exporter tells of packages that a model does not use, and of torch's own future.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made: Any = torch.onnx.export(_program(model), dynamo=True, verbose=False)
    size = sum(value.nbytes for value in model.module.state_dict().values())
    if size < _ONE_ONNX_FILE:
        write_whole(path, made.model_proto.SerializeToString())
    else:
        made.save(path, external_data=True)
    return path


def _program(model: TrainedModel) -> Any:
    # Two rows, since one would be taken for a constant.
    rows = torch.zeros(2, *model.facts["input_shape"])
    try:
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        return torch.export.export(model.module, (rows,), dynamic_shapes=shapes)
    except Exception as error:  # a model of somebody's own may do anything
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"torch.export cannot follow the model {model.facts['model']!r} ({why}): take "
            "model.pt, or write its forward without choices that follow the data."
        ) from error


def to_hub(run: Path, model: TrainedModel, stated: dict[str, Any], folder: Path) -> list[Path]:
    """A folder for the hub: weights, model.json, statement, and a card with the guarantee."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a folder for the hub needs safetensors, which is not installed: pip install "
            "'vestige-dp[hf]'."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.module.state_dict().items()}
    save_file(weights, folder / SAFE_FILE)
    for name in (MODEL_FILE, statement.JSON_FILE, statement.MARKDOWN_FILE):
        shutil.copyfile(run / name, folder / name)
    write_whole(folder / "README.md", statement.model_card(stated, model.facts))
    return sorted(folder.iterdir())
