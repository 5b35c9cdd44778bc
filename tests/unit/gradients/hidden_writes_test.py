"""Hidden changes of outputs are refused; changes that autograd records are not."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from tests.support.loss_runs import NO_NOISE, Tokens, clipped_sum, data, flat
from vestige import PrivacyError


class First(Tokens):
    """Its output is a view."""

    def forward(self, tokens, labels=None):
        return super().forward(tokens)[:, :2]


class Matrix(Tokens):
    """Its output is (rows, words), and no view."""

    def forward(self, tokens, labels=None):
        return self.out(self.embed(tokens[:, 0]))


class View(Matrix):
    def forward(self, tokens, labels=None):
        return super().forward(tokens).view(-1, 1, 7)[:, 0]


class Pair(Tokens):
    def forward(self, tokens, labels=None):
        scores = super().forward(tokens)
        return {"scores": scores, "more": (scores * 2,)}


def unseen(out):
    with torch.no_grad():
        out.sub_(out.mean(0) * 2)
    return out


def through_a_view(out):
    views = out[:, :1].unbind(0)
    with torch.no_grad():
        for view in views:
            view.sub_(out.mean(0)[:1])
    return out


def by_out(out):
    with torch.no_grad():
        torch.sub(out, out.mean(0), out=out)
    return out


def of_a_view_that_is_left(out):
    view = out.transpose(0, 1)
    del out
    gc.collect()
    with torch.no_grad():
        view.sub_(view.mean(1, keepdim=True))
    return view.transpose(0, 1)


def assigned(out):
    out.detach()[1:] = out[:1].detach()
    return out


def by_data(out):
    out.data -= out.data.mean(0)
    return out


def replaced(out):
    out.data = out.detach() - out.detach().mean(0)
    return out


def foreach(out):
    with torch.no_grad():
        torch._foreach_sub_([out], [out.mean(0)])
    return out


def later_by_out(out):
    made = out * 1
    with torch.no_grad():
        torch.mul(out.flip(0), 3, out=made)
    return made


def later_by_foreach(out):
    made = out * 1
    foreach(made)
    return made


def later_by_init(out):
    made = out * 1
    torch.nn.init.constant_(made, float(out.detach().sum()))
    return made


HIDDEN = {
    "of what was made of it, by out=": later_by_out,
    "of what was made of it, by foreach": later_by_foreach,
    "of what was made of it, by init": later_by_init,
    "under no_grad": unseen,
    "through views": through_a_view,
    "by out=": by_out,
    "through a view alone": of_a_view_that_is_left,
    "detached": lambda out: (out.detach().sub_(out.detach().mean(0)), out)[1],
    "detached, assigned": assigned,
    "data": by_data,
    "data, a view": lambda out: (out.data.transpose(0, 1).mul_(2), out)[1],
    "data, replaced": replaced,
    "foreach": foreach,
    "between recorded ones": lambda out: unseen(out.mul_(2)).mul_(2),
    "before a recorded one": lambda out: unseen(out).mul_(2),
    "of what was made of it": lambda out: unseen(out * 1),
    "of a view of that": lambda out: unseen((out * 1).transpose(1, 2)).transpose(1, 2),
}


@pytest.mark.parametrize("model", [Tokens, First])
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_changes_are_refused(name, model):
    def loss(m, x, y):
        out = HIDDEN[name](m(x))
        return flat(out, y[:, : out.shape[1]])

    with pytest.raises(PrivacyError, match=r"changed in place .*no_grad.*Make a new tensor"):
        clipped_sum(data(ignored=False), loss, model=model)


def test_any_output_may_be_changed_and_losses_of_rows_are_checked_as_well():
    def loss(m, x, y):
        out = m(x)
        unseen(out["more"][0])
        return out["more"][0].square().mean((1, 2))

    with pytest.raises(PrivacyError, match="changed in place"):
        clipped_sum(data(ignored=False), loss, model=Pair)


def with_a_mask(out):
    out[:, 0] = 0.0
    return out


def metrics(out):
    with torch.no_grad():
        out.clone().sub_(out.mean(0))
        out.softmax(-1).div_(2)
        out.detach().clone().sub_(1)
    return out


RECORDED = {
    "mul_": (lambda out: out.mul_(2), lambda out: out * 2),
    "twice": (lambda out: out.mul_(2).add_(1), lambda out: out * 2 + 1),
    "relu_": (lambda out: F.relu_(out), torch.relu),
    "relu, in place": (lambda out: F.relu(out, inplace=True), torch.relu),
    "a view": (lambda out: (out.view(-1).mul_(2), out)[1], lambda out: out * 2),
    "assigned": (
        with_a_mask,
        lambda out: torch.cat([torch.zeros_like(out[:, :1]), out[:, 1:]], 1),
    ),
    "numbers that are looked at": (metrics, lambda out: out),
}


@pytest.mark.parametrize("model", [Matrix, View])
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_changes_stay_as_they_are(name, model):
    got, expected = (
        clipped_sum(
            data(ignored=False),
            lambda m, x, y, f=f: F.cross_entropy(f(m(x)), y[:, 0]),
            model=model,
        )
        for f in RECORDED[name]
    )
    assert torch.allclose(got[0], expected[0], rtol=1e-5, atol=1e-7) and got[0].norm() > 0
    assert got[1].caveats()[0] == NO_NOISE
    assert not any("loss" in caveat for caveat in got[1].caveats())


def test_changes_after_backward_are_nobodys_business():
    def loss(m, x, y):
        out = m(x)
        value = flat(out, y)
        value.register_hook(lambda g: (unseen(out), g)[1])
        return value

    got, _ = clipped_sum(data(ignored=False), loss)
    assert got.norm() > 0
