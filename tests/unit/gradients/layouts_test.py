"""Layouts of rows: what is said of a tensor's numbers is what torch makes of numbered rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.loss_runs import (
    NO_NOISE,
    ROWS,
    by_position,
    clipped_sum,
    data,
    flat,
)
from vestige import PrivacyError
from vestige.gradients.layouts import Layout, Layouts

PERMUTED = torch.randperm(12, generator=torch.Generator().manual_seed(0))


def followed(operation, shape=(12, 5, 4), axis=0):
    """The layout of what an operation makes of an output, and the rows that it really has."""
    rows = shape[axis]
    numbers = torch.arange(float(rows)).view([-1 if i == axis else 1 for i in range(len(shape))])
    output = numbers.expand(shape).clone().requires_grad_() * 1
    made = operation(output)
    node = output.grad_fn
    return Layouts(rows, axis, lambda n: n is node).of(made.grad_fn, made.output_nr), made


def spelled(layout: Layout) -> torch.Tensor:
    """The row of every number."""
    rows = torch.full((), float(layout.first))
    for axis in layout.axes:
        places = torch.zeros(())
        for size, step in axis:
            places = (places[..., None] + step * torch.arange(float(size))).flatten()
        rows = rows[..., None] + places.reshape(-1)
    return rows


MOVES = {
    "itself": lambda o: o.clone(),
    "folded": lambda o: o.view(3, 4, 5, 4),
    "folded, flat": lambda o: o.view(3, 80),
    "with positions": lambda o: o.flatten(0, 1),
    "with positions and back": lambda o: o.flatten(0, 1).view(2, 6, 5, 4),
    "with positions, other axes": lambda o: o.flatten().view(6, 2, 2, 10),
    "transposed": lambda o: o.transpose(0, -1),
    "transposed and flat": lambda o: o.transpose(0, 1).flatten(0, 1),
    "permuted": lambda o: o.view(3, 4, 5, 4).permute(1, 3, 0, 2).flatten(0, 1),
    "t": lambda o: o[:, 0].t(),
    "strided": lambda o: o[1::3],
    "strided twice": lambda o: o[1::2][::2],
    "the last ones": lambda o: o[-3:],
    "halves": lambda o: o.chunk(2)[1],
    "parts": lambda o: o.split([3, 4, 5])[2],
    "one row": lambda o: o[-2],
    "one row of all": lambda o: o.unbind(0)[7],
    "rows of positions": lambda o: o.flatten(0, 1)[10:25],
    "positions of a row": lambda o: o.flatten(0, 1)[11:14],
    "one position of a row": lambda o: o.flatten(0, 1)[13],
    "positions": lambda o: o[:, 1:-1],
    "windows": lambda o: o.unfold(0, 3, 2),
    "repeated": lambda o: o.repeat(2, 3, 1, 1),
    "repeated each": lambda o: o.repeat_interleave(2, 0),
    "expanded": lambda o: o[:, None].expand(12, 3, 5, 4),
    "squeezed": lambda o: o[:, :1].squeeze(1).unsqueeze(0),
    "halves on top": lambda o: torch.stack(o.chunk(2)),
    "rows on top": lambda o: torch.stack([row.flip(0) for row in o], 1),
    "rows again": lambda o: torch.cat([o[i : i + 1] for i in range(12)]),
    "halves again": lambda o: torch.cat([o[:5], o[5:]]),
    "positions side by side": lambda o: torch.cat([o, o[:, :2]], 1),
    "picked positions": lambda o: o[:, torch.tensor([[0, 1], [3, 2]])],
    "padded": lambda o: F.pad(o, (0, 0, 1, 2)) + o.mean(1, keepdim=True),
    "a position of each": lambda o: o[torch.arange(12), torch.arange(12) % 5],
    "a mean of positions": lambda o: o.mean(1),
    "kept": lambda o: o.amax((1, 2), keepdim=True),
    "with constants": lambda o: torch.where(torch.ones(3, 12, 5, 1) > 0, o, 0.0) + torch.zeros(4),
    "weighted": lambda o: o @ torch.eye(4),
    "weighted, folded": lambda o: torch.eye(5) @ o,
    "weighted, and a constant": lambda o: torch.addmm(torch.zeros(4), o[:, 0], torch.eye(4)),
}


@pytest.mark.parametrize("name", MOVES)
def test_rows_are_where_torch_moves_them(name):
    layout, made = followed(MOVES[name])
    assert layout is not None and layout.sizes() == made.shape
    # Padding has no row; what was padded is found by the row's own mean that is added.
    expected = made if name != "padded" else made.amax((1, 2), keepdim=True) / 2
    assert torch.equal(spelled(layout), expected.expand(made.shape).detach())


def test_rows_need_not_come_first():
    layout, made = followed(lambda o: o.transpose(0, 1)[::2].reshape(2, -1), (3, 8, 2), axis=1)
    assert torch.equal(spelled(layout), made.detach())


ORDERS = {
    "rolled": lambda o: o.roll(1, 0),
    "rolled in a line": lambda o: o.roll(1),
    "turned": lambda o: o.flip(0),
    "permuted": lambda o: o[PERMUTED],
    "selected": lambda o: o.index_select(0, PERMUTED),
    "gathered": lambda o: o.gather(0, PERMUTED[:, None, None].expand(12, 5, 4)),
    "halves turned": lambda o: torch.cat([o[6:], o[:6]]),
    "cut across": lambda o: o[:, 0].reshape(-1)[:40].view(5, 8).repeat(3, 1)[:12, :4, None],
}


@pytest.mark.parametrize("name", ORDERS)
def test_other_orders_are_told_from_the_first_and_known_again(name):
    order = ORDERS[name]
    layout, _ = followed(order)
    assert layout is not None and layout != followed(lambda o: o.clone())[0]
    assert layout == followed(lambda o: order(o).exp())[0]


@pytest.mark.parametrize(
    "operation",
    [
        lambda o: o.mean(0),
        lambda o: o.masked_select(o > 3),
        lambda o: o[0::2] - o[1::2],
        lambda o: o.as_strided((3, 3), (1, 2)),
    ],
)
def test_what_is_not_known_is_not_claimed(operation):
    assert followed(operation)[0] is None


# -- losses -----------------------------------------------------------------------------------


def folded(s, *sizes):
    return s[:, 0].reshape(*sizes, 7)


MEETING = {
    "Mean goes over rows": lambda s: (folded(s, 4, 4) - folded(s, 4, 4).mean(0)).square().mean(),
    "Mean goes over": lambda s: (
        (folded(s, 4, 4) - folded(s, 4, 4).mean(1, keepdim=True)).square().mean()
    ),
    "Mean goes": lambda s: F.softmax(s.view(8, 2, 16, 7).mean(1), -1).repeat(2, 1, 1).mean(),
    "Sum goes over rows": lambda s: (
        s.transpose(0, 1).reshape(16, 2, 8, 7).sum(1).repeat(2, 1, 1).square().mean()
    ),
    "Softmax goes over rows": lambda s: s.flatten(0, 1).softmax(0).square().mean(),
    "Sort goes over rows": lambda s: s[:, 0].sort(0).values.square().mean(),
    "Var goes over rows": lambda s: torch.stack(s.chunk(2)).var(0).sqrt().mean(),
    "MseLoss puts different rows": lambda s: F.mse_loss(*s.chunk(2)),
    "Sub puts different rows": lambda s: (s[0::2] - s[1::2]).square().mean(),
    "Sub puts different": lambda s: (s[:-1, :, None] - s[1:, :, None]).repeat(1, 1, 16, 1)
    .square().mean(),
    "Mul puts different rows": lambda s: (s[:8] * s[8:]).mean(),
    "Mul puts": lambda s: (s * s.flip(0)).mean(),
    "Sub puts": lambda s: (s - s.roll(1, 0)).square().mean(),
    "L1Loss|Sub puts": lambda s: (s - s[torch.arange(len(s)) - 1]).abs().mean(),
    "Sub (puts|spreads)": lambda s: (s[:, None, 0] - s[None, :, 0]).square().mean(),
    r"outputs \(Bmm\)": lambda s: (
        torch.bmm(folded(s, 4, 4), folded(s, 4, 4).transpose(1, 2)).exp().repeat(4, 1, 1).mean()
    ),
    r"outputs \(Mm\)": lambda s: (torch.ones(16, 16) @ s[:, 0]).square().mean(),
}  # fmt: skip

ACCEPTED = {
    "rows and positions": lambda s, y: flat(s, y),
    "transposed": lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
    "shifted": lambda s, y: F.cross_entropy(s[:, :-1].reshape(-1, 7), y[:, 1:].reshape(-1)),
    "positions compared": lambda s, y: (s[:, 1:] - s[:, :-1]).square().mean(),
    "positions folded": lambda s, y: (
        s.view(16, 4, 4, 7) - s.view(16, 4, 4, 7).mean(2, keepdim=True)
    ).square().mean(),
    "flat, folded again": lambda s, y: (
        s.flatten(0, 1).softmax(1).view(16, 16, 7).std(1).mean()
    ),
    "positions first": lambda s, y: s[:, :12].transpose(0, 1).softmax(0).square().mean(),
    "attention in rows": lambda s, y: torch.bmm(s, s.transpose(1, 2)).softmax(2).square().mean(),
    "one slice": lambda s, y: s[0::2].square().mean(),
    "two slices": lambda s, y: s[:8].square().mean() + 2 * s[8:].square().mean(),
    "two classifications": lambda s, y: flat(s[:8], y[:8]) + flat(s[8:], y[8:]),
    "slices joined": lambda s, y: (torch.cat([s[:8].exp(), s[8:].exp()]) - s).square().mean(),
    "a linear fold": lambda s, y: by_position(s, y).mean(1).view(-1, 4).mean(1).mean(),
    "slices added up": lambda s, y: (lambda l: (l[0::2] + l[1::2]).mean())(by_position(s, y)),
    "the same order": lambda s, y: (lambda i: (s.exp()[i] - s[i]).square().mean())(
        torch.arange(len(s)).flip(0)
    ),
}  # fmt: skip

MODES = {
    "records": lambda: (ROWS, {}),
    "users": lambda: (
        ROWS,
        {"units": torch.arange(ROWS) // 4, "rows_per_unit": 4, "dataset_size": ROWS // 4},
    ),
    "views": lambda: (
        ROWS // 2,
        {"views": 2, "augment": lambda x: x, "dataset_size": ROWS // 2},
    ),
}


def run(loss, mode):
    """One lot of 16 rows: of as many records, of 4 users, or of 8 records with two views each."""
    records, options = MODES[mode]()
    return clipped_sum(tuple(t[:records] for t in data(ignored=False)), loss, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", MEETING)
def test_rows_that_meet_through_views_and_slices_are_refused(said, mode):
    with pytest.raises(PrivacyError, match=f"(?s)examples meet in the loss: .*{said}"):
        run(lambda m, x, y: MEETING[said](m(x)), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ACCEPTED)
def test_rows_by_themselves_are_accepted_in_any_layout(name, mode):
    got, engine = run(lambda m, x, y: ACCEPTED[name](m(x), y), mode)
    assert got.norm() > 0 and engine.caveats()[0] == NO_NOISE
    assert not any("loss" in caveat for caveat in engine.caveats())
