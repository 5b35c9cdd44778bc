"""Labels on tensors: what is written to on the side, leaves the tensors or outlasts the pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.attribution import (
    PAIR,
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
from vestige import PrivacyEngine, PrivacyError
from vestige.gradients import tracker


def inplace_view(s: Fn, x: Tensor) -> Tensor:
    h = s.a(x) * 1.0
    h[:, :2].mul_(2.0)
    h.view(len(x), -1)[:, 1:].add_(1.0)
    return s.b(h)


def keeping(where: str) -> Callable[[], nn.Module]:
    """A model that keeps tensors of the batch somewhere."""

    def run(s: Fn, x: Tensor) -> Tensor:
        kept = x.detach().mean(0)
        if where == "attribute":
            s.kept = kept
        elif where == "list":
            s.kept.append(kept)
        elif where == "dict of lists":
            s.kept["a"] = [kept]
        elif where == "dataclass":
            s.kept.value = kept
        elif where == "buffer":
            s.kept += kept
        elif where == "buffer through .data":
            s.kept.data.copy_(kept)
        elif where == "buffer through a view of .data":
            s.kept.data.view(2, 3).copy_(kept.view(2, 3))
        elif where == "buffer by assignment to .data":
            s.kept.data = kept
        elif where == "buffer by out=" or where == "a tensor's view by out=":
            torch.mean(x.detach(), 0, out=s.kept[:])
        elif where == "without gradients":
            with torch.no_grad():
                s.kept = x.mean(0)
        else:
            s.kept = kept
        return s.a(x)

    def make() -> nn.Module:
        model = Extra(run, a=nn.Linear(6, 4)) if where == "extra state" else layer(run)()
        if where.startswith("buffer"):
            model.register_buffer("kept", torch.zeros(6, dtype=torch.float64))
        else:
            object.__setattr__(model, "kept", _EMPTY.get(where, lambda: None)())
        return model

    return make


@dataclasses.dataclass
class Box:
    value: Any = None


class Holder:
    """No module, no container: get_extra_state hands out what it has."""

    value: Any = None


class Extra(Fn):
    def get_extra_state(self) -> Any:
        return {"kept": getattr(self, "holder", Holder()).value}

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.holder = Holder()
        self.holder.value = x.detach()
        return self.a(x)


_EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict of lists": dict,
    "dataclass": Box,
    "a tensor's view by out=": lambda: torch.zeros(6, dtype=torch.float64),
}


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x - x.mean(0)


def written(write: Callable[[Tensor], None]) -> Callable[[], nn.Module]:
    """An activation is written to on the side."""

    def run(s: Fn, x: Tensor) -> Tensor:
        h = x * 1.0
        v = h.view(-1, 6)
        write(h)
        return s.a(v)

    return layer(run)


def set_data(s: Fn, x: Tensor) -> Tensor:
    h = x * 1.0
    h.data = h.data - h.data.mean(0)
    return s.a(h)


def view_of_data(h: Tensor) -> None:
    h.data.view(-1, 6).copy_(h.mean(0).expand_as(h))


def into_out(h: Tensor) -> None:
    torch.sub(h, h.mean(0), out=h.detach())


EXACT: dict[str, Case] = {
    "in place on views": (lambda: Fn(inplace_view, **linear()), vectors(6), {4, 6}),
}

# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "how many": (
        layer(lambda s, x: s.a(x) * (x > RARE).nonzero().shape[0]),
        V,
        "shape of what",
    ),
    "how many, by len": (layer(lambda s, x: s.a(x) * len(x[x > RARE])), V, "shape of what"),
    "how many, by numel": (
        layer(lambda s, x: s.a(x) * x[x > RARE].numel()),
        V,
        "shape of what",
    ),
    "lengths.max()": (
        layer(lambda s, x, n: s.a(x[:, : int(n.max())]).mean(1)),
        PAIR,
        "int|index|item",
    ),
    "a branch on the mean": (
        layer(lambda s, x: s.a(x) if x.mean() > 0 else -s.a(x)),
        V,
        "depend|bool",
    ),
    "tolist": (layer(lambda s, x: s.a(x) * x.sum().tolist()), V, "'tolist'"),
    "item": (layer(lambda s, x: s.a(x) * x.sum().item()), V, "'item'"),
    "printed": (layer(lambda s, x: s.a(x) * len(str(x.detach()))), V, "'__repr__'"),
    "formatted": (
        layer(lambda s, x: s.a(x) * float(f"{x.detach().abs().max()}")),
        V,
        "'__format__'",
    ),
    "an address": (layer(lambda s, x: s.a(x) * (x.data_ptr() > 0)), V, "'data_ptr'"),
    "a storage": (
        layer(lambda s, x: s.a(x) * x.untyped_storage().nbytes()),
        V,
        "'untyped_storage'",
    ),
    "numpy": (layer(lambda s, x: s.a(x) * float(x.detach().numpy().sum())), V, "'numpy'"),
    "activations through .data": (written(lambda h: h.data.sub_(h.mean(0))), V, "in-place|sub"),
    "activations by assignment to .data": (layer(set_data), V, "data|sub"),
    "activations through a view of .data": (written(view_of_data), V, "in-place|copy|expand"),
    "activations by out=": (written(into_out), V, "sub|in-place"),
    "written through another view": (
        written(lambda h: h[:1].copy_(h[1:2])),
        V,
        "in-place",
    ),
    "a scripted function": (layer(lambda s, x: s.a(scripted(x))), V, "outside the model|depend"),
    **{
        f"kept in {where}": (keeping(where), V, "keeps values|was changed")
        for where in (
            "attribute",
            "list",
            "dict of lists",
            "dataclass",
            "extra state",
            "buffer",
            "buffer through .data",
            "buffer through a view of .data",
            "buffer by assignment to .data",
            "buffer by out=",
            "a tensor's view by out=",
            "without gradients",
        )
    },
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


# -- mutants ----------------------------------------------------------------------------------


def nothing_is_kept(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "check_kept", lambda self: None)


def values_may_leave(patch: Any) -> None:
    patch.setattr(tracker, "VALUES", [])


def lengths_may_leave(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "refuse_length", lambda self, tensor: None)


def data_is_not_spread(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "_spread", lambda self, target: None)
    patch.setattr(tracker.Tracker, "_note_written", lambda self, tensor: None)


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
    "what is kept is not looked at": (
        nothing_is_kept,
        lambda: refused(*MIXED["kept in list"][:2]),
    ),
    "values may leave": (values_may_leave, lambda: refused(*MIXED["item"][:2], False)),
    "lengths may leave": (lengths_may_leave, lambda: refused(*MIXED["how many, by len"][:2])),
    "writes through .data stay there": (
        data_is_not_spread,
        lambda: refused(*MIXED["kept in buffer through a view of .data"][:2], False),
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    assert_noticed(monkeypatch, *MUTANTS[name])


class Keeps(nn.Module):
    """Keeps its last input in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return x


def test_a_module_that_is_put_in_later_may_keep_nothing_either():
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(9, 3)), batch_size=3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (x,) in loader:
        engine.backward(model(x).sum(1))
        optimizer.step()
        break
    model[0] = Keeps()
    with pytest.raises(PrivacyError, match="keeps values of the batch"):
        for (x,) in loader:
            model(x)
