"""The settings of a run as `make_private` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige import methods
from vestige.errors import ConfigError
from vestige.train.checks import LEAST_SQUARES
from vestige.train.config import TrainConfig

if TYPE_CHECKING:
    from vestige.train.data import Dataset

ROWS_AT_ONCE = {"linear": 4096, "mlp": 4096, "cnn": 1024, "scatter": 4096}
ROWS_AT_ONCE |= {
    "resnet18": 128,
    "wrn": 128,
    "scatter-cnn": 1024,
    "scatter-mirror": 4096,
    "least-squares": 64,
}
_ROWS_OF_OWN = 256  # of a model that is somebody's own
_DIGITS = ("digits", "mnist", "svhn")  # a mirrored one is another sign, or none


def noise_form(
    config: TrainConfig, noise: float, groups: tuple[str, ...], dataset: Dataset
) -> dict[str, Any]:
    """Noise and clip as the engine takes them: jointly, or the papers' sigma_g C_g by group.

    For least squares the clip is that of rows, and the moments' bound follows from it.
    """
    if config.chosen_model == LEAST_SQUARES:
        from vestige.train.recipes.least_squares import sensitivity, target_bound

        assert isinstance(config.clip, float)
        return {
            "noise_multiplier": noise,
            "max_grad_norm": sensitivity(config.clip, target_bound(dataset)),
        }
    if config.group_noise_multiplier is None:
        return {"noise_multiplier": noise, "max_grad_norm": config.clip}
    whole = config.clip if isinstance(config.clip, tuple) else (config.clip,) * len(groups)
    own = (config.group_noise_multiplier,) * len(groups)
    return {"group_noise_multipliers": own, "max_grad_norm": whole}


def unit(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """The rows of a privacy unit as the engine takes them: views of an image, or a user's."""
    options: dict[str, Any] = {}
    if dataset.units is not None:
        options = {"units": dataset.units, "rows_per_unit": config.rows_per_unit}
    if config.views is not None:
        if dataset.features is not None:
            raise ConfigError(
                f"views {config.views} with features that are computed once: leave views out."
            )
        augment = augmentation(config.dataset, dataset, config.mix_views)
        options |= {"views": config.views, "augment": augment}
    return options


def augmentation(name: str, dataset: Dataset, mix: bool = False) -> Any:
    """What makes views of images: moved by an eighth, and mirrored, but for digits."""
    from vestige.sampling.collate import FlipAndCrop

    if len(dataset.input_shape) != 3:
        raise ConfigError(
            f"views are for images, and {Path(name).name} holds inputs of shape "
            f"{dataset.input_shape}: leave views out."
        )
    moves = max(1, min(dataset.input_shape[1:]) // 8)
    return FlipAndCrop(moves, flip=name not in _DIGITS, mix=mix)


def physical_rows(config: TrainConfig) -> int | None:
    """The rows that a model runs on at once; None where a method needs the lot in one piece."""
    looks = methods.resolve(config.method, config.settings).looks
    of_unit = (config.views or 1) * (config.rows_per_unit or 1)
    return max(rows_at_once(config), of_unit) if looks == 1 else None


def rows_at_once(config: TrainConfig) -> int:
    """The rows that go through a model at once: memory must not grow with the lot."""
    return ROWS_AT_ONCE.get(config.chosen_model, _ROWS_OF_OWN)
