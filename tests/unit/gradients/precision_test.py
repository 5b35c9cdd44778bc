"""What torch's settings say of float32 products, in its old way and its new one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import captured_sum
from vestige import PrivacyEngine
from vestige.gradients import precision

CPU = torch.device("cpu")
PLACES = {
    "everything": torch.backends,
    "products": torch.backends.cuda.matmul,
    "cudnn": torch.backends.cudnn,
    "convolutions": torch.backends.cudnn.conv,
    "recurrent": torch.backends.cudnn.rnn,
    "cpu products": torch.backends.mkldnn.matmul,
    "cpu convolutions": torch.backends.mkldnn.conv,
    "cpu recurrent": torch.backends.mkldnn.rnn,
}


def put(place, value):
    PLACES[place].fp32_precision = value


def old(products=None, convolutions=None):
    if products is not None:
        torch.backends.cuda.matmul.allow_tf32 = products
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions


# What is set, one after the other; whether products and convolutions may be TF32 then.
SETTINGS = {
    "as torch comes": ([], False, True),
    "old products": ([lambda: old(products=True)], True, True),
    "old convolutions off": ([lambda: old(convolutions=False)], False, False),
    "high": ([lambda: torch.set_float32_matmul_precision("high")], True, True),
    "medium": ([lambda: torch.set_float32_matmul_precision("medium")], True, True),
    "new products": ([lambda: put("products", "tf32")], True, True),
    "new for everything": ([lambda: put("everything", "tf32")], True, True),
    "new for everything off": (
        [lambda: put("everything", "ieee"), lambda: put("convolutions", "none")],
        False,
        False,
    ),
    "new cudnn": ([lambda: put("cudnn", "tf32")], True, True),
    "new convolutions": ([lambda: put("convolutions", "tf32")], False, True),
    "new convolutions off": ([lambda: put("convolutions", "ieee")], False, False),
    "new on, old off": ([lambda: put("products", "tf32"), lambda: old(False, False)], False, False),
    "old off, new on": (
        [lambda: old(False, False), lambda: put("everything", "tf32")],
        False,
        True,
    ),
    "old on, new off": ([lambda: old(True, True), lambda: put("everything", "ieee")], True, True),
    "old on, products off": ([lambda: old(products=True), lambda: put("products", "ieee")], 0, 1),
}


@pytest.fixture(autouse=True)
def untouched():
    """Settings of the whole process: every test leaves them as they were."""
    before = seen()
    yield
    torch.set_float32_matmul_precision("highest")
    old(products=False, convolutions=True)
    for place in PLACES:
        put(place, "tf32" if place in ("convolutions", "recurrent") else "none")
    assert seen() == before


@pytest.fixture(params=SETTINGS)
def setting(request):
    acts, products, convolutions = SETTINGS[request.param]
    for act in acts:
        act()
    return bool(products), bool(convolutions)


def asked(ask):
    try:
        return ask()
    except RuntimeError as error:
        return str(error)[:30]


def seen():
    """All that torch says of its settings, what it refuses to say included."""
    return [
        *(place.fp32_precision for place in PLACES.values()),
        asked(lambda: torch.backends.cuda.matmul.allow_tf32),
        asked(lambda: torch.backends.cudnn.allow_tf32),
        asked(torch.get_float32_matmul_precision),
    ]


def test_every_setting_is_read(setting):
    said = precision.products_in_tf32(), precision.convolutions_in_tf32()
    assert said == setting
    expected = 2.0**-9 if any(setting) else 0.0
    assert precision.factor_rounding(torch.device("cuda")) == expected


def test_every_setting_is_put_back(setting):
    before = seen()
    with precision.exact():
        assert not precision.products_in_tf32() and not precision.convolutions_in_tf32()
        assert precision.factor_rounding(CPU) == 0.0
    assert seen() == before
    with precision.products("tf32"):
        assert precision.products_in_tf32()
    assert seen() == before


def test_what_followed_a_wider_setting_still_does():
    put("everything", "tf32")
    put("convolutions", "none")
    with precision.exact(), precision.products("tf32"):
        pass
    assert precision.products_in_tf32() and precision.convolutions_in_tf32()
    put("everything", "ieee")
    assert not precision.products_in_tf32() and not precision.convolutions_in_tf32()
    assert precision.factor_rounding(CPU) == 0.0


def test_every_setting_trains(setting):
    """The self-check included, which wants exact products for a while."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64))
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.released == len(loader)


def test_where_torch_does_not_say_factors_count_as_rounded(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", object())
    assert precision.products_in_tf32()


@pytest.mark.parametrize("name, rounding", [("high", 2.0**-9), ("medium", 2.0**-6)])
def test_factors_that_a_cpu_may_round_are_allowed_for(name, rounding):
    """A record beyond the bound is scaled to the bound less what rounding could add to its sum."""
    torch.set_float32_matmul_precision(name)
    model = nn.Linear(64, 64, bias=False)
    x, g = torch.zeros(1, 64), torch.zeros(1, 64)
    x[0, 0], g[0, 0] = 8.0, 4.0  # powers of two, which no rounding moves
    (total, *_) = captured_sum(model, x, g, bounds=1.0)
    assert float(total.norm()) == pytest.approx(1 - rounding, rel=1e-5)
    put("cpu products", "none")
    put("cpu convolutions", "bf16")
    assert precision.factor_rounding(CPU) == 2.0**-6
