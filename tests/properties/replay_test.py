"""Record and replay: a run on D, then one on a neighbour of D with everything released frozen.

Whatever is computed outside the clipped sum (branches, gates, exponents, clip bounds, noise scales,
diagnostics, weights) must come out identical, bit for bit, since it may depend on the releases
alone; and every query may move by its gain times its bound, no further. The methods that were
published as private and are not must fail this, and do.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.mutants import history_of_raw_sums
from tests.support.replays import (
    LOT,
    PRIVATE,
    SIZE,
    SMALL,
    STEPS,
    VARIANTS,
    both,
)
from vestige.audit.tape import Tape
from vestige.audit.verify import verify
from vestige.audit.verify.replay import SPARSE, compare, examine, record, same
from vestige.audit.verify.runs import neighbour, records, small_run
from vestige.geometry import to_hyperspherical
from vestige.geometry.published import angle_scale
from vestige.gradients.clipping import Quantile
from vestige.methods import (
    DPSGD,
    DPAdamAC,
    GeoDP,
)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {}) for name in PRIVATE),
        *((method, {}) for method in VARIANTS),
        ("fo", {"workers": 1}),
        ("sma", {"workers": 1}),
        ("dp-sgd", {"clipping": "quantile"}),
        ("fo", {"clipping": "quantile_per_layer"}),
        ("dp-sam", {"clipping": Quantile("per_layer", count_noise=2.0)}),
        ("geodp-tangent", {"clipping": "quantile"}),
    ],
    ids=str,
)
def test_everything_but_the_sum_depends_on_the_releases_alone(method, options):
    pair = both(method, **options)
    first, second = pair.first, pair.second
    assert len(first.looks) == len(second.looks)
    for a, b in zip(first.looks, second.looks, strict=True):
        assert (a.kind, a.lot, a.step, a.charges) == (b.kind, b.lot, b.step, b.charges)
        assert same(a.branch, b.branch)
        assert (a.bounds, a.stds) == (b.bounds, b.stds)
    assert first.told == second.told
    assert same(first.weights, second.weights)
    assert same(first.gradients, second.gradients)
    for a, b in pair.sums:
        move, joint = a.query - b.query, math.sqrt(sum(c * c for c in a.bounds))
        assert float(move.norm()) <= a.gain * joint * (1 + 1e-6)
        for segment, bound in zip(first.segments, a.bounds, strict=True):
            assert float(move[segment].norm()) <= a.gain * bound * (1 + 1e-6)
        if a.counts is not None:
            assert float((a.counts - b.counts).abs().max()) <= 0.5
    present = [share for share in pair.used if share > 0]
    assert 0 < len(present) < len(pair.used)  # the record was in some lots and not in others
    assert max(present) > 0.7  # and it nearly used its bound up
    for a, b in zip(first.measurements, second.measurements, strict=True):
        assert 0 < float(a.total - b.total) <= 1 + 1e-9
    counted = {look.counts is not None for look in first.sums if look.kind == "release"}
    assert counted == {"clipping" in options or method == "dp-adam-ac-private"}
    assert bool(first.measurements) == (method == "dp-is")
    if any(look.gain < 1 for look in first.looks):
        mixed = [look.branch is not None and bool(look.branch.any()) for look in first.looks]
        assert sum(mixed) == STEPS - 1
    assert compare(pair) == []  # the library says the same


@pytest.mark.parametrize("method", [*PRIVATE, *VARIANTS], ids=str)
def test_every_private_method_passes_the_replay_of_the_library(method):
    assert [str(finding) for finding in verify(method, checks=["replay"]).findings] == []


def test_sparse_lots_are_empty_on_one_side_and_on_both():
    report = examine(DPSGD())
    assert report.passed and report.check == "replay"
    assert report.figures["sparse_lots"]["empty_on_one_side"] > 0
    lots = record(DPSGD(), SPARSE).lots
    assert any(not lot.records for lot in lots)
    assert {lot.number for lot in lots} == set(range(SPARSE.steps))


@pytest.mark.parametrize("name", ["fo", "sma", "uniform"])
def test_a_memory_of_sums_without_noise_would_be_caught(name, monkeypatch):
    """The yardstick itself: a history that remembers the query instead of the release."""
    history_of_raw_sums(monkeypatch)
    pair = both(name)
    branches = [(a.branch, b.branch) for a, b in pair.sums]
    assert not all(same(a, b) for a, b in branches)
    assert pair.first.told != pair.second.told
    found = {finding.what: finding for finding in compare(pair)}
    assert {"branch", "diagnostics", "saved state"} <= set(found)
    assert found["branch"].figure > 0 == found["branch"].bound
    assert "allowed is 0" in str(found["branch"])


def test_adaptive_clipping_as_published_fails():
    """One record flips the percentile of the raw norms: noise scale and step size follow it."""
    method = DPAdamAC(clipped=0.2, window=8, lowest=1e-3, highest=1e3)
    pair = both(method)
    ratios = [a.bounds[0] / b.bounds[0] for a, b in pair.sums]
    assert [look.stds for look in pair.first.looks] != [look.stds for look in pair.second.looks]
    assert max(ratios) > 1.05  # the noise of a step says whether the record is there
    assert {"clip bounds", "noise scales", "weights"} <= {f.what for f in examine(method).findings}
    assert epsilon_of(method) == math.inf


def test_geodp_as_published_fails():
    """15.3 of the literature's mechanism: one record turns the last angle by pi, or nearly so,
    where its noise is made for 2 pi * bounding / lot."""
    pair = both(GeoDP(), data=adversarial())
    claimed = angle_scale(pair.first.looks[0].query.numel(), LOT, GeoDP().bounding)
    turned = 0.0
    for a, b in pair.sums:
        angles = [to_hyperspherical(look.query[None].double())[1][0] for look in (a, b)]
        apart = (angles[0] - angles[1]).abs()
        apart[-1] = min(float(apart[-1]), 2 * math.pi - float(apart[-1]))
        turned = max(turned, float(apart.norm()))
    assert turned > 2 * claimed
    assert epsilon_of(GeoDP()) == math.inf


def epsilon_of(method):
    run = small_run(method, records(SMALL), SMALL, noise_seed=1)
    with Tape(run.engine) as tape:
        run.go(tape, 1)
    return run.engine.get_epsilon(1e-5)


def adversarial():
    """Records whose gradients nearly cancel, and one that decides the sign of the sum."""
    x = torch.zeros(SIZE, 6, dtype=torch.float64)
    x[:, 0] = torch.where(torch.arange(SIZE) % 2 == 0, 1.0, -1.0)
    y = torch.zeros(SIZE, dtype=torch.int64)
    x[-1, 0] = 5.0
    y[-1] = 1
    silent = torch.zeros(SIZE, dtype=torch.float64)
    whole = TensorDataset(x, y, silent, torch.arange(SIZE))
    return whole, neighbour(whole, GeoDP())
