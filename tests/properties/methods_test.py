"""Every registered method through the same battery."""

from __future__ import annotations

import io
import math
from collections import Counter

import pytest
import torch

from tests.support.small_runs import LOT, SIGMA, N, flat, private, run, small
from vestige import ConfigError
from vestige.gradients.clipping import split_clipping
from vestige.gradients.groups import partition
from vestige.methods import (
    DPFTRL,
    DPIS,
    DPSAM,
    METHODS,
    BandedInverse,
    Disk,
    Doppler,
    FractionalNoise,
    Kalman,
    planned_charges,
    query_weight,
    resolve,
)
from vestige.methods.method import Feature
from vestige.privacy.accounting import Charge, events_of
from vestige.privacy.ledger import merge
from vestige.train.config import TrainConfig
from vestige.train.training import train

PRIVATE = [name for name, method in METHODS.items() if method.private]
FIXED = [name for name in METHODS if Feature.NOISE_SCHEDULE in resolve(name).excludes()]
VARIANTS = [
    DPSAM(sample="fresh"),
    Disk(ahead=0.5),
    Kalman(beta=0.7),
    Doppler(beta=0.7),
    DPFTRL(restart=2),
    DPFTRL(honaker=False),
    BandedInverse(momentum=0.9, restart=2),
]
STEPS = 9

# What the command line needs beside the defaults for a sane accuracy in a few epochs.
TUNED = {
    "geodp-box": {"noise_multiplier": 0.1},  # at 1.0 its directions are noise: docs/methods
    "geodp": {"lr": 2.0, "settings": {"bounding": 0.01}},
    "dp-ftrl": {"noise_multiplier": 3.0},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_the_digits(name, tmp_path):
    options = {"epochs": 8, "noise_seed": 3, "accountant": "rdp"} | TUNED.get(name, {})
    result = train(TrainConfig(method=name, out=tmp_path / "run", **options))
    assert result["accuracy"] > 0.8
    if METHODS[name].private:
        assert math.isfinite(result["epsilon"]) and result["guarantee"] != "none"
    else:
        assert result["epsilon"] is None and result["guarantee"] == "none"
        assert any("no guarantee" in caveat for caveat in result["caveats"])


@pytest.mark.parametrize("method", [*PRIVATE, *VARIANTS], ids=str)
@pytest.mark.parametrize("clipping", [None, "quantile"])
def test_what_was_planned_is_what_is_charged(method, clipping):
    chosen = small(method)
    if clipping and Feature.MOVING_CLIP in chosen.excludes():
        pytest.skip("refuses quantile clipping, which another test asserts")
    engine, model, *rest = private(method, steps=STEPS, clipping=clipping)
    run(engine, model, *rest, STEPS)
    form = chosen.clipping if clipping is None else clipping
    groups = partition(model, split_clipping(form)[0]).count
    planned = planned_charges(chosen, form, groups, N, LOT, LOT / N, STEPS)
    found, expected = merge(engine.ledger.events), merge(events_of(planned, SIGMA))
    assert [e.count for e in found] == [e.count for e in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.sample_rate == pytest.approx(theirs.sample_rate, rel=1e-12)
        assert ours.noise_multiplier == pytest.approx(theirs.noise_multiplier, rel=1e-12)


BESIDE = 1 / 2 / (LOT / 20)  # the inverse multiplier of one count


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("dp-sgd", {}, {(0.25, SIGMA): 9}),
        ("dp-sam", {}, {(0.25, SIGMA / math.sqrt(2)): 9}),
        (DPSAM(sample="fresh"), {}, {(0.25, SIGMA): 9}),
        ("dp-sam-per-example", {}, {(0.25, SIGMA): 9}),
        (Disk(ahead=0.5), {}, {(0.25, SIGMA): 9}),
        (Kalman(beta=0.5), {}, {(0.25, SIGMA / 0.5): 9}),
        ("geodp-box", {}, {(0.25, SIGMA): 9}),
        ("geodp-tangent", {}, {(0.25, SIGMA): 9}),
        # Three epochs of four lots are begun: three normalisers, and lots at 6 / (0.5 * 24).
        (DPIS(floor=0.5, norm_noise=7.0), {}, {(0.5, SIGMA): 9, (1.0, 7.0): 3}),
        # Three bands: lots 0, 3 and 6 begin a cycle at three times the rate.
        (FractionalNoise(bands=3), {}, {(0.75, SIGMA): 3}),
        (FractionalNoise(bands=1), {}, {(0.25, SIGMA): 9}),
        (FractionalNoise(bands=4), {}, {(1.0, SIGMA): 3}),
        # One tree of 9 leaves, completed to 16: a record in lots 0, 4 and 8 is in three leaves, in
        # three nodes of two, two of four with 1, two of eight with counts 2 and 1, the root with 3.
        (DPFTRL(), {}, {(1.0, SIGMA / math.sqrt(3 + 3 + 3 + (4 + 1) + 9)): 1}),
        # Trees of four leaves, one epoch: each record once, in a leaf, a pair and the root.
        (DPFTRL(restart=1), {}, {(1.0, SIGMA / math.sqrt(3)): 3}),
        # White noise without amplification: a record is in at most three of nine lots.
        (BandedInverse(bands=1), {}, {(1.0, SIGMA / math.sqrt(3)): 1}),
        # d = 1, -1/2: columns 1, 1/2, 1/4, ... of four lots of a block, in which a record is once.
        (BandedInverse(bands=2, restart=1), {}, {(1.0, SIGMA / math.sqrt(85 / 64)): 3}),
        ("dp-sgd", {"clipping": "quantile"}, {(0.25, 1 / math.hypot(1 / SIGMA, BESIDE)): 9}),
        (
            "dp-sgd",
            {"clipping": "quantile_per_layer"},
            {(0.25, 1 / math.hypot(1 / SIGMA, math.sqrt(2) * BESIDE)): 9},
        ),
        (
            Kalman(beta=0.5),
            {"clipping": "quantile"},
            {(0.25, 1 / math.hypot(0.5 / SIGMA, BESIDE)): 9},
        ),
        (
            "dp-sam",
            {"clipping": "quantile"},
            {(0.25, 1 / math.sqrt(2 / SIGMA**2 + BESIDE**2)): 9},
        ),
        ("geodp", {}, {(0.25, 0.0): 9}),
        ("dp-adam-ac", {}, {(0.25, 0.0): 9}),
    ],
    ids=str,
)
def test_the_events_are_those_computed_by_hand(method, options, expected):
    engine, *rest = private(method, steps=STEPS, **options)
    run(engine, *rest, STEPS)
    found = Counter()
    for event in engine.ledger.events:
        found[round(event.sample_rate, 9), round(event.noise_multiplier, 9)] += event.count
    assert found == {(round(q, 9), round(z, 9)): n for (q, z), n in expected.items()}


@pytest.mark.parametrize("method", [*PRIVATE, *VARIANTS], ids=str)
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise(method):
    chosen = small(method)

    def epsilon(steps=12, rate=0.1, noise=1.5):
        from vestige.privacy import accounting

        size = round(LOT / rate)
        charges = planned_charges(chosen, chosen.clipping, 2, size, LOT, LOT / size, steps)
        return accounting.epsilon(events_of(charges, noise), 1e-5, "rdp")

    assert 0 < epsilon() < math.inf
    assert epsilon(steps=12) < epsilon(steps=60)
    assert epsilon(noise=2.5) < epsilon(noise=1.5) < epsilon(noise=0.8)
    # One does not sample; with restarts, blocks are longer at lower rates.
    if chosen.name != "dp-ftrl" and not getattr(chosen, "restart", None):
        assert epsilon(rate=0.05) < epsilon(rate=0.1) < epsilon(rate=0.3)


def saved_and_loaded(method, steps, **options):
    engine, model, optimizer, loader = private(method, steps=13, **options)
    run(engine, model, optimizer, loader, steps)
    buffer = io.BytesIO()
    torch.save([engine.state_dict(), model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    engine, model, optimizer, loader = private(method, steps=13, **options)
    engine.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    return engine, model, optimizer, loader


@pytest.mark.parametrize("clipping", [None, "quantile"])
@pytest.mark.parametrize("method", [*METHODS, *VARIANTS], ids=str)
def test_saving_and_loading_in_the_middle_continues_bit_for_bit(method, clipping):
    """In test mode; correlated noise is drawn again up to where the run was."""
    if method == "dp-adam-ac":
        pytest.skip("keeps a window of raw norms, which are private and are never saved")
    if clipping and Feature.MOVING_CLIP in small(method).excludes():
        pytest.skip("refuses quantile clipping, which another test asserts")
    whole = private(method, steps=13, clipping=clipping)
    run(*whole, 13)
    engine, model, optimizer, loader = saved_and_loaded(method, 6, clipping=clipping)
    run(engine, model, optimizer, loader, 7)
    assert torch.equal(flat(model.parameters()), flat(whole[1].parameters()))
    if engine._run.door.correlation:  # the stretch under way is charged again: see interrupts_test
        assert 0 <= engine.ledger.steps - whole[0].ledger.steps <= 1
    else:
        assert engine.ledger.events == whole[0].ledger.events


@pytest.mark.parametrize("name", METHODS)
def test_every_method_may_be_averaged_and_nothing_else_changes(name):
    bare = private(name, steps=6)
    run(*bare, 6)
    engine, *rest = private(name, averaging="ema", steps=6)
    run(engine, *rest, 6)
    assert torch.equal(flat(rest[0].parameters()), flat(bare[1].parameters()))
    assert engine.ledger.events == bare[0].ledger.events
    assert torch.isfinite(flat(engine.averaged_state_dict().values())).all()


@pytest.mark.parametrize("form", ["auto", "auto_per_layer", "quantile", "quantile_per_layer"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_other_clippings_or_says_why_not(name, form):
    excluded = resolve(name).excludes()
    refused = (
        Feature.MOVING_CLIP in excluded
        or (Feature.GROUPS in excluded and form.endswith("per_layer"))
        or name == "dp-adam-ac"
        or (name == "dp-adam-ac-private" and form != "quantile")
    )
    if refused:
        with pytest.raises(ConfigError, match=f"method '{name}'"):
            private(name, clipping=form, steps=6)
        return
    engine, *rest = private(name, clipping=form, steps=6)
    run(engine, *rest, 6)
    assert torch.isfinite(flat(rest[0].parameters())).all()
    if name == "dp-adam-ac-private":
        return  # is made of quantile clipping
    plain, *others = private(name, clipping=engine.plan.clipping.split(", ")[1], steps=6)
    run(plain, *others, 6)
    if form.startswith("auto"):
        assert engine.ledger.events == plain.ledger.events
    else:
        ours, theirs = engine.get_epsilon(1e-5), plain.get_epsilon(1e-5)
        assert ours > theirs if METHODS[name].private else ours == theirs == math.inf
        assert engine.parts["clip"].bounds != engine.plan.bounds


def test_the_methods_that_refuse_are_the_ones_whose_sensitivity_is_fixed():
    assert FIXED == ["dp-is", "dp-ftrl", "fractional-noise", "banded-inverse"]


@pytest.mark.parametrize("name", [n for n in METHODS if not METHODS[n].private])
def test_without_a_guarantee_there_is_no_target(name):
    engine, *_ = private(name)
    assert engine.get_epsilon(1e-5) == 0.0
    with pytest.raises(ConfigError, match="has no guarantee"):
        planned_charges(resolve(name), "flat", 1, N, LOT, LOT / N, 5)
    with pytest.raises(ConfigError, match="has no guarantee"):
        train(TrainConfig(method=name, epsilon=3.0, epochs=1))


def test_a_charge_combines_inverse_squares():
    charge = Charge(0.1, weight=0.6, beside=0.4)
    assert charge.event(2.0).noise_multiplier == pytest.approx((0.3**2 + 0.4**2) ** -0.5)
    assert charge.event(0.0).noise_multiplier == 0.0
    assert Charge(0.1, 0.5).event(1.1).noise_multiplier == 1.1 / 0.5
    assert Charge(1.0, 0.0, 0.25).event(9.0).noise_multiplier == 4.0
    assert query_weight(Kalman(beta=0.5), None) == 0.5
