"""Least squares in closed form, from one release of second moments.

A row x (a record's inputs or features, and a constant 1) is clipped to |x| <= B, its target t to
|t| <= Y. What a record adds to the released vector is

    s(x, t) = (x_i x_i,  sqrt(2) x_i x_j for i < j,  x_i t_k)

the upper triangle of x x^T, with what stands off the diagonal weighted by sqrt(2), and x t^T. Then

    |s|^2 = sum_i x_i^4 + 2 sum_(i<j) x_i^2 x_j^2 + |x|^2 |t|^2 = |x|^4 + |x|^2 |t|^2
         <= B^4 + B^2 Y^2

so one record more or less moves the sum by at most sqrt(B^4 + B^2 Y^2), with equality at the
bounds: without the weight the triangle would be as far as a row along an axis moves it, and
off-diagonal entries would have twice the variance that this bound pays for. Noise is drawn once for
every entry of the triangle: the matrix is symmetric, and its noise has half of the diagonal's
variance off the diagonal.

The vector is released like any other sum. It is the gradient of a model that is linear in it: the
loss of a record is -<s(x, t), m>, so that a step of gradient descent at rate 1 with the whole data
as its lot leaves m = (sum of s + noise) / records. Engine, ledger and door know nothing else of it,
and clip s to the bound once more.

Guarantee: one Gaussian release at sampling rate 1 (Analyze Gauss, Dwork et al. 2014; least squares
from noisy moments, Wang, arXiv 1803.02596). B, Y, the ridge and class weights are public. Solving,
with the repair of the spectrum, is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.errors import ConfigError
from vestige.train import tasks
from vestige.train.dataset import Dataset

_MOST_INPUTS = 2000  # their triangle has two million entries
_SHARE_OF_NOISE = 0.5  # the ridge beside the largest eigenvalue of the noise


class LeastSquares(nn.Module):
    """A linear model whose moments are released and whose weights follow from them.

    In training mode it returns what `moment_losses` takes; in evaluation mode scores. `bound` is B
    and `ridge` what is added to the mean of x x^T: both are public, and saved with the model.
    """

    bound: Tensor
    ridge: Tensor
    pairs: Tensor

    def __init__(self, inputs: int, outputs: int, bound: float = 1.0, ridge: float = 1e-6) -> None:
        super().__init__()
        if inputs > _MOST_INPUTS:
            raise ConfigError(
                f"least squares of {inputs} inputs would release {inputs * inputs // 2} moments: "
                f"give at most {_MOST_INPUTS} inputs or features, or the model linear."
            )
        width = inputs + 1
        self.register_buffer("pairs", torch.triu_indices(width, width), persistent=False)
        self.register_buffer("bound", torch.tensor(float(bound), dtype=torch.float64))
        self.register_buffer("ridge", torch.tensor(float(ridge), dtype=torch.float64))
        self.triangle = nn.Linear(self.pairs.shape[1], 1, bias=False)
        self.cross = nn.Linear(width, outputs, bias=False)
        nn.init.zeros_(self.triangle.weight)
        nn.init.zeros_(self.cross.weight)
        self.solution, self._solved = torch.zeros(outputs, width), [-1, -1, -1]

    def rows(self, x: Tensor) -> Tensor:
        """Inputs with a constant 1, clipped to the bound."""
        whole = F.pad(x.flatten(1), (0, 1), value=1.0).double()
        factors = (self.bound / whole.norm(dim=1, keepdim=True)).clamp(max=1.0)
        clipped: Tensor = (whole * factors).to(x.dtype)
        return clipped

    def upper(self, x: Tensor) -> Tensor:
        """The upper triangle of x x^T for each row, sqrt(2) x_i x_j off the diagonal."""
        first, second = self.pairs
        return x[:, first] * x[:, second] * _weights(self.pairs).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Scores; in training mode <x t_k, m> for each output k and <x x^T, m>."""
        x = self.rows(x)
        if not self.training:
            return F.linear(x, self.solution.to(x))
        return torch.cat([self.cross(x), self.triangle(self.upper(x))], dim=1)

    def train(self, mode: bool = True) -> LeastSquares:
        """Leaving the training mode solves for the weights."""
        super().train(mode)
        held = (self.triangle.weight, self.cross.weight, self.ridge)
        if not mode and (now := [t._version for t in held]) != self._solved:
            self.solution, self._solved = self.solve().to(self.cross.weight), now
        return self

    def moments(self) -> tuple[Tensor, Tensor]:
        """The noisy means of x x^T and t x^T, in float64."""
        first, second = self.pairs
        entries = self.triangle.weight.detach()[0].double() / _weights(self.pairs)
        square = entries.new_zeros(2 * [self.cross.in_features])
        square[first, second] = entries
        square[second, first] = entries
        return square, self.cross.weight.detach().double()

    def solve(self) -> Tensor:
        """The weights; eigenvalues that noise has made negative count as zero."""
        square, cross = self.moments()
        values, vectors = torch.linalg.eigh(square)
        inverse = 1 / (values.clamp(min=0) + self.ridge)
        weights: Tensor = ((cross @ vectors) * inverse) @ vectors.T
        return weights


def _weights(pairs: Tensor) -> Tensor:
    """1 on the diagonal and sqrt(2) off it."""
    return torch.where(pairs[0] == pairs[1], 1.0, math.sqrt(2)).double()


def sensitivity(bound: float, target_bound: float) -> float:
    """How far one record moves the moments: sqrt(B^4 + B^2 Y^2)."""
    return bound * math.hypot(bound, target_bound)


def usual_ridge(inputs: int, std: float) -> float:
    """A ridge for noise of that standard deviation on the means: half its largest eigenvalue.

    The matrix of the noise has std on the diagonal and std / sqrt(2) off it, so its largest
    eigenvalue is about std sqrt(2 inputs). A function of public numbers.
    """
    return max(_SHARE_OF_NOISE * std * math.sqrt(2 * (inputs + 1)), 1e-6)


def declare(
    model: nn.Module, dataset: Dataset, bound: Any, ridge: float | None, noise: float
) -> None:
    """Set what the least squares in a model go by: public numbers, fixed before the release.

    `noise` is the noise multiplier over the number of records.
    """
    head = head_of(model)
    assert head is not None
    std = noise * sensitivity(bound, target_bound(dataset))
    inputs = head.cross.in_features - 1
    head.bound.fill_(bound)
    head.ridge.fill_(usual_ridge(inputs, std) if ridge is None else ridge)


def told(model: nn.Module, dataset: Dataset) -> str | None:
    """What a statement says is released, where a model is least squares."""
    head = head_of(model)
    if head is None:
        return None
    bound, of_targets = float(head.bound), target_bound(dataset)
    return (
        "the sums of x x^T (upper triangle, off the diagonal times sqrt(2)) and x t^T together, "
        f"|x| <= {bound:g}, |t| <= {of_targets:.4g}, one record moves them by at most "
        f"{sensitivity(bound, of_targets):.4g}"
    )


def target_bound(dataset: Dataset) -> float:
    """Y: the largest norm of a target, from public facts."""
    if dataset.task == "classification":
        return math.sqrt(1 - 1 / dataset.classes) if dataset.classes > 1 else 1.0
    return math.sqrt(dataset.classes)


def targets(dataset: Dataset, y: Tensor) -> Tensor:
    """What is fitted, clipped to the bound: the class less 1 / classes, -1 or 1 for a label."""
    if dataset.task == "classification":
        t = F.one_hot(y, dataset.classes).double() - (1 / dataset.classes)
    else:
        t = y.double() if dataset.task == "regression" else 2 * y.double() - 1
    factors = target_bound(dataset) / t.norm(dim=1, keepdim=True)
    clipped: Tensor = t * factors.clamp(max=1.0)
    return clipped


def losses_of(model: nn.Module) -> Callable[[Dataset, Tensor, Tensor], Tensor]:
    """The losses that a model is trained with: those of its moments, or of the task."""
    return tasks.losses if head_of(model) is None else moment_losses


def head_of(model: nn.Module) -> LeastSquares | None:
    """The least squares in a model, if there are any."""
    return next((part for part in model.modules() if isinstance(part, LeastSquares)), None)


def moment_losses(dataset: Dataset, scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each record: its gradient is -s(x, t), times the class's weight.

    Weights are divided by the largest, so that none takes a record beyond the bound.
    """
    of_targets = (scores[:, :-1] * targets(dataset, y).to(scores.dtype)).sum(1)
    losses = -(of_targets + scores[:, -1])
    if dataset.weights is None:
        return losses
    weights = losses.new_tensor(dataset.weights) / max(dataset.weights)
    return losses * weights[y]
