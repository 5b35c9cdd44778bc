"""Models that multiply rows: with constants or with themselves, and never with each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.attribution import (
    Case,
    Fn,
    Mixed,
    V,
    check_exact,
    check_refused,
    layer,
    vectors,
)


def shared(s: Fn, x: Tensor) -> Tensor:
    return F.linear(x, s.h(x)[0].view(3, 6))


EXACT: dict[str, Case] = {
    "packed einsum": (
        lambda: Fn(
            lambda s, x: torch.einsum("bti,ijk,bsj->bk", x, s.w, x),
            w=nn.Parameter(torch.randn(6, 6, 3)),
        ),
        vectors(4, 6),
        {3, 4, 6},
    ),
    "a hypernetwork, one weight a row": (
        lambda: Fn(
            lambda s, x: torch.bmm(s.h(x).view(-1, 3, 6), x.unsqueeze(2)), h=nn.Linear(6, 18)
        ),
        vectors(6),
        {3, 6},
    ),
}

# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "pairs": (layer(lambda s, x: (s.a(x) @ s.a(x).t()) @ x), V, "matmul"),
    "distances": (layer(lambda s, x: torch.cdist(s.a(x), s.a(x))), V, "'cdist'"),
    "einsum of pairs": (
        layer(lambda s, x: torch.einsum("bi,ci->bc", s.a(x), x[:, :4])),
        V,
        "'einsum'",
    ),
    "a row's weights for all": (lambda: Fn(shared, h=nn.Linear(6, 18)), V, "linear"),
    "attention on (rows, width)": (
        lambda: Fn(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(6, 2)),
        V,
        "attention|meet",
    ),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])
