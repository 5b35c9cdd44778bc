"""Heads on fixed features: what is learned is the head, on features that are computed once.

Guarantee: features are made row by row, so that training on them is training on the rows; they are
as private as the rows, and stay in memory, or in a private file where somebody asks for that. A
module of somebody's own is shown to be row-wise on synthetic rows before it sees a record. That it
has learned nothing from the records is taken on trust, and the statement says so.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vestige.errors import ConfigError, StorageError, VestigeError
from vestige.files import write_whole
from vestige.train.recipes.public_scale import InGroups, PublicScale
from vestige.train.recipes.scattering import Scattering

if TYPE_CHECKING:
    from vestige.train.dataset import Dataset

_ROWS_AT_ONCE = 250
_TOGETHER = 8  # rows of the self-check
_COMPARED = 4  # rows of a file of features that are computed again


class OnFeatures(nn.Module):
    """A head on fixed features; it takes inputs, or their features where somebody has them.

    `features` has no parameters to train, and `shape` is the shape of an input's features. `tokens`
    is the size of their vocabulary where inputs are tokens.
    """

    def __init__(
        self,
        features: nn.Module,
        head: nn.Module,
        shape: tuple[int, ...],
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.features, self.head = features.eval().requires_grad_(False), head
        self.shape, self.tokens = shape, tokens

    def train(self, mode: bool = True) -> OnFeatures:
        """Only the head has a training mode: fixed features are the same in both."""
        self.training = mode
        self.head.train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The scores of inputs, or of features."""
        known = tuple(x.shape[1:]) == self.shape
        scores: Tensor = self.head(x if known else self.features(x))
        return scores


def scattered(shape: tuple[int, ...]) -> nn.Module:
    """Scattering features of two scales, brought to a common scale.

    Tramer and Boneh, arXiv 2011.11660, normalise by statistics of the data, which cost privacy, or
    in groups in each image. Here colours have public constants instead, which is worth three to
    four points on CIFAR-10. Grey images of strokes are unlike any random image, and have groups.
    """
    channels, height, width = shape
    waves = Scattering((height, width))
    grey = channels == 1
    return nn.Sequential(waves, InGroups() if grey else PublicScale(waves, shape))


class Mirrored(nn.Module):
    """What an image has in common with its mirror image: the mean of their features.

    Left and right of it then say nearly the same, so that half of the grid, with the middle, is
    kept. A model learns as well from fewer numbers, each of which has its noise.
    """

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, height, width of the features // 2 + 1)."""
        both: Tensor = (self.features(x) + self.features(x.flip(-1))) / 2
        return both[..., : both.shape[-1] // 2 + 1]


def scatter(shape: tuple[int, ...], classes: int) -> OnFeatures:
    """A linear model on scattering features."""
    channels, height, width = shape
    return _linear_on(scattered(shape), (81 * channels, height // 4, width // 4), classes)


def scatter_mirror(shape: tuple[int, ...], classes: int) -> OnFeatures:
    """A linear model on scattering features that an image shares with its mirror image.

    For photographs, whose mirror images show the same. Digits and letters are not so.
    """
    channels, height, width = shape
    made = (81 * channels, height // 4, width // 4 // 2 + 1)
    return _linear_on(Mirrored(scattered(shape)), made, classes)


def _linear_on(features: nn.Module, made: tuple[int, ...], classes: int) -> OnFeatures:
    head = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(made), classes))
    return OnFeatures(features, head, made)


def scatter_cnn(shape: tuple[int, ...], classes: int) -> OnFeatures:
    """A small convolutional network on scattering features, as Tramer and Boneh's for CIFAR-10."""
    channels, height, width = shape
    made = (81 * channels, height // 4, width // 4)
    head = nn.Sequential(
        nn.Conv2d(made[0], 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * -(-made[1] // 2) * -(-made[2] // 2), classes),
    )
    return OnFeatures(scattered(shape), head, made)


def probe(
    module: nn.Module, name: str, shape: tuple[int, ...], head: Callable[[tuple[int, ...]], Any]
) -> OnFeatures:
    """`head`, made for a shape, on the flat outputs of `module`, frozen and in evaluation mode.

    The outputs of each row are brought to mean 0 and variance 1, so that settings do not hang on
    their scale. `name` is for messages.
    """
    module = module.eval().requires_grad_(False)
    tokens = getattr(module, "token_ids", None)
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ConfigError(
            f"features {name!r} have the attribute token_ids = {tokens!r}: give the size of the "
            "vocabulary, a whole number, or rename the attribute."
        )
    with _refused(name, f"two inputs of shape {shape} that are zero"):
        out = module(torch.zeros(2, *shape))
    if not isinstance(out, Tensor) or out.dtype != torch.float32 or len(out) != 2 or out.ndim < 2:
        got = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(
            f"features {name!r} returned {got} for two inputs: return a float32 tensor with a row "
            "for each, such as output.last_hidden_state[:, 0] of a transformers model."
        )
    width = out[0].numel()
    parts = [module, nn.Flatten(), nn.LayerNorm(width, elementwise_affine=False)]
    made: tuple[int, ...] = (width,)
    if made == shape:  # features must not be taken for inputs
        made = (1, width)
        parts.append(nn.Unflatten(1, made))
    return OnFeatures(nn.Sequential(*parts), head(made), made, tokens)


@contextmanager
def _refused(name: str, inputs: str) -> Iterator[None]:
    """Without gradients; what a module of somebody's own raises is answered in one line."""
    try:
        with torch.no_grad():
            yield
    except Exception as error:  # the module may do anything
        why = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"features {name!r} raised {type(error).__name__} for {inputs}: {why}. Inputs are "
            "float32; a module of tokens says how many there are by an attribute token_ids."
        ) from error


class _AsTokens(nn.Module):
    """Tokens of any numbers, each of its own number alone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Whole numbers from 0 to count - 1."""
        return (1000 * x).round().remainder(self.count)


def check_rows(model: OnFeatures, name: str, shape: tuple[int, ...]) -> None:
    """Refuse features of a row that depend on other rows, or on chance.

    The self-check of gradients runs on the features with a trainable layer behind them, on
    synthetic rows, and follows the rows through the module as well. Rows are random numbers, or
    random tokens of the vocabulary that the module declares: nothing is read off the records.
    """
    from vestige.gradients import Capture
    from vestige.gradients.clipping import Clip
    from vestige.gradients.groups import partition
    from vestige.gradients.self_check import self_check

    width = torch.Size(model.shape).numel()
    kind = nn.Identity() if model.tokens is None else _AsTokens(model.tokens)
    features = nn.Sequential(kind, model.features)
    whole = nn.Sequential(features, nn.Flatten(), nn.Linear(width, 1))
    device = next((t.device for t in model.head.parameters()), None)
    groups = partition(whole.to(device), "flat")
    seeded = torch.Generator().manual_seed(0)
    many = torch.randn(_ROWS_AT_ONCE, *shape, generator=seeded).to(device)
    rows = many[:_TOGETHER]
    what = "numbers" if model.tokens is None else f"tokens below {model.tokens}"
    with _refused(name, f"random {what} of shape {shape}"):
        # As many rows as records will be, and few: other kernels, same features.
        once = features(many)
        again = torch.cat([features(part) for part in many.split(_TOGETHER)])
    close = 1e-3 * float(once.nan_to_num(0.0).abs().max())
    repeats = torch.allclose(once, again, rtol=0, atol=close, equal_nan=True)
    capture = Capture(whole, groups, Clip.over(1.0, groups.names))
    capture.attach()
    try:
        why = self_check(capture, (rows,), {}, 0)
    except VestigeError as error:
        raise ConfigError(
            f"the features {name!r} of a record are not its own: {error} A frozen module must be "
            "row-wise in evaluation mode."
        ) from error
    finally:
        capture.detach()
    if why is None and not repeats:
        why = "the same rows have other features in other company, or each time (dropout?)"
    if why is not None:
        raise ConfigError(
            f"that the features {name!r} of a record are its own could not be shown: {why}. Give a "
            "module that is row-wise in evaluation mode."
        )


def with_features(
    dataset: Dataset,
    model: nn.Module,
    device: str,
    tell: Callable[[float], None],
    cache: Path | None = None,
) -> Dataset:
    """The dataset with the features that a model learns from; unchanged for any other model.

    `tell` hears the share that is done. Features that are there already are taken for the model's.
    `cache` is a private file that they are kept in, and taken from where they fit.
    """
    if not isinstance(model, OnFeatures) or dataset.features is not None:
        return dataset
    splits = dataset.x_train, dataset.x_test
    made = None if cache is None else _cached(cache, dataset, model, device)
    if made is None:
        made = [torch.empty(len(inputs), *model.shape, device=device) for inputs in splits]
        done, total = 0, sum(map(len, splits))
        for inputs, out in zip(splits, made, strict=True):
            for start in range(0, len(inputs), _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                out[rows] = _of_records(model, inputs[rows].to(device))
                done += len(inputs[rows])
                tell(done / total)
        if cache is not None:
            _keep(cache, dataset, made)
    if not all(bool(part.isfinite().all()) for part in made):
        raise ConfigError(
            "the features of a record hold NaN or infinity: give a module that is finite for every "
            "input, for example one that clips them."
        )
    return replace(dataset, features=(made[0], made[1]))


def _of_records(model: OnFeatures, inputs: Tensor) -> Tensor:
    """The features of records; refusals repeat nothing that may hold a record's values."""
    if model.tokens is not None:  # a GPU answers a wrong one by giving up the whole process
        whole = (inputs >= 0) & (inputs < model.tokens) & (inputs == inputs.floor())
        if not bool(whole.all()):
            raise ConfigError(
                f"the features take whole numbers from 0 to {model.tokens - 1} (token_ids), and a "
                "record has others: mend the records, or token_ids."
            )
    try:
        with torch.no_grad():
            made: Tensor = model.features(inputs)
    except Exception as error:  # a module of somebody's own may do anything
        raise ConfigError(
            f"the frozen features raised {type(error).__name__} for a record, after they had taken "
            "random inputs: give a module that takes every input."
        ) from error
    return made


def _digest(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    for inputs in (dataset.x_train, dataset.x_test):
        digest.update(f"{tuple(inputs.shape)}".encode())
        digest.update(inputs.contiguous().numpy().data)
    return digest.hexdigest()


def _cached(path: Path, dataset: Dataset, model: OnFeatures, device: str) -> list[Tensor] | None:
    """The features in a file, where they are of these inputs and of this module."""
    try:
        held = torch.load(path, map_location=device, weights_only=True)
        if held["inputs"] != _digest(dataset):
            return None
        splits = zip((dataset.x_train, dataset.x_test), held["features"], strict=True)
        for inputs, features in splits:
            if features.shape != (len(inputs), *model.shape):
                return None
            again = _of_records(model, inputs[:_COMPARED].to(device))
            if not torch.allclose(again, features[:_COMPARED], rtol=1e-4, atol=1e-5):
                return None
        return list(held["features"])
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises a dozen kinds on damaged bytes
        raise ConfigError(
            f"the features in {str(path)!r} cannot be read ({type(error).__name__}): remove it."
        ) from error


def _keep(path: Path, dataset: Dataset, features: list[Tensor]) -> None:
    """Write features for the owner's eyes: they are as private as the records."""
    buffer = io.BytesIO()
    torch.save({"inputs": _digest(dataset), "features": [part.cpu() for part in features]}, buffer)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, buffer.getvalue(), mode=0o600)
    except OSError as error:
        raise StorageError(
            f"{str(path)!r} cannot be written ({error.strerror}): give another folder as "
            "feature_cache, or leave it out."
        ) from error
