"""Gradient hooks of a model: a hook may change a row's gradient by that row alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests.support.attribution import (
    RARE,
    Case,
    Fn,
    Mixed,
    V,
    check_exact,
    check_refused,
    linear,
    vectors,
)


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    def run(s: Fn, x: Tensor) -> Tensor:
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(hook)
        return s.b(h.tanh())

    return lambda: Fn(run, **linear())


EXACT: dict[str, Case] = {
    "a hook that keeps rows apart": (
        hooked(lambda g: 3 * g / (1 + g.norm(dim=1, keepdim=True))),
        vectors(6),
        {4, 6},
    ),
}

# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "a hook that centres": (hooked(lambda g: g - g.mean(0)), V, "attributed|depends|mean|sub"),
    "a hook that clips what is rare": (
        hooked(lambda g: g * (RARE / g.norm()).clamp(max=1.0)),
        V,
        "'norm'",
    ),
    "a hook that writes in place": (hooked(lambda g: g.clone().sub_(g.sum(0))), V, "'(sum|sub_)'"),
    "a hook that normalises": (hooked(lambda g: g / g.norm()), V, "depends|norm"),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])
