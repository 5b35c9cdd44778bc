"""Numbers of the whole batch that the loop makes without a gradient, and puts beside outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine, PrivacyError
from vestige.gradients.loop_constants import LoopConstants

N, WIDTH, CLASSES, BOUND = 33, 6, 4, 0.3
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def rows(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y, reduction="none")


def accuracy(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (m(x).argmax(1) == y).float().mean()


def counts(y: Tensor) -> Tensor:
    return torch.bincount(y, minlength=CLASSES) + 1.0


def centred(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    return (out - out.detach().mean(0)).square().sum(1).mean()


def beside(change: Callable[[Tensor], Tensor]) -> Loss:
    """A loss of rows, and what follows from all of them without a gradient."""
    return lambda m, x, y: (lambda loss: (loss * change(loss.detach())).mean())(rows(m, x, y))


def queue(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    with torch.no_grad():
        keys = m(x + 0.1)
    return torch.logsumexp(out @ keys[:8].T, 1).mean()


REFUSED: dict[str, Loss] = {
    "a baseline": beside(lambda v: v - v.mean()),
    "a scale": beside(lambda v: v / v.std()),
    "weights that are normalised": beside(lambda v: v / v.sum()),
    "a threshold": beside(lambda v: (v > v.mean()).float()),
    "the hardest alone": beside(lambda v: (v >= v.max()).float()),
    "clipped at the mean": lambda m, x, y: (lambda v: torch.minimum(v, v.detach().mean()).mean())(
        rows(m, x, y)
    ),
    "where beyond the mean": lambda m, x, y: (
        lambda v: torch.where(v.detach() > v.detach().mean(), v, 0 * v).mean()
    )(rows(m, x, y)),
    "a centre": centred,
    "keys of other rows": queue,
    "logits adjusted by the lot's classes": lambda m, x, y: F.cross_entropy(
        m(x) + counts(y).log(), y
    ),
    "classes balanced in the lot": lambda m, x, y: (rows(m, x, y) / counts(y)[y]).mean(),
    "labels of others": lambda m, x, y: F.cross_entropy(m(x), y.flip(0)),
    "rows of others": lambda m, x, y: (rows(m, x, y) + rows(m, x.roll(1, 0), y.roll(1))).mean(),
}

ACCEPTED: dict[str, Loss] = {
    "focal": lambda m, x, y: (lambda v: ((1 - torch.exp(-v.detach())) ** 2 * v).mean())(
        rows(m, x, y)
    ),
    "targets of their own": lambda m, x, y: (
        lambda out: -(out.detach().softmax(1) * out.log_softmax(1)).sum(1).mean()
    )(m(x)),
    "one-hot labels": lambda m, x, y: F.mse_loss(m(x), F.one_hot(y, CLASSES).float()),
    "labels looked up": lambda m, x, y: F.mse_loss(m(x), torch.eye(CLASSES)[y]),
    "scores of the labels": lambda m, x, y: -m(x).log_softmax(1)[torch.arange(len(y)), y].mean(),
    "gathered": lambda m, x, y: -m(x).log_softmax(1).gather(1, y[:, None]).mean(),
    "consistency": lambda m, x, y: F.mse_loss(m(x), m(x.flip(1)).detach()),
    "what is only looked at": lambda m, x, y: (
        lambda out: (F.cross_entropy(out, y), (out.argmax(1) == y).float().mean())[0]
    )(m(x)),
}


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0])


def weighted(weight: Callable[[Tensor], Tensor], after: Any = torch.sigmoid) -> Loss:
    """A binary loss, of scores or of probabilities."""
    loss = F.binary_cross_entropy if after else F.binary_cross_entropy_with_logits

    def run(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)[:, 0]
        return loss(after(out) if after else out, y.float(), weight=weight(y))

    return run


def in_inference_mode(change: Callable[[Tensor], Tensor]) -> Loss:
    """A target that is made of an output where tensors count no changes."""

    def run(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)
        with torch.inference_mode():
            target = change(out)
        return F.mse_loss(out, target.clone())

    return run


def halved_with_others(out: Tensor) -> Tensor:
    target = out * 0.5
    return target.add_(target.mean(0))


REFUSED |= {
    "a mean in inference mode": in_inference_mode(lambda out: out.mean(0).expand(len(out), -1)),
    "a mean added in place in inference mode": in_inference_mode(halved_with_others),
    "weights that are normalised, of a binary loss": weighted(
        lambda y: (y + 1.0) / (y + 1.0).sum()
    ),
    "a mean by the weights of all": lambda m, x, y: F.mse_loss(m(x)[:, 0], 1.0 * y, weight=y + 1.0),
    "rows one below the other": lambda m, x, y: (
        lambda v: (v * torch.vstack(list(v.detach())).mean()).mean()
    )(rows(m, x, y)),
}
ACCEPTED |= {
    "targets made in inference mode": in_inference_mode(lambda out: out.softmax(1).mul_(2)),
    "accuracy in inference mode": lambda m, x, y: (
        lambda out: (F.cross_entropy(out, y), torch.inference_mode()(accuracy)(m, x, y))[0]
    )(m(x)),
    "classes' weights, by gather": lambda m, x, y: (rows(m, x, y) * WEIGHTS.gather(0, y)).mean(),
    "classes' weights, by take": lambda m, x, y: (rows(m, x, y) * WEIGHTS.take(y)).mean(),
    "weights of a binary loss": weighted(lambda y: WEIGHTS[y]),
    "weights of a binary loss of scores": weighted(lambda y: WEIGHTS[y], None),
    "positives' weight in each row": lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x), F.one_hot(y, CLASSES).float(), pos_weight=WEIGHTS[y][:, None]
    ),
    "rows one below the other": lambda m, x, y: F.mse_loss(
        m(x), torch.vstack([row[:CLASSES] for row in x])
    ),
}


def clipped_sum(loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N - 1),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        sample_rate=1.0,
        dataset_size=N - 1,
    )
    for batch in loader:
        loss(model, *batch).backward()
        optimizer.step()
        break
    return torch.cat([p.grad.flatten() for p in model.parameters()]) * (N - 1)


def data() -> Any:
    """One loud record, and many that are alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, WIDTH, generator=generator) + 0.01 * torch.randn(
        N, WIDTH, generator=generator
    )
    x[0] *= 1e4
    return x, torch.arange(N).clamp(max=1)


def ratio(loss: Loss) -> float:
    """How far one record moves the sum, in clip bounds."""
    x, y = data()
    apart = clipped_sum(loss, x, y) - clipped_sum(loss, x[1:], y[1:])
    return float(apart.norm()) / BOUND


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_of_the_whole_batch_are_refused(name):
    with pytest.raises(PrivacyError, match=r"examples meet in the loss|rows of the batch"):
        ratio(REFUSED[name])


@pytest.mark.parametrize("name", ["a baseline", "clipped at the mean", "keys of other rows"])
def test_one_record_would_move_all_others(name, monkeypatch):
    monkeypatch.setattr(LoopConstants, "check", lambda self, nodes: None)
    assert ratio(REFUSED[name]) > 2


@pytest.mark.parametrize("name", ACCEPTED)
def test_numbers_of_rows_are_accepted(name):
    assert ratio(ACCEPTED[name]) <= 1 + 1e-5
