"""What `vestige spectrum` shows: the power-law fit of every layer, as a table and as a plot.

Torch and matplotlib are imported inside the functions, so that a wrong argument is answered at
once. Guarantee: like the exponents, a function of the weights alone, without privacy cost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from vestige.audit.plot_files import check_plot, write_plot
from vestige.errors import ConfigError
from vestige.lab import wording
from vestige.lab.plots import Panel, figure_of, look, styled
from vestige.memory import spectrum
from vestige.memory.spectrum import ESTIMATORS, INTERVAL, Fit
from vestige.privacy.options import File, Options
from vestige.statement.table import Table
from vestige.train.config import MODELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

DEFAULT_TAIL = 0.5
IMAGE_SHAPE, CLASSES = (3, 32, 32), 10
"""A built-in model is made for CIFAR-10."""

_RANGE = f"[{INTERVAL[0]:g}, {INTERVAL[1]:g}]"
_WEIGHTS = "model.pt"  # in a run folder
# Where training scripts keep the state_dict in a checkpoint that holds more than that.
_KEYS = ("model", "model_state_dict", "state_dict", "module", "net", "weights")
_WIDTH, _HEIGHT = 260, 200  # of a panel, in points


class Request(Options):
    """What is to be examined. Raises ConfigError for a bad value, before anything is loaded."""

    target: str = Field(
        description="A run folder, a checkpoint file (a state_dict, or a dict that holds one), or "
        f"a built-in model with random weights, made for CIFAR-10: {', '.join(MODELS)}."
    )
    estimator: str = Field(
        default=ESTIMATORS[0],
        description=f"{', '.join(ESTIMATORS)}: a fixed tail of the eigenvalues, the tail that fits "
        "best, or what weightwatcher 0.7.7 computes.",
    )
    tail: float | None = Field(
        default=None,
        description="The share of the eigenvalues that hill fits, (0, 1]. "
        f"Default: {DEFAULT_TAIL}.",
    )
    plot: File | None = Field(
        default=None,
        description="Where to plot the fits (.png, .pdf, .svg). Default: spectrum.png, in the run "
        "folder if TARGET is one, else in the current folder; with --json no plot.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of a built-in model's weights. Default: 0.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Request:
        spectrum.check(self.estimator, self.chosen_tail)
        if self.tail is not None and self.estimator != "hill":
            raise ConfigError(
                f"tail {self.tail:g} is given for the estimator {self.estimator!r}, which finds "
                "the tail itself: leave it out, or use hill."
            )
        if self.checkpoint is not None:
            self._check_checkpoint(self.checkpoint)
        if self.plot is not None:
            check_plot(self.plot)
        return self

    def _check_checkpoint(self, path: Path) -> None:
        folder = Path(self.target)
        if folder.is_dir() and not path.is_file():
            raise ConfigError(
                f"target {self.target!r} is a folder without {_WEIGHTS}: give a run folder of "
                "vestige train, or a checkpoint file."
            )
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(
                f"target {self.target!r} is neither a built-in model ({', '.join(MODELS)}) nor a "
                "run folder or a checkpoint that can be read: check the name or the path."
            )
        if self.seed is not None:
            raise ConfigError(
                f"seed {self.seed} is given for the checkpoint {self.target!r}, whose weights are "
                "not random: leave it out, or give a built-in model."
            )

    @property
    def chosen_tail(self) -> float:
        """The share of the eigenvalues that "hill" takes."""
        return DEFAULT_TAIL if self.tail is None else self.tail

    @property
    def checkpoint(self) -> Path | None:
        """The file with the weights; None for a built-in model."""
        if self.target in MODELS:
            return None
        path = Path(self.target)
        return path / _WEIGHTS if path.is_dir() else path

    @property
    def chosen_plot(self) -> Path:
        """The plot's file: by default spectrum.png, in the run folder if the target is one."""
        if self.plot is not None:
            return self.plot
        folder = Path(self.target)
        here = self.checkpoint is None or not folder.is_dir()
        return Path("spectrum.png") if here else folder / "spectrum.png"


@dataclass(frozen=True)
class Layer:
    """One weight; `fit` is None where it has no exponent."""

    name: str
    shape: tuple[int, ...]
    fit: Fit | None

    @property
    def exponent(self) -> float | None:
        """The exponent, if the weight has one."""
        return None if self.fit is None else self.fit.exponent

    @property
    def place(self) -> str | None:
        """Where the exponent lies: inside, below or above the interval."""
        if self.exponent is None:
            return None
        low, high = INTERVAL
        return "below" if self.exponent < low else "above" if self.exponent > high else "inside"

    @property
    def tempering(self) -> float:
        """1 - exp(-d) at the distance d from the interval; 0 without an exponent."""
        return spectrum.tempering(self.exponent)

    def as_dict(self) -> dict[str, Any]:
        """The layer as plain JSON types."""
        figures = {
            n: self.fit and getattr(self.fit, n) for n in ("tail_size", "xmin", "ks_distance")
        }
        return {
            "name": self.name,
            "shape": list(self.shape),
            "eigenvalues": self.fit and len(self.fit.eigenvalues),
            **figures,
            "exponent": self.exponent,
            "place": self.place,
            "tempering": self.tempering,
        }


@dataclass(frozen=True)
class Report:
    """The fits of all layers."""

    request: Request
    layers: tuple[Layer, ...]

    @property
    def title(self) -> str:
        """What was estimated of what."""
        estimator = self.request.estimator
        if estimator == "hill":
            estimator += f", tail {self.request.chosen_tail:g}"
        return f"{self.request.target}: power-law exponents ({estimator})"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        hill = self.request.estimator == "hill"
        return {
            "target": self.request.target,
            "estimator": self.request.estimator,
            "tail": self.request.chosen_tail if hill else None,
            "seed": (self.request.seed or 0) if self.request.checkpoint is None else None,
            "interval": list(INTERVAL),
            "layers": [layer.as_dict() for layer in self.layers],
        }


def examine(request: Request) -> Report:
    """Load the weights and fit those of two or more dimensions."""
    layers = [
        Layer(name, tuple(w.shape), spectrum.fit(w, request.estimator, request.chosen_tail))
        for name, w in _weights(request).items()
    ]
    return Report(request, tuple(layers))


def layer_table(layers: Sequence[Layer], caption: str) -> Table:
    """One line for each layer."""
    lines = []
    for layer in layers:
        figures = [wording.NONE] * 5
        if layer.fit is not None:
            fit = layer.fit
            figures = [f"{len(fit.eigenvalues)}", f"{fit.tail_size}", f"{fit.xmin:.3g}"]
            figures += [f"{fit.ks_distance:.3f}", f"{fit.exponent:.3f}"]
        name, shape = layer.name.removesuffix(".weight"), "x".join(map(str, layer.shape))
        place = layer.place or wording.NONE
        lines.append([name, shape, *figures, place, f"{layer.tempering:.3f}"])
    headings = ["layer", "shape", "n", "tail", "xmin", "KS", "exponent", _RANGE, "tempering"]
    return Table(headings, lines, caption)


def panels(layers: Sequence[Layer]) -> list[Panel]:
    """One log-log panel for each layer: how many eigenvalues are at least x, and the fit."""
    return [
        Panel(
            layer.name.removesuffix(".weight")[-26:],
            "no exponent." if layer.fit is None else f"exponent {layer.fit.exponent:.2f}.",
            partial(_draw_layer, layer),
            _HEIGHT,
            _WIDTH,
        )
        for layer in layers
    ]


def draw(report: Report, path: Path) -> None:
    """Draw the panels of all layers into a file."""
    title = report.title if len(report.title) <= 80 else f"...{report.title[-77:]}"
    with styled():
        figure = figure_of(f"{title}\nbold: inside {_RANGE}", panels(report.layers))
        write_plot(figure, path)


def _draw_layer(layer: Layer, axes: Axes) -> None:
    import numpy as np
    from matplotlib.ticker import NullFormatter, NullLocator

    fit = layer.fit
    if fit is None:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no exponent", ha="center", va="center")
        return
    values, count = fit.eigenvalues, len(fit.eigenvalues)
    share = 1 - np.arange(count) / count
    start = count - fit.tail_size
    x = np.geomspace(fit.xmin, values[-1], 50)
    law = share[start] * (x / fit.xmin) ** (1 - fit.exponent)
    points = {"ls": "none", "marker": ".", "ms": 4}
    axes.loglog(values[:start], share[:start], **points, color="#b6bec9", label="eigenvalues")
    axes.loglog(values[start:], share[start:], **points, color=look(0)["color"], label="tail")
    axes.loglog(x, law, color=look(1)["color"], ls="-", marker="", label="fitted power law")
    # The bulk gets at most as much room as the tail: small eigenvalues can reach very far down.
    left = max(values[0], fit.xmin * (fit.xmin / values[-1]))
    margin = (values[-1] / left) ** 0.06
    axes.set_xlim(left / margin, values[-1] * margin)
    axes.set_ylim(max(0.2 / count, min(0.6 / count, 0.9 * law[-1])), 1.5)
    axes.set_xticks([fit.xmin, values[-1]], [f"{end:.2g}" for end in (fit.xmin, values[-1])])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="eigenvalue x", ylabel="share from x on")
    weight = "bold" if layer.place == "inside" else "normal"
    axes.set_title(f"{fit.exponent:.2f}", loc="right", weight=weight)


def _weights(request: Request) -> dict[str, Tensor]:
    import torch

    state: Any
    if request.checkpoint is None:
        from vestige.train import models

        state = models.build(request.target, IMAGE_SHAPE, CLASSES, request.seed or 0).state_dict()
    else:
        state = _load(request.checkpoint)
    found = {
        str(name): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.ndim >= 2
        and value.is_floating_point()
        and value.layout is torch.strided
    }
    if not found:
        raise ConfigError(
            f"target {request.target!r} holds no weight of two or more dimensions: give the "
            "checkpoint of a model with linear or convolution layers."
        )
    return found


def _load(path: Path) -> Mapping[Any, Any]:
    """The state_dict in a file."""
    import torch

    try:
        with path.open("rb") as file:
            file.read(1)  # what cannot be read is another error than what cannot be understood
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # whatever the bytes lead the unpickler to
        raise ConfigError(
            f"checkpoint {str(path)!r} is not a file of tensors alone ({type(error).__name__}): "
            "write it with torch.save(model.state_dict(), file)."
        ) from error
    inner = loaded
    if isinstance(loaded, Mapping) and not any(
        isinstance(v, torch.Tensor) for v in loaded.values()
    ):
        inner = next((loaded[key] for key in _KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"checkpoint {str(path)!r} holds a {type(inner).__name__}, not a state_dict: write it "
            "with torch.save(model.state_dict(), file)."
        )
    return inner
