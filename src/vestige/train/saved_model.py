"""A trained model in a run folder: its weights, and what is needed to use them.

`model.pt` is a state_dict; `model.json` says which model it belongs to, the shape of an input, what
the outputs mean and how a record becomes an input. `load` puts them together.

Guarantee: a folder is data and never code. Weights are read with weights_only=True, and a model of
somebody's own is made only by the factory that the caller names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError
from torch import Tensor, nn

from vestige.errors import ConfigError
from vestige.statement.model import Positive, told
from vestige.train import models, table_data
from vestige.train.dataset import Dataset
from vestige.train.own_data import encode_file, images_at
from vestige.train.schema import restored

MODEL_FILE, WEIGHTS_FILE, SAFE_FILE = "model.json", "model.pt", "model.safetensors"
_ROWS_AT_ONCE = 256


class _Preprocessing(BaseModel):
    """How a record becomes an input."""

    model_config = ConfigDict(strict=True)

    kind: Literal["numbers", "pixels", "schema"]
    white: Positive = 255
    # Its own model reads it.
    described: dict[str, JsonValue] = Field(default={}, alias="schema")


class _Described(BaseModel):
    """What model.json must hold to be used; a file may hold more."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str
    features: str | None = None
    task: Literal["classification", "multi-label", "regression"]
    input_shape: list[Positive] = Field(min_length=1)
    outputs: Positive
    labels: list[str]
    ranges: list[tuple[FiniteFloat, FiniteFloat]] = []
    preprocessing: _Preprocessing


def described(dataset: Dataset, model: str, features: str | None = None) -> dict[str, Any]:
    """What model.json holds: public facts alone."""
    return {
        "version": 1,
        "model": model,
        **({} if features is None else {"features": features}),
        "task": dataset.task,
        "input_shape": list(dataset.input_shape),
        "outputs": dataset.classes,
        "labels": list(dataset.labels) or [str(label) for label in range(dataset.classes)],
        "ranges": [list(bounds) for bounds in dataset.ranges],
        "preprocessing": dict(dataset.preprocessing),
    }


def sha256(weights: bytes) -> str:
    """The hash that a statement names the weights by."""
    return hashlib.sha256(weights).hexdigest()


class TrainedModel(nn.Module):
    """A trained model in evaluation mode, with its preprocessing.

    Called with a batch of inputs it gives the scores; `preprocess` makes inputs of records, and
    `predict` goes from records to predictions. `facts` is what model.json holds.
    """

    def __init__(self, module: nn.Module, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.module, self.facts = module, dict(facts)
        self.labels: list[str] = list(facts["labels"])
        how = facts["preprocessing"]
        # The public schema of the records, where they are a table or image files.
        self.schema = restored(how.get("schema") or {}) if how["kind"] == "schema" else None
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The scores of a batch of inputs."""
        scores: Tensor = self.module(x)
        return scores

    def preprocess(self, records: Any) -> Tensor:
        """The inputs of records.

        A path to a file like the training data; for a table also a mapping of columns, such as a
        DataFrame, or a list of rows with names; for arrays an array of inputs.
        """
        if isinstance(records, str | Path):
            records = Path(records)
            x = encode_file(records, self.schema) if self.schema else self._array(_read(records))
        elif self.schema and not self.schema.image:
            x = table_data.encode(self.schema, _columns(records))
        elif self.schema:
            raise ConfigError("images are given as the path of an image or of a folder of them.")
        else:
            x = self._array(np.asarray(records))
        if tuple(x.shape[1:]) != tuple(self.facts["input_shape"]):
            raise ConfigError(
                f"a record has the shape {tuple(x.shape[1:])}, and the model was trained on "
                f"{tuple(self.facts['input_shape'])}: give records like those."
            )
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))

    def _array(self, x: NDArray[Any]) -> NDArray[Any]:
        from vestige.train.data import inputs

        return inputs(x, "x", self.facts["preprocessing"].get("white", 255)).numpy()

    def predict(self, records: Any) -> list[dict[str, Any]]:
        """The prediction for each record, as plain types; for image files with their names.

        Classification: the class and the probability of each. Multi-label: the probability of each
        label, and those above one half. Regression: each target in its own unit.
        """
        x = self.preprocess(records)
        with torch.no_grad():
            scores = torch.cat([self(part) for part in x.split(_ROWS_AT_ONCE)]).double()
        found = self._told(scores)
        if self.schema and self.schema.image:
            path = Path(records)
            base = path if path.is_dir() else path.parent
            names = [file.relative_to(base).as_posix() for file in images_at(path)]
            return [{"file": n, **one} for n, one in zip(names, found, strict=True)]
        return found

    def _told(self, scores: Tensor) -> list[dict[str, Any]]:
        """What the scores of each record say."""
        if self.facts["task"] == "regression":
            bounds = torch.tensor(self.facts["ranges"] or [[-1.0, 1.0]] * scores.shape[1])
            low, high = bounds.double().unbind(1)
            values = low + (scores.clamp(-1, 1) + 1) / 2 * (high - low)
            return [
                {"prediction": dict(zip(self.labels, row, strict=True))} for row in values.tolist()
            ]
        several = self.facts["task"] == "multi-label"
        chances = (scores.sigmoid() if several else scores.softmax(1)).tolist()
        found = []
        for row in chances:
            named = dict(zip(self.labels, row, strict=True))
            best: Any = max(named, key=named.__getitem__)
            if several:
                best = [label for label, chance in named.items() if chance > 0.5]
            found.append({"prediction": best, "probabilities": named})
        return found


def load(run: str | Path, model: str | None = None) -> TrainedModel:
    """The trained model of a run folder, in evaluation mode, with its preprocessing.

    `model` is the MODULE:factory of a model of one's own, which a folder is not believed to name.
    """
    folder = Path(run)
    facts = _facts(folder)
    name, features = facts["model"], facts.get("features")
    code = next((n for n in (features, name) if n is not None and models.is_factory(n)), None)
    if code is not None and model != code:
        raise ConfigError(
            f"the model in {str(folder)!r} was made by {code!r}, and a run folder is not believed "
            f"when it names code: if it is yours, give --model {code} (in Python, model={code!r})."
        )
    try:
        public = facts["input_shape"], facts["outputs"]
        if features is None:
            built = models.build(name, *public, seed=0)
        else:
            built = models.on_features(features, name, *public, seed=0)
        built.load_state_dict(_weights(folder))
    except (RuntimeError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"the weights in {str(folder)!r} do not belong to the model {name!r} ({why}): restore "
            "the folder."
        ) from error
    return TrainedModel(built, facts)


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / MODEL_FILE
    if not path.is_file():
        raise ConfigError(
            f"{str(folder)!r} has no {MODEL_FILE}: give the folder of a finished run of vestige "
            "train."
        )
    try:
        text = path.read_bytes()
        described = _Described.model_validate_json(text)
        if len(described.labels) != described.outputs:
            raise ValueError(f"{described.outputs} outputs have {len(described.labels)} labels")
        if len(described.ranges) not in (0, described.outputs):
            raise ValueError(f"{described.outputs} outputs have {len(described.ranges)} ranges")
        facts: dict[str, Any] = json.loads(text)
        facts.setdefault("ranges", [])
        return facts
    except (OSError, ValueError, RecursionError) as error:
        why = told(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path} is damaged ({why}): restore it, or train again.") from error


def _weights(folder: Path) -> dict[str, Tensor]:
    """The weights: a state_dict, or those that an export has put into safetensors."""
    try:
        if not (folder / WEIGHTS_FILE).is_file() and (folder / SAFE_FILE).is_file():
            from safetensors.torch import load_file

            return dict(load_file(folder / SAFE_FILE))
        loaded = torch.load(folder / WEIGHTS_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds on damaged bytes
        raise ConfigError(
            f"the weights in {str(folder)!r} cannot be read ({type(error).__name__}): restore the "
            "folder."
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{folder / WEIGHTS_FILE} holds no state_dict: restore the folder.")
    return loaded


def _read(path: Path) -> NDArray[Any]:
    """The inputs in an .npz or .npy file: the array x, x_test, or the only one there is."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            names = [name for name in ("x", "x_test") if name in loaded.files] or loaded.files
            found: NDArray[Any] = loaded[names[0]]
            return found
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}): this model takes an .npz or .npy "
            "file with an array x of inputs."
        ) from error


def _columns(records: Any) -> Mapping[str, Sequence[Any]]:
    if isinstance(records, list | tuple):
        if not records or not all(isinstance(row, Mapping) for row in records):
            raise ConfigError("records are a list of rows, each a mapping from column to value.")
        names = list(records[0])
        return {name: [row.get(name) for row in records] for name in names}
    if isinstance(records, Mapping) or hasattr(records, "columns"):
        for name in records:
            if isinstance(records[name], str) or not isinstance(records[name], Iterable):
                raise ConfigError(
                    f"a column is a list of values, and {name!r} holds one: for a single record "
                    "write [record]."
                )
        return {str(name): list(records[name]) for name in records}
    raise ConfigError(
        f"records are a {type(records).__name__}: give a path, a list of rows with names, or a "
        "mapping of columns."
    )
