"""Operations of a loss that are not known to keep rows apart are refused; known ones are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.loss_runs import NO_NOISE, ROWS, Tokens, clipped_sum, data, ratio
from vestige import PrivacyError

EVERY = torch.arange(ROWS)
WEIGHT = torch.ones(1, 16, 3)


def first(s):
    """(rows, words)."""
    return s[:, 0]


UNKNOWN = {
    "FftR2C goes along": lambda s: torch.fft.fft(first(s), dim=0).abs().mean(),
    "NativeLayerNorm goes along": lambda s: F.layer_norm(first(s).t(), (ROWS,)).pow(3).mean(),
    "Scatter goes along": lambda s: (
        s.scatter(0, torch.zeros_like(s, dtype=torch.int64), s) * s
    ).mean(),
    "IndexAdd goes along": lambda s: (
        torch.zeros(3, 16, 7).index_add(0, EVERY % 3, s).square().repeat(ROWS, 1, 1).mean()
    ),
    "ConstantPadNd goes along": lambda s: F.pad(first(s), (0, 0, 1, 0))[:-1].square().mean(),
    "CopySlices is not known": lambda s: (
        F.pad(first(s).t()[None], (1, 0), mode="circular")[0].t()[:-1] * first(s)
    ).mean(),
    "ReflectionPad1D goes along": lambda s: (
        F.pad(first(s).t()[None], (1, 1), mode="reflect")[0].t()[:-2] * first(s)
    ).mean(),
    "PixelShuffle goes along": lambda s: (
        F.pixel_shuffle(s[None], 4).flatten()[:7].exp().repeat(ROWS).mean()
    ),
    "NativeChannelShuffle is not known|Channel": lambda s: (
        (torch.channel_shuffle(s[None], 2)[0] * s).mean()
    ),
    "Take is not known": lambda s: (s.take(torch.randperm(s.numel())) * 2).exp().view(s.shape)
    .mean(),
    "Rot90 is not known|Flip|Mul puts": lambda s: (torch.rot90(first(s), 2) * first(s)).mean(),
    "Convolution goes along": lambda s: F.conv1d(
        first(s).t()[:, None], torch.ones(1, 1, 3), padding=1
    ).square().mean(),
    "LinalgInvEx is not known|Linalg": lambda s: torch.linalg.pinv(
        s[:, :7].transpose(0, 1).reshape(16, 7, 7)
    ).square().mean(),
    "IndexPut is not known": lambda s: (
        s.index_put((EVERY,), s.flip(0)) * s
    ).mean(),
    "LogSoftmax is not known": lambda s: (
        s.diagonal().log_softmax(1).square().mean() + s.square().mean()
    ),
}  # fmt: skip

APART = {
    "the last word's": lambda s, y: F.cross_entropy(s[EVERY[: len(s)], y[:, 1]], y[:, 0]),
    "the last word's, by row": lambda s, y: (
        s[EVERY[: len(s)], y[:, 1]].log_softmax(1)[EVERY[: len(s)], y[:, 0]].mean()
    ),
    "attention in rows": lambda s, y: (s @ s.transpose(1, 2)).softmax(2).square().mean(),
    "attention twice": lambda s, y: ((s @ s.mT).softmax(2) @ s).softmax(2).square().mean(),
    "frequencies of a row": lambda s, y: torch.fft.rfft(s, dim=1).abs().mean(),
    "a norm of words": lambda s, y: F.layer_norm(s, (7,)).square().mean(),
    "padded words": lambda s, y: F.pad(s, (1, 2)).softmax(2).square().mean(),
    "convolved": lambda s, y: F.conv1d(s, WEIGHT).square().mean(),
    "pooled": lambda s, y: F.avg_pool1d(s, 3).square().mean(),
    "scattered words": lambda s, y: (
        torch.zeros_like(s).scatter(2, y[:, :, None], s[:, :, :1]).exp().mean()
    ),
    "activations": lambda s, y: F.softplus(F.gelu(s)).lerp(s.sigmoid(), 0.5).atan().mean(),
    "focal": lambda s, y: (lambda p: ((1 - p) ** 2 * p.log()).mean())(
        s.softmax(2).gather(2, y[:, :, None]).clamp(1e-6)
    ),
    "smooth": lambda s, y: F.smooth_l1_loss(s, torch.zeros_like(s)) + F.huber_loss(s, s.detach()),
}  # fmt: skip


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_may_mix_rows_is_refused(said):
    with pytest.raises(PrivacyError, match=f"(?s)examples meet in the loss: .*({said})"):
        clipped_sum(data(ignored=False), lambda m, x, y: UNKNOWN[said](m(x)))


@pytest.mark.parametrize("name", APART)
def test_what_keeps_rows_apart_is_accepted_and_bounded(name):
    records = data(ignored=False)
    loss = lambda m, x, y: APART[name](m(x), y)  # noqa: E731
    _, engine = clipped_sum(records, loss)
    assert engine.caveats()[0] == NO_NOISE
    assert ratio(records, loss, drop=3) <= 1 + 1e-4


def test_numbers_of_one_row_may_meet_in_any_way():
    loss = lambda m, x, y: torch.stack(  # noqa: E731
        [torch.linalg.svdvals(row).sum() for row in m(x).unbind(0)]
    )
    assert clipped_sum(data(ignored=False), loss, Tokens)[0].norm() > 0
