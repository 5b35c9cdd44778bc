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


def given(change: Callable[[Tensor], Tensor]) -> Loss:
    """The model is given something else than the loader's rows."""
    return lambda m, x, y: rows(m, change(x), y).mean()


def others(x: Tensor) -> Tensor:
    return torch.arange(len(x)).roll(1)


def cut(x: Tensor) -> Tensor:
    x[:, 1:3] = x[others(x), 1:3]
    return x


def cut_by_index(x: Tensor) -> Tensor:
    x = x.clone()
    some = torch.arange(3)
    x[some] = x[others(x)[some]]
    return x


def in_a_view(x: Tensor) -> Tensor:
    column = x[:, 0]
    column -= column.mean()
    return x


def assigned_at_once(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        q = torch.exp(m(x) / 10).T
        q /= q.sum()
        q /= q.sum(1, keepdim=True)
    return -(q.T * m(x).log_softmax(1)).sum(1).mean()


def hooked(hook: Callable[[Tensor], Any]) -> Loss:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)
        out.register_hook(hook)
        return F.cross_entropy(out, y)

    return loss


def on_a_node(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = rows(m, x, y)
    losses.grad_fn.next_functions[0][0].register_prehook(lambda gs: (gs[0] - gs[0].mean(0),))
    return losses.mean()


def prototypes(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    centres = torch.zeros(CLASSES, CLASSES).index_add(0, y, out.detach())
    return (out - centres[y] / 10).square().sum(1).mean()


def hardest(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = rows(m, x, y)
    return losses[losses.detach().topk(8).indices].sum() / 8


BEFORE: dict[str, Loss] = {
    "mixup": given(lambda x: 0.7 * x + 0.3 * x[others(x)]),
    "mixup row by row": given(
        lambda x: torch.stack([0.7 * x[i] + 0.3 * x[i - 1] for i in range(len(x))])
    ),
    "mixup of a list": given(lambda x: torch.stack([a + b for a, b in zip(x, x.flip(0))])),  # noqa: B905
    "mixup in place": given(lambda x: x.mul_(0.7).add_(0.3 * x.roll(1, 0))),
    "cutmix": given(cut),
    "cutmix of some rows": given(cut_by_index),
    "standardised": given(lambda x: (x - x.mean(0)) / x.std(0)),
    "standardised in a view": given(in_a_view),
    "by the largest": given(lambda x: x / x.max()),
    "by a quantile": given(lambda x: x / x.abs().quantile(0.9)),
    "in batch norm": given(lambda x: F.batch_norm(x, None, None, training=True)),
    "sorted columns": given(lambda x: x.sort(0).values),
    "one row for all": given(lambda x: x - x[0]),
    "without its labels in order": given(lambda x: x[x[:, 0].argsort()]),
    "assignments": assigned_at_once,
    "labels counted first": lambda m, x, y: (lambda n: (rows(m, x, y) / n[y]).mean())(
        counts(y.clone())
    ),
    "prototypes": prototypes,
    "a quantile as threshold": beside(lambda v: (v > v.quantile(0.5)).float()),
    "the hardest few": hardest,
    "a hook": hooked(lambda g: g / g.norm()),
    "a hook in place": hooked(lambda g: g.div_(g.norm())),
    "a hook on a node": on_a_node,
}


def flipped_some(x: Tensor) -> Tensor:
    some = x[:, 1] > 0
    x[some] = x[some].flip(-1)
    return x


def in_a_buffer(x: Tensor) -> Tensor:
    buffer = torch.zeros(len(x), WIDTH)
    for i in range(len(x)):
        buffer[i, :4] = x[i, :4] / x[i].norm()
    return buffer


def by_length(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = x[:, 0].sort(descending=True).indices
    return rows(m, x[order], y[order]).mean()


def of_lengths(x: Tensor) -> Tensor:
    lengths = (x > 0).sum(1)
    mask = torch.arange(lengths.max())[None] < lengths[:, None]
    return x * F.pad(mask.float(), (0, WIDTH - mask.shape[1]))


def masked_mean(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = y >= 0
    return (rows(m, x, y) * mask).sum() / mask.sum().clamp(min=1)


def evaluates(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        m.eval()(torch.randn(len(x), WIDTH)).std()
    m.train()
    return rows(m, x, y).mean()


ROW_BY_ROW: dict[str, Loss] = {
    "normalised": given(lambda x: (x - torch.zeros(WIDTH)) / 2),
    "flattened": given(lambda x: x.view(len(x), 2, -1).flatten(1).double().float()),
    "each by its own": given(lambda x: (x - x.mean(1, keepdim=True)) / x.norm(dim=1)[:, None]),
    "in part": given(lambda x: torch.where(x > 0, x, torch.zeros_like(x))),
    "padded": given(lambda x: F.pad(x[:, :4], (1, 1))),
    "some flipped": given(flipped_some),
    "put into a buffer": given(in_a_buffer),
    "stacked": given(lambda x: torch.stack([row.flip(0) for row in x])),
    "in parts": given(lambda x: torch.cat([part * 2 for part in x.chunk(3)])),
    "by numpy": given(lambda x: torch.from_numpy(x.numpy() * 2)),
    "sorted with its labels": by_length,
    "masked by lengths": given(of_lengths),
    "a mean of what is masked": masked_mean,
    "an evaluation in between": evaluates,
    "a hook that scales": hooked(lambda g: g.clamp(-1, 1) * 0.5),
    "a hook that looks": hooked(lambda g: print(g.norm())),
    "gradients set to none": lambda m, x, y: (m.zero_grad(), rows(m, x, y).mean())[1],
}

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
        optimizer.zero_grad()
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
    apart = clipped_sum(loss, x.clone(), y) - clipped_sum(loss, x[1:].clone(), y[1:])
    return float(apart.norm()) / BOUND


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_of_the_whole_batch_are_refused(name):
    with pytest.raises(PrivacyError, match=r"examples meet in the loss|rows of the batch"):
        ratio(REFUSED[name])


@pytest.mark.parametrize("name", BEFORE)
def test_what_mixes_rows_before_the_model_is_refused(name):
    with pytest.raises(PrivacyError, match=r"examples|rows of the batch|puts? on a node"):
        ratio(BEFORE[name])


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_preprocessing_row_by_row_is_accepted(name):
    assert ratio(ROW_BY_ROW[name]) <= 1 + 1e-5


@pytest.mark.parametrize("name", ["mixup", "standardised", "cutmix"])
def test_mixed_inputs_would_move_the_others(name, monkeypatch):
    monkeypatch.setattr(LoopConstants, "check_inputs", lambda self, given: None)
    assert ratio(BEFORE[name]) > 1.05


@pytest.mark.parametrize("name", ["a baseline", "clipped at the mean", "keys of other rows"])
def test_one_record_would_move_all_others(name, monkeypatch):
    monkeypatch.setattr(LoopConstants, "check", lambda self, nodes: None)
    assert ratio(REFUSED[name]) > 2


@pytest.mark.parametrize("name", ACCEPTED)
def test_numbers_of_rows_are_accepted(name):
    assert ratio(ACCEPTED[name]) <= 1 + 1e-5
