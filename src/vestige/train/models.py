"""The models of the papers: linear, mlp, cnn, resnet18; recipes/ has the others.

None of them couples the examples of a batch (no BatchNorm), so that each example has a gradient of
its own, and none works in place, which would take away the inputs that the gradient rules keep.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.checks import is_whole
from vestige.engine.validation import check_model
from vestige.errors import ConfigError, UnsupportedModel
from vestige.train.recipes.features import (
    OnFeatures,
    probe,
    scatter,
    scatter_cnn,
    scatter_mirror,
    scattered,
)
from vestige.train.recipes.least_squares import LeastSquares
from vestige.train.recipes.prior import Prior
from vestige.train.recipes.wide_resnet import wide_resnet


def build(
    name: str, input_shape: Sequence[int], classes: int, seed: int | None = None
) -> nn.Module:
    """A fresh model of that name, on the CPU, for examples of ``input_shape`` (without the batch).

    A name of the form MODULE:factory is somebody's own, looked for in the current folder first:
    ``factory(input_shape, classes)`` returns a module with that many outputs.

    With a ``seed`` the initial weights depend on nothing else, and the global random state is left
    as it was. The seed is harmless to publish: the initial weights know nothing of the data.
    """
    if name not in _BUILDERS and not is_factory(name):
        raise ConfigError(
            f"Unknown model {name!r}; choose one of {', '.join(MODELS)}, or name a MODULE:factory "
            "of your own."
        )
    shape = tuple(input_shape)
    if not shape or not all(is_whole(n) and n >= 1 for n in shape):
        raise ConfigError(f"input_shape is {shape}; it must be whole numbers of at least 1.")
    if not is_whole(classes) or classes < 1:
        raise ConfigError(f"classes is {classes!r}; it must be a whole number of at least 1.")
    if seed is not None and not (is_whole(seed) and 0 <= seed < 2**63):
        raise ConfigError(f"seed is {seed!r}; it must be a whole number from 0 to 2^63 - 1.")
    if name in _IMAGE_MODELS:
        _check_image(name, shape)
    builder = _BUILDERS.get(name) or _factory(name)
    if name in _BUILDERS:
        _check_size(name, shape, classes)

    # On the CPU whatever the default device, so that a seed means the same weights everywhere.
    with _seeded(seed):
        return builder(shape, classes)


def on_features(
    features: str, head: str, input_shape: Sequence[int], classes: int, seed: int | None = None
) -> OnFeatures:
    """The model `head` on frozen features: scatter, prior, or a MODULE:factory of one's own.

    ``factory(input_shape)`` returns a module that makes of each input a row of float32 features.
    """
    shape = tuple(input_shape)
    with _seeded(seed):
        if is_factory(features):
            module = _factory(features, "features")(shape)
        else:
            _check_image(features, shape)
            module = scattered(shape) if features == "scatter" else _prior(shape)
    return probe(module, features, shape, lambda made: build(head, made, classes, seed))


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    with torch.device("cpu"):
        if seed is None:
            yield
            return
        # torch.manual_seed would reseed the accelerators too, and devices=[] does not restore them.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield


def _prior(shape: tuple[int, ...]) -> nn.Module:
    """The features prior, with weights that are still random."""
    if shape[0] not in (1, 3):
        raise ConfigError(f"the features prior are for grey or RGB images, and these are {shape}.")
    return Prior()


def is_factory(name: str) -> bool:
    """Whether a name is that of somebody's own factory, MODULE:factory."""
    return ":" in name


def _factory(name: str, what: str = "model") -> Callable[..., nn.Module]:
    """Somebody's own factory, whose errors and whose result are answered in one line."""
    from vestige.audit.verify.loading import attribute, one_line

    factory = attribute(*name.split(":", 1))

    def build(shape: tuple[int, ...], *outputs: int) -> nn.Module:
        try:
            made = factory(shape, *outputs)
        except Exception as error:
            told = "".join(f", and the number of outputs, {count}" for count in outputs)
            raise ConfigError(
                f"{what} {name!r} raised {type(error).__name__}: {one_line(error)}; it is called "
                f"with the shape of an input, {shape}{told}."
            ) from error
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"{what} {name!r} returned a {type(made).__name__}: return a torch.nn.Module."
            )
        if what == "model":
            _check_own(name, made)
        return made

    return build


def _check_own(name: str, made: nn.Module) -> None:
    """Refuse somebody's own model where examples meet, with what its factory is to return."""
    try:
        check_model(made)
    except UnsupportedModel as error:
        why, _, remedy = str(error).partition(": ")
        if "vestige.fix(model)" in remedy:
            remedy = "let the factory return vestige.fix(net) in place of net."
        raise UnsupportedModel(f"model {name!r}: {why}: {remedy}") from error


def _check_size(name: str, shape: tuple[int, ...], classes: int) -> None:
    count = max(math.prod(shape), classes)  # torch itself stumbles over sizes beyond 2^63
    if count <= _MOST_PARAMETERS:
        with torch.device("meta"):  # shapes without numbers
            count = sum(p.numel() for p in _BUILDERS[name](shape, classes).parameters())
    if count > _MOST_PARAMETERS:
        raise ConfigError(
            f"The model {name} for examples of shape {shape} and {classes} classes would have "
            f"{count} parameters or more; at most {_MOST_PARAMETERS} are built here."
        )


def _check_image(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ConfigError(
            f"{name} needs images of shape (channels, height, width), but an example has the shape "
            f"{shape}; reshape x, or use the model mlp or linear."
        )
    channels, height, width = shape
    # Float images are taken as they come, and channels-last ones would train without an error.
    if channels > 4 and width in (1, 3) and height != width:
        raise ConfigError(
            f"An example has the shape {shape}, which looks like (height, width, channels), but "
            f"{name} needs (channels, height, width); convert with x.transpose(0, 3, 1, 2)."
        )


def _named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return _named(flatten=nn.Flatten(), out=nn.Linear(math.prod(shape), classes))


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The FO paper's network: in-64-32-classes with tanh (arXiv 2605.09890)."""
    return _named(
        flatten=nn.Flatten(),
        hidden1=nn.Linear(math.prod(shape), 64),
        tanh1=nn.Tanh(),
        hidden2=nn.Linear(64, 32),
        tanh2=nn.Tanh(),
        out=nn.Linear(32, classes),
    )


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Six convolutions and two linear layers with tanh, 550,570 parameters on CIFAR-10.

    The end-to-end CNN of Tramer and Boneh (arXiv 2011.11660), after Papernot et al., Tempered
    Sigmoid Activations for Deep Learning with Differential Privacy (arXiv 2007.14191).
    """
    channels, height, width = shape
    layers: dict[str, nn.Module] = {}
    sizes = (channels, 32, 32, 64, 64, 128, 128)
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        layers[f"tanh{i}"] = nn.Tanh()
        if i % 2 == 0:
            # Rounding up leaves at least one pixel of the smallest image.
            layers[f"pool{i // 2}"] = nn.MaxPool2d(2, ceil_mode=True)
    layers["flatten"] = nn.Flatten()
    layers["hidden"] = nn.Linear(128 * math.ceil(height / 8) * math.ceil(width / 8), 128)
    layers["tanh7"] = nn.Tanh()
    layers["out"] = nn.Linear(128, classes)
    return _named(**layers)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a shortcut, as in He et al. (arXiv 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = _named(conv=conv, norm=_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of feature maps."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: 3x3 stem, no first pooling, GroupNorm in place of BatchNorm.

    11,173,962 parameters for CIFAR-10.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.norm = _norm(64)
        blocks = []
        for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
            blocks += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores for a batch of images."""
        features: Tensor = self.blocks(F.relu(self.norm(self.conv(x))))
        scores: Tensor = self.out(features.mean(dim=(2, 3)))
        return scores


_BUILDERS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet18": lambda shape, classes: ResNet18(shape[0], classes),
    "wrn": wide_resnet,
    "scatter": scatter,
    "scatter-mirror": scatter_mirror,
    "scatter-cnn": scatter_cnn,
    "least-squares": lambda shape, classes: LeastSquares(math.prod(shape), classes),
}
_IMAGE_MODELS = ("cnn", "resnet18", "wrn", "scatter", "scatter-mirror", "scatter-cnn")

# With sum, noise and gradient, 16 GiB: more is a mistake in the data sooner than a wish.
_MOST_PARAMETERS = 2**30

MODELS = tuple(_BUILDERS)
"""The names that ``build`` knows."""
