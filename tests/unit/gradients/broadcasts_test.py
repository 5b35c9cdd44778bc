"""Broadcasting in a loss: rows that meet the labels of others are refused, constants are not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.loss_runs import NO_NOISE, ROWS, clipped_sum, ratio
from vestige import PrivacyEngine, PrivacyError
from vestige.gradients.broadcasts import Broadcasts
from vestige.gradients.loop_constants import LoopConstants

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")

BY_CLASS = torch.linspace(0.5, 2.0, ROWS)  # a constant that is as long as the batch


FROZEN = nn.Linear(ROWS, ROWS).requires_grad_(False)


class Scores(nn.Module):
    """Numbers for each row; with labels the loss, too."""

    def __init__(self, width=1, own_loss=None):
        super().__init__()
        self.out, self.own_loss = nn.Linear(3, width), own_loss

    def forward(self, x, labels=None):
        scores = self.out(x)
        return scores if labels is None else {"loss": self.own_loss(scores, labels)}


def data(*shape):
    """Records whose gradients add up, and one label that turns all of them if it is met."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + 0.1 * torch.rand(ROWS, 3, generator=generator)
    y = torch.rand(ROWS, *shape, generator=generator) - 5
    y[0] = 1e4
    return x, y


def run(loss, width=1, shape=(), **options):
    return clipped_sum(
        data(*shape), lambda m, x, y: loss(m(x), y), lambda: Scores(width), bound=1.0, **options
    )


def moved(loss, width=1, shape=()):
    """|q(D) - q(D without the record of the large label)| / C."""
    return ratio(
        data(*shape), lambda m, x, y: loss(m(x), y), model=lambda: Scores(width), bound=1.0
    )


REFUSED = {
    "mse_loss": F.mse_loss,
    "mse_loss, the target on its side": lambda p, y: F.mse_loss(p, y[None]),
    "mse_loss, losses": lambda p, y: F.mse_loss(p, y, reduction="none").mean(1),
    "mse_loss of torch.ops": lambda p, y: torch.ops.aten.mse_loss(p, y),
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "kl_div": lambda p, y: F.kl_div(p, y, reduction="none").mean(1),
    "poisson_nll_loss": F.poisson_nll_loss,
    "gaussian_nll_loss": lambda p, y: F.gaussian_nll_loss(p, y, torch.ones(len(p), 1)),
    "hinge_embedding_loss": lambda p, y: F.hinge_embedding_loss(p, (y < 2) * 2 - 1),
    "a normal law": lambda p, y: -torch.distributions.Normal(p, 1.0).log_prob(y).mean(),
    "by hand": lambda p, y: (p - y).square().mean(),
    "by hand, turned": lambda p, y: (y - p).abs().mean(1),
    "a product": lambda p, y: (p * y).mean(),
    "cross-entropy by hand": lambda p, y: (F.softplus(p) - p * (y > 0.5)).mean(),
    "quantiles": lambda p, y: torch.maximum(0.9 * (y - p), 0.1 * (p - y)).mean(),
    "where": lambda p, y: torch.where(y > 0.5, p.exp(), p.square()).mean(),
    "where, one output": lambda p, y: torch.where(y > 0.5, p, 0.0).square().mean(),
    "masked_fill": lambda p, y: p.masked_fill(y > 0.5, 0.0).square().mean(),
    "a power": lambda p, y: (p.exp() ** y.clamp(max=2)).mean(),
    "clamp": lambda p, y: p.clamp(min=y).mean(),
    "lerp": lambda p, y: p.lerp(y, 0.5).square().mean(),
    "addcmul": lambda p, y: torch.addcmul(p, y, y).square().mean(),
    "an output without a column": lambda p, y: (p.squeeze(1) - y[:, None]).square().mean(),
    "einsum": lambda p, y: torch.einsum("i,j->ij", p[:, 0], y).sigmoid().mean(),
    "outer": lambda p, y: torch.outer(p[:, 0], y).sigmoid().mean(),
    "a matrix product": lambda p, y: (p @ y[None]).sigmoid().mean(),
    "a matrix product, turned": lambda p, y: (y[:, None] @ p.T).sigmoid().mean(),
    "matrix products": lambda p, y: torch.bmm(
        p[:, None], y[None, None].expand(len(p), -1, -1)
    ).sigmoid().mean(),
    "expanded": lambda p, y: (p.expand(-1, len(y)) - y).square().mean(),
    "expanded, turned": lambda p, y: (p.expand(-1, len(y)).T - y[:, None]).square().mean(),
    "expanded, flat": lambda p, y: F.mse_loss(p.expand(-1, len(y)).flatten(), y.repeat(len(y))),
    "repeated": lambda p, y: (p.repeat(1, len(y)) - y).square().mean(),
    "side by side": lambda p, y: (torch.cat([p] * len(y), 1) - y).square().mean(),
    "gathered": lambda p, y: (
        p.gather(1, torch.zeros(len(p), len(p), dtype=torch.long)) - y
    ).square().mean(),
    "frozen prototypes of the lot": lambda p, y: torch.addmm(y, p, y[None]).square().mean(),
    "a length": lambda p, y: torch.hypot(p, y).mean(),
    "an advantage without gradient": lambda p, y: (p * (y - p.detach())).mean(),
    "copied labels": lambda p, y: (p.exp() * y.expand(len(y), -1).clone()).mean(),
    "compared": lambda p, y: torch.where(p > y, p, 0.0).square().mean(),
    "more axes": lambda p, y: (p[:, :, None] - y[:, None]).square().mean(),
    "rows in a loop": lambda p, y: torch.stack([(row - y).square().mean() for row in p]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_with_a_column_beside_targets_without_are_refused(name):
    with pytest.raises(PrivacyError, match="spreads an output of shape"):
        run(REFUSED[name])


def test_the_message_names_the_operation_the_shapes_and_the_remedy():
    with pytest.raises(PrivacyError, match="examples meet in the loss") as error:
        run(F.mse_loss)
    said = str(error.value)
    assert "MseLoss spreads an output of shape (16, 1) along an axis of 16" in said
    assert "the labels of all 16 rows" in said
    assert "target.unsqueeze(1) or output.squeeze(1)" in said


@pytest.mark.parametrize(
    "loss", [REFUSED[n] for n in ("mse_loss", "by hand", "a product", "more axes")]
)
def test_without_the_check_one_label_moves_all_others(loss, monkeypatch):
    """The mutant: what is refused above, and what the replays below are there to find."""
    monkeypatch.setattr(Broadcasts, "meeting", lambda self, node: None)
    monkeypatch.setattr(LoopConstants, "check", lambda self, nodes: None)
    assert moved(loss) > 10


@pytest.mark.parametrize("loss", [F.mse_loss, lambda p, y: (p - y).square().sum()])
def test_sums_are_refused_too(loss):
    with pytest.raises(PrivacyError, match="spreads an output"):
        run(lambda p, y: loss(p, y, reduction="sum") if loss is F.mse_loss else loss(p, y),
            reduction="sum")  # fmt: skip


def test_outputs_as_wide_as_the_batch_beside_targets_without_columns_are_refused():
    """As many classes as rows: the target is spread along the classes, and nothing of an output."""
    for loss in (F.mse_loss, F.l1_loss, lambda p, y: (p - y).square().mean()):
        with pytest.raises(PrivacyError, match=r"spreads an output of shape \(16, 16\)"):
            run(loss, width=ROWS)


def test_the_model_itself_is_no_place_for_it():
    with pytest.raises(PrivacyError):
        clipped_sum(
            data(),
            lambda m, x, y: m(x, labels=y)["loss"],
            lambda: Scores(1, lambda p, y: (p - y).square().mean()),
        )


@pytest.mark.parametrize("each", [1, 0])
def test_labels_of_users_are_labels(each):
    """Beside every row the labels of all rows, or one label for each of the four users."""
    units = {"units": torch.arange(ROWS) // 4, "rows_per_unit": 4, "dataset_size": 4}
    with pytest.raises(PrivacyError, match=f"along an axis of {ROWS if each else 4}"):
        run(lambda p, y: (p - (y if each else y[::4])).square().mean(), **units)


W = {"width": ROWS, "shape": (ROWS,)}  # as many classes as rows
ACCEPTED = {
    "columns": (lambda p, y: F.mse_loss(p, y), {"shape": (1,)}),
    "no columns": (lambda p, y: F.mse_loss(p.squeeze(1), y), {}),
    "a column is given": (lambda p, y: F.l1_loss(p, y.unsqueeze(1)), {}),
    "by hand": (lambda p, y: (p.view(-1) - y).square().mean(1 - 1), {}),
    "several targets": (F.huber_loss, {"width": 3, "shape": (3,)}),
    "targets as many as rows": (F.mse_loss, W),
    "one output, targets as many as rows": (
        lambda p, y: (p - y).square().mean(), {"shape": (ROWS,)}
    ),
    "mse_loss, the same": (F.mse_loss, {"shape": (ROWS,)}),
    "one-hot targets": (
        lambda p, y: F.mse_loss(p.softmax(1), F.one_hot((y > 1).long(), ROWS).float()),
        {"width": ROWS},
    ),
    "classes": (lambda p, y: F.cross_entropy(p, (y > 1).long()), {"width": ROWS}),
    "classes, smoothed": (
        lambda p, y: F.cross_entropy(p, (y > 1).long(), label_smoothing=0.1), {"width": ROWS}
    ),
    "class weights": (lambda p, y: ((p - y).square() * BY_CLASS).mean(), W),
    "weights of positive classes": (
        lambda p, y: F.binary_cross_entropy_with_logits(
            p, (y > 0.5).float(), pos_weight=BY_CLASS, weight=BY_CLASS
        ), W,
    ),
    "a constant of another length": (
        lambda p, y: (p - BY_CLASS[:5]).square().mean(1) * y.clamp(max=2), {}
    ),
    "a frozen layer": (lambda p, y: (FROZEN(p) - y).square().mean(), W),
    "a frozen bias": (lambda p, y: (p + FROZEN.bias - y).square().mean(), W),
    "normalised": (lambda p, y: (F.normalize(p, dim=1) - y).square().mean(), W),
    "centred": (lambda p, y: (p - p.mean(1, keepdim=True) - y).square().mean(), W),
    "cosine": (lambda p, y: F.cosine_similarity(p, y).mean(), W),
    "picked by labels": (lambda p, y: p.gather(1, (y > 0.5).long()).mean(), W),
    "masked by labels": (lambda p, y: p.masked_fill(y > 0.5, 0.0).square().mean(), W),
    "matrix products in rows": (
        lambda p, y: torch.bmm(p[:, :, None], y[:, None]).sigmoid().mean(),
        {"width": 3, "shape": (ROWS,)},
    ),
    "rows in a loop": (
        lambda p, y: torch.stack([F.mse_loss(*pair) for pair in zip(p, y, strict=True)]), W,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_rows_beside_their_own_labels_are_accepted_and_keep_the_bound(name):
    loss, shapes = ACCEPTED[name]
    # Without the record there is one row less than classes, and the other way round.
    assert moved(loss, **shapes) <= 1 + 1e-4
    got, engine = run(loss, **shapes)
    assert got.norm() > 0 and engine.caveats()[0] == NO_NOISE
    assert not any("loss" in caveat for caveat in engine.caveats())


def sizes_until_refused(loss, records, **options):
    """The sizes of the physical batches that a loop gets through, and how it ends."""
    torch.manual_seed(0)
    engine, model = PrivacyEngine(accountant="rdp"), Scores()
    x, y = (t[:records] for t in data())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the self-check was skipped")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=records),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **options,
        )
        sizes = []
        for rows, labels in (batch for _ in range(4) for batch in loader):
            try:
                loss(model(rows), labels).backward()
            except PrivacyError as error:
                assert "spreads an output of shape" in str(error)
                return sizes, len(rows)
            optimizer.step()
            sizes.append(len(rows))
    return sizes, None


def test_a_constant_is_known_by_batches_of_another_size():
    """Seven rows come as five and two: a constant of two was met beside five, one of five not."""
    options = {"sample_rate": 1.0, "max_physical_batch_size": 5}
    for length, refused in ((2, None), (5, 5), (3, None)):
        _, size = sizes_until_refused(
            lambda p, y, n=length: (p - BY_CLASS[:n]).square().mean(), 7, **options
        )
        assert size == refused


def test_one_row_says_nothing_and_the_next_batch_is_refused():
    """(1, 1) beside (1,) harms nobody and proves nothing."""
    sizes, refused = sizes_until_refused(F.mse_loss, 7, sample_rate=1.0, max_physical_batch_size=1)
    assert sizes == [1] * len(sizes) and refused is None
    sizes, refused = sizes_until_refused(F.mse_loss, 7, sample_rate=0.2, noise_seed=5)
    assert set(sizes) == {1} and refused > 1
