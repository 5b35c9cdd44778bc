"""Losses in the loop and in the model: rows that meet are refused, all others keep the bound."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.support.loss_runs import (
    BOUND,
    LENGTH,
    NO_NOISE,
    ROWS,
    WEIGHTS,
    WORDS,
    Temperature,
    Tokens,
    by_position,
    clipped_sum,
    data,
    first,
    flat,
    masked,
    ratio,
)
from vestige import PrivacyError
from vestige.gradients import losses

MEANS = {
    "a mean over all targets": flat,
    "on transposed scores": lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
    "label smoothing": functools.partial(flat, label_smoothing=0.1),
    "nll_loss": lambda s, y: F.nll_loss(s.log_softmax(-1).transpose(1, 2), y),
    "by hand": masked,
    "by hand, negative": lambda s, y: -(-by_position(s, y)).sum() / (y != -100).sum(),
    "by hand, rows first": lambda s, y: by_position(s, y).sum(0).sum() / (y != -100).sum(),
    "by hand, rows last": lambda s, y: by_position(s, y).sum(1).sum() / (y != -100).sum(),
    "a sum over a count": lambda s, y: flat(s, y, reduction="sum") / (y != -100).sum(),
    "a mean and a smaller one": lambda s, y: flat(s, y) + 0.1 * masked(s, y),
    "the same twice": lambda s, y: (lambda l: l + 0.5 * l)(flat(s, y)),
}


@pytest.mark.parametrize("where", ["in the loop", "in the model"])
@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("bound", [0.02, BOUND, 5.0])
def test_a_mean_over_what_is_not_ignored_is_taken_over_all(name, where, bound):
    """Records that are ignored do not move the weight of the others, at any clip bound."""
    own = MEANS[name]
    if where == "in the model":
        got = ratio(
            data(), lambda m, x, y: m(x, labels=y)["loss"], model=lambda: Tokens(own), bound=bound
        )
    else:
        got = ratio(data(), lambda m, x, y: own(m(x), y), bound=bound)
    assert 0 < got <= 1 + 1e-6


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_over_all_targets_is_that_of_rows_by_themselves(name):
    """A row's loss is the sum over its targets / positions, whatever the other rows are."""
    torch.manual_seed(1)
    twin, expected = Tokens(), 0.0
    for x, y in zip(*data(), strict=True):
        loss = MEANS[name](twin(x[None]), y[None]) * (y != -100).sum() / LENGTH
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        gradient = torch.cat([g.flatten().double() for g in gradients])
        expected = expected + gradient / max(1.0, float(gradient.norm()))
    got, engine = clipped_sum(data(), lambda m, x, y: MEANS[name](m(x), y), bound=1.0)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert engine.caveats()[0] == NO_NOISE
    assert not any("loss" in caveat or "PadTo" in caveat for caveat in engine.caveats())


@pytest.mark.parametrize("name", ["a mean over all targets", "by hand"])
def test_without_the_replaced_divisor_the_bound_breaks(name, monkeypatch):
    """The mutant: what the ratios above are there to find."""
    monkeypatch.setattr(losses, "multiply", lambda node, factor: None)
    assert ratio(data(), lambda m, x, y: MEANS[name](m(x), y), bound=BOUND) > 1.5


def test_where_nothing_is_ignored_nothing_changes():
    plain, _ = clipped_sum(data(ignored=False), lambda m, x, y: flat(m(x), y), bound=1.0)
    by_hand, _ = clipped_sum(
        data(ignored=False), lambda m, x, y: by_position(m(x), y).mean(1), bound=1.0
    )
    assert torch.allclose(plain, by_hand, rtol=1e-4, atol=1e-5)


ACCEPTED = {
    "cross_entropy": lambda m, x, y: F.cross_entropy(first(m, x), y[:, 0]),
    "probabilities": lambda m, x, y: F.cross_entropy(
        first(m, x), F.one_hot(x[:, 0], WORDS).float()
    ),
    "mse": lambda m, x, y: F.mse_loss(m(x), torch.zeros(len(x), LENGTH, WORDS)),
    "mse, a tensor of weights": lambda m, x, y: (m(x).square() * torch.rand(WORDS)).mean(),
    "l1": lambda m, x, y: F.l1_loss(m(x), torch.zeros(len(x), LENGTH, WORDS)),
    "huber": lambda m, x, y: F.huber_loss(m(x), torch.zeros(len(x), LENGTH, WORDS)),
    "bce with weights": lambda m, x, y: F.binary_cross_entropy_with_logits(
        first(m, x), torch.ones(len(x), WORDS), pos_weight=torch.rand(WORDS)
    ),
    "kl_div": lambda m, x, y: F.kl_div(
        first(m, x).log_softmax(1), torch.full((len(x), WORDS), 1 / WORDS), reduction="batchmean"
    ),
    "gaussian": lambda m, x, y: F.gaussian_nll_loss(
        first(m, x), torch.zeros(len(x), WORDS), torch.ones(len(x), WORDS)
    ),
    "ctc": lambda m, x, y: F.ctc_loss(
        m(x).log_softmax(2).transpose(0, 1),
        x[:, :3].clamp(min=1),
        torch.full((len(x),), LENGTH),
        1 + x[:, 0] % 3,
    ),
    "cosine": lambda m, x, y: F.cosine_embedding_loss(
        first(m, x), m(x)[:, 1], torch.ones(len(x))
    ),
    "one position of each row": lambda m, x, y: F.cross_entropy(
        m(x)[torch.arange(len(x)), x[:, 0]], y[:, 0]
    ),
    "by hand": lambda m, x, y: by_position(m(x), y).sum() / len(x),
    "by hand, two divisors": lambda m, x, y: 0.5 * by_position(m(x), y).sum() / len(x) / LENGTH,
    "divided first": lambda m, x, y: (by_position(m(x), y) / y.numel()).sum(),
    "divided first, by steps": lambda m, x, y: (
        -by_position(m(x), y).mean(1) / -len(x) * 0.5
    ).sum(),
    "over rows first": lambda m, x, y: by_position(m(x), y).mean(0).sum(),
    "accumulated": lambda m, x, y: F.cross_entropy(first(m, x), y[:, 0]) / 4,
    "row means": lambda m, x, y: (
        by_position(m(x), y).sum(1) / (y != -100).sum(1)
    ).mean(),
    "rows in a loop": lambda m, x, y: (lambda out: sum(
        flat(out[i : i + 1, : 1 + x[i, 0]], y[i : i + 1, : 1 + x[i, 0]]).clamp(max=9)
        for i in range(len(out))
    ) / len(out))(m(x)),
    "losses, counted in a loop": lambda m, x, y: torch.stack([
        (row * (t != -100)).sum() / (t != -100).sum()
        for row, t in zip(by_position(m(x), y), y, strict=True)]),
    "counted in a loop": lambda m, x, y: sum(
        row.sum() / (t != -100).sum() for row, t in zip(by_position(m(x), y), y, strict=True)
    ) / len(x),
    "losses, rows in a loop": lambda m, x, y: torch.stack([s[t != -100].logsumexp(1).mean()
        for s, t in zip(m(x), y, strict=True)]),
    "rows stacked again": lambda m, x, y: F.cross_entropy(
        torch.stack([row[0].tanh() for row in m(x)]), y[:, 0]
    ),
    "two terms": lambda m, x, y: torch.stack(
        [F.cross_entropy(first(m, x), y[:, 0]), m(x).square().mean()]
    ).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_losses_of_rows_by_themselves_are_accepted(name):
    records = data(ignored=False) if name == "rows in a loop" else data()
    for drop, bound in ((0, 0.05), (5, 0.5), (0, 3.0)):
        # Gradients are single precision.
        assert ratio(records, ACCEPTED[name], drop, bound=bound) <= 1 + 1e-4
    _, engine = clipped_sum(records, ACCEPTED[name])
    assert engine.caveats()[0] == NO_NOISE
    assert not any("loss" in caveat or "PadTo" in caveat for caveat in engine.caveats())


HALF = torch.tensor(0.5)

MEETING = {
    "class-weighted": lambda s, y: F.cross_entropy(s[:, 0], y[:, 0], weight=WEIGHTS),
    "weights for 7 classes": lambda s, y: F.nll_loss(
        s[:, 0].log_softmax(1), y[:, 0], weight=WEIGHTS
    ),
    "class-weighted mean": lambda s, y: F.cross_entropy(s.transpose(1, 2), y, weight=WEIGHTS),
    "trains a tensor": lambda s, y: Temperature()(s[:, 0], y[:, 0]),
    "picked by their content": lambda s, y: by_position(s, y)[y != -100].mean(),
    "no multiple of the 16 rows": lambda s, y: F.cross_entropy(s[y != -100], y[y != -100]),
    "that has no rows": lambda s, y: by_position(s, y)[y != -100].sum() / (y != -100).sum(),
    "no multiple of the": lambda s, y: by_position(s, y)[:5, :1].mean(),
    "applies Pow": lambda s, y: flat(s, y) ** 2,
    "applies Exp": lambda s, y: flat(s, y).exp(),
    "applies Sqrt": lambda s, y: s.square().mean().sqrt(),
    "applies Mul": lambda s, y: (1 - (-flat(s, y)).exp()) * flat(s, y),
    "applies Div": lambda s, y: s.square().mean() / s.abs().mean(),
    "multiplies by a tensor": lambda s, y: flat(s, y) * HALF,
    "divides by a tensor of shape": lambda s, y: flat(s, y) / (y != -100).sum(),
    "sum .Sum. that is not divided": lambda s, y: by_position(s, y).sum(),
    "not divided by the 16 rows": lambda s, y: by_position(s, y).sum() / 27,
    "is not divided by the 16 rows": lambda s, y: (by_position(s, y) / 27).sum(),
    "NllLoss. that is not divided": lambda s, y: flat(s, y, reduction="sum") / 37.0,
    "applies Pow to": lambda s, y: (
        sum(flat(s[i : i + 1], y[i : i + 1]) for i in range(16)) / 16
    ) ** 2,
    "puts single rows together": lambda s, y: sum(
        (s[i, :8, :4] - s[i - 1, :8, :4]).square().mean() for i in range(16)
    ) / 16,
    "single rows together": lambda s, y: torch.stack(
        [(s[i] * s[i - 1]).mean() for i in range(16)]
    ),
    "compares rows": lambda s, y: F.cross_entropy(
        s[:, 0] @ s[:, 1].T, torch.arange(len(s))
    ),
    "product of two outputs .Cdist.": lambda s, y: torch.cdist(s[:, 0], s[:, 1]).mean(),
    "product of two outputs .Pdist.": lambda s, y: F.pdist(s[:, 0])[:ROWS].mean(),
    "Softmax goes over the rows": lambda s, y: s[:, 0].softmax(0).square().mean(),
    "Div spreads": lambda s, y: (s[:, 0] / s[:, 0].std(0)).mean(),
    "applies Logsumexp": lambda s, y: s[:, 0].logsumexp(0).mean(),
    "applies Var": lambda s, y: s[:, 0].var(0).mean(),
    "spreads an output": lambda s, y: (s[:, 0] - s[:1, 0]).square().mean(),
    "Sub spreads": lambda s, y: (s[:, 0] - s[:, 0].mean(0)).square().mean(),
    "NllLoss reduces the rows": lambda s, y: torch.cat([flat(s, y)[None]] * len(s)),
    "Expand spreads an": lambda s, y: (flat(s, y) * len(s)).expand(len(s)),
    "Expand spreads": lambda s, y: flat(s, y).expand(len(s)),
    "divides by a tensor": lambda s, y: by_position(s, y).sum(1) / (y != -100).sum(),
}  # fmt: skip


@pytest.mark.parametrize("said", MEETING)
def test_losses_in_which_rows_meet_are_refused(said):
    with pytest.raises(PrivacyError, match=said):
        clipped_sum(data(), lambda m, x, y: MEETING[said](m(x), y))


IN_THE_MODEL = [
    *("class-weighted", "picked by their content", "no multiple of the 16 rows"),
    *("applies Pow", "applies Mul", "sum .Sum. that is not divided", "not divided by the 16 rows"),
    *("multiplies by a tensor", "divides by a tensor of shape"),
]


@pytest.mark.parametrize("said", IN_THE_MODEL)
def test_losses_in_which_rows_meet_are_refused_in_the_model(said):
    with pytest.raises(PrivacyError, match=said):
        clipped_sum(
            data(),
            lambda m, x, y: m(x, labels=y)["loss"],
            model=lambda: Tokens(MEETING[said]),
        )


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: by_position(s, y)[y != -100].mean(),
        lambda s, y: F.cross_entropy(s[y != -100], y[y != -100]),
        lambda s, y: by_position(s, y).masked_select(y != -100).sum() / (y != -100).sum(),
        lambda s, y: s.flatten(0, 1)[(y != -100).flatten().nonzero()[:, 0]].square().mean(),
    ],
)
def test_picked_positions_are_refused_also_if_they_are_a_multiple_of_the_rows(loss):
    tokens, labels = data()
    labels[1, 1] = 1
    assert (labels != -100).sum() == 2 * ROWS
    with pytest.raises(PrivacyError, match="picked by their content"):
        clipped_sum((tokens, labels), lambda m, x, y: loss(m(x), y))


def test_a_loss_of_the_model_that_nobody_differentiates_is_nobodys_business():
    got, _ = clipped_sum(
        data(),
        lambda m, x, y: by_position(m(x, labels=y)["logits"], y).mean(1),
        model=lambda: Tokens(MEETING["class-weighted"]),
    )
    assert got.norm() > 0


def test_a_mean_that_is_declared_as_a_sum_is_refused():
    with pytest.raises(PrivacyError, match=r"mean .NllLoss. that is not multiplied by the 16 rows"):
        clipped_sum(data(), lambda m, x, y: flat(m(x), y), reduction="sum")
    for loss in (
        lambda m, x, y: flat(m(x), y, reduction="sum"),
        lambda m, x, y: flat(m(x), y) * len(x),
        lambda m, x, y: by_position(m(x), y).sum(),
    ):
        assert ratio(data(), loss, reduction="sum") <= 1 + 1e-6


@pytest.mark.parametrize("name", ACCEPTED)
def test_lots_of_two_rows_and_of_one_agree(name):
    """Shapes of one or two say the least; what is understood must not depend on that."""
    records = tuple(t[:2] for t in data(ignored=name != "rows in a loop"))
    for drop in (0, 1):
        assert ratio(records, ACCEPTED[name], drop, bound=2.0) <= 1 + 1e-4
