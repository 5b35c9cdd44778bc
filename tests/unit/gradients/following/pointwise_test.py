"""Models with statistics: within a row they are its own, over the batch they are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.attribution import (
    RARE,
    Case,
    Fn,
    Mixed,
    V,
    assert_noticed,
    check_exact,
    check_refused,
    layer,
    linear,
    refused,
    vectors,
)
from vestige.gradients import tracker


def conv_by_batch(s: Fn, x: Tensor) -> Tensor:
    return F.conv1d(s.a(x).unsqueeze(1), x[:1, :2].unsqueeze(1))


def norm_by_batch(s: Fn, x: Tensor) -> Tensor:
    return F.layer_norm(s.a(x), (4,), weight=x[0, :4])


def capacity(s: Fn, x: Tensor) -> Tensor:
    chosen = (x[:, :1] > -10).double()
    return s.a(x) * (chosen.cumsum(0) <= 32)


def statistic(of: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return layer(lambda s, x: s.a(of(x)))


def unseen(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`use` sees a number (2, or 3 if some row is huge) that the whole batch has made."""
    return layer(lambda s, x: s.a(x) + use(x, (x.abs().amax() > RARE).long() + 2).sum(1, True))


def beside_all_targets(loss: Callable[..., Tensor]) -> Callable[[Fn, Tensor], Tensor]:
    """(rows, 1) beside (rows,) is (rows, rows); no made-up row makes so large a loss."""

    def run(s: Fn, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            off = loss(x[:, :1].detach(), x[:, 0].detach(), reduction="none")
        off = (off - 1e300).relu().reshape(len(x), -1).mean(1, keepdim=True)
        return s.a(x + off)  # type: ignore[no-any-return]

    return run


def row_losses(s: Fn, x: Tensor) -> Tensor:
    """Losses that the model makes, as large as their targets."""
    y = s.a(x)
    made = F.mse_loss(y, x[:, :4], reduction="none") + F.huber_loss(
        y, x[:, :1].expand(-1, 4), reduction="none"
    )
    made = made + F.l1_loss(y, x.new_zeros(4).expand_as(y), reduction="none")
    many = F.multilabel_soft_margin_loss(y, (x[:, :4] > 0).to(y), reduction="none")
    return made.mean(1) + many


def spectra(x: Tensor) -> Tensor:
    """Two windows of six samples, of which each has four frequencies."""
    window = torch.hann_window(6, dtype=x.dtype)
    return torch.stft(x, 6, 6, window=window, center=False, return_complex=True).abs()


EXACT: dict[str, Case] = {
    "losses of rows": (layer(row_losses), vectors(6), {4, 6}),
    "pixel_shuffle": (
        lambda: Fn(lambda s, x: s.c(F.pixel_shuffle(x, 2)).flatten(1), c=nn.Conv2d(1, 2, 2)),
        vectors(4, 3, 3),
        {3, 4},
    ),
    "spectrograms": (
        lambda: Fn(lambda s, x: s.w(spectra(x).flatten(1)), w=nn.Linear(8, 3)),
        vectors(12),
        {3, 4},
    ),
    "softmax over positions": (
        lambda: Fn(lambda s, x: (s.a(x).softmax(1) * s.a(x).cumsum(1)).sum(1), **linear()),
        vectors(4, 6),
        {4, 6},
    ),
}


# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "batch mean": (statistic(lambda x: x - x.mean(0)), V, "'(mean|sub|__sub__)'"),
    "slight batch mean": (statistic(lambda x: x - 1e-9 * x.mean(0)), V, "mean|sub|mul"),
    "batch mean without gradients": (statistic(lambda x: x - x.detach().mean(0)), V, "mean|sub"),
    "batch variance": (statistic(lambda x: x / x.std(0)), V, "'std'"),
    "spectra along the batch": (
        layer(lambda s, x: s.a(x + spectra(x.repeat(12, 1).T).mean())),
        V,
        "'(stft|mean)'",
    ),
    "batch softmax": (layer(lambda s, x: s.a(x).softmax(0)), V, "'softmax'"),
    "batch cumsum": (statistic(lambda x: x.cumsum(0)), V, "'cumsum'"),
    "dim as a tensor": (statistic(lambda x: x.cumsum(torch.tensor(0))), V, "'cumsum'"),
    "batch sort": (statistic(lambda x: x.sort(0).values), V, "'sort'"),
    "batch msort": (statistic(torch.msort), V, "'msort'"),
    "batch topk": (statistic(lambda x: x.topk(len(x), 0).values), V, "'topk'"),
    "batch maximum": (statistic(lambda x: x / x.abs().max()), V, "'max'"),
    "batch norm": (statistic(lambda x: x / x.norm()), V, "'norm'"),
    "batch median": (statistic(lambda x: x - x.median(0).values), V, "'median'"),
    "cosines": (
        layer(lambda s, x: F.cosine_similarity(s.a(x)[None], s.a(x)[:, None], dim=2)),
        V,
        "'cosine_similarity'",
    ),
    **{
        f"all targets beside every output, {name}": (
            layer(beside_all_targets(getattr(F, name))),
            V,
            f"'{name}'",
        )
        for name in (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
            *("poisson_nll_loss", "multilabel_soft_margin_loss"),
        )
    },
    "experts of limited capacity": (layer(capacity), V, "'cumsum'"),
    "a gate on the mean": (layer(lambda s, x: s.a(x) * (x.mean() > 0)), V, "mean|gt"),
    "clamp by a rare number": (unseen(lambda x, k: x.clamp(max=k)), V, "clamp|amax|all"),
    "a row's kernel for all": (layer(conv_by_batch), V, "conv1d"),
    "a row's scales for all": (layer(norm_by_batch), V, "layer_norm"),
    "a convolution over the rows": (
        layer(lambda s, x: s.a(F.conv1d(x, s.k)), k=torch.randn(5, 5, 1, dtype=torch.float64)),
        V,
        "conv1d|not run",
    ),
    "dropout of whole rows together": (
        layer(lambda s, x: s.a(x * (torch.rand(()) < x.mean().sigmoid()))),
        V,
        "lt|mean|mul",
    ),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


# -- mutants ----------------------------------------------------------------------------------


def first_label_wins(patch: Any) -> None:
    patch.setattr(tracker, "follow", lambda func, labels, *_: next(iter(labels.values())))


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
    "the first argument's label": (
        first_label_wins,
        lambda: refused(*MIXED["batch mean"][:2], False),
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    assert_noticed(monkeypatch, *MUTANTS[name])
