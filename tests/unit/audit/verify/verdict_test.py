"""Every check on one method: leaks beside the door are caught, and right methods pass."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.audits import (
    Repeating,
)
from vestige import ConfigError
from vestige.audit.verify import verify
from vestige.audit.verify.runs import observe
from vestige.gradients.collector import Collector
from vestige.methods import (
    DPSGD,
    GeoDP,
    Method,
    resolve,
)
from vestige.methods.catalogue import AT_SIGMA, MethodInfo
from vestige.privacy.accounting import Charge
from vestige.sampling.streams import NOISE
from vestige.updates.filters import Filter


def test_a_method_without_a_guarantee_fails():
    found = verify(GeoDP(), seed=1, quick=True)
    by_check = {report.check: report for report in found.reports}
    assert [f.what for f in by_check["claim"].findings] == ["no claim"]
    assert "no guarantee" in by_check["noise"].not_applicable
    assert not found.passed


@dataclass(frozen=True)
class Cheap(DPSGD):
    """Plans with half of what it is charged."""

    info = replace(DPSGD.info, name="cheap")

    def charges(self, rate, beta, steps, lots_per_epoch, beside):

        return Counter({Charge(rate, 0.5): steps})


def test_a_plan_that_is_not_what_is_charged_fails():
    report = verify(Cheap(), seed=1, quick=True).reports[0]
    (finding,) = report.findings
    assert finding.what == "planned charges"
    assert "60 x (rate 0.1, 1.6)" in str(finding) and "60 x (rate 0.1, 0.8)" in str(finding)


@dataclass(frozen=True)
class Refusing(Method):
    """Cannot be run at all."""

    info = MethodInfo(name="refusing", guarantee=AT_SIGMA)

    def parts(self, context):
        raise RuntimeError("I would\nrather not")


def test_a_check_that_cannot_run_has_not_passed():
    found = verify(Refusing(), seed=1, quick=True)
    for report in found.reports:
        if report.check == "rows":  # which is about the engine, whatever the method
            assert report.passed
            continue
        (finding,) = report.findings
        assert finding.what == "could not run"
        assert str(finding).endswith("RuntimeError: I would rather not")


class OwnNormals(Filter):
    """Adds `share` of the normal numbers of a stream of the run to every release."""

    def __init__(self, around, purpose, share):
        super().__init__()
        self._around, self._purpose, self._share = around, purpose, share

    def noise_powers(self, groups):
        return [1.0] * groups

    def _filter(self, values, stds, out):
        out.copy_(values)
        streams = self._around.randomness
        for block, noise in streams.normal_blocks(self._around.like, self.count, self._purpose):
            out[block].add_(noise, alpha=self._share * stds[0])


@dataclass(frozen=True)
class Peel(DPSGD):
    """Draws the noise of the release again and takes it off."""

    info = replace(DPSGD.info, name="peel")

    def parts(self, context):
        return [OwnNormals(context, NOISE, -1.0)]


@dataclass(frozen=True)
class Dither(DPSGD):
    """Private: the numbers that it adds have nothing to do with the noise."""

    info = replace(DPSGD.info, name="dither")

    def parts(self, context):
        return [OwnNormals(context, b"dither", 0.1)]


class StepByLoss(torch.optim.SGD):
    """A step size from the loss that the closure returns."""

    def step(self, closure=None):
        scale = min(max(float(closure()), 0.1), 10.0)
        for group in self.param_groups:
            group["lr"] *= scale
        super().step()
        for group in self.param_groups:
            group["lr"] /= scale


@dataclass(frozen=True)
class Polyak(DPSGD):
    """Steps by the raw loss of the lot."""

    info = replace(DPSGD.info, name="polyak")

    optimizer_class = StepByLoss


class Hoard(torch.optim.SGD):
    """Keeps the raw sum of the lot in its state, and does nothing with it."""

    def step(self, closure=None):
        loss = closure()
        parameter = self.param_groups[0]["params"][0]
        if not hasattr(self, "found"):
            collectors = (thing for thing in gc.get_objects() if type(thing) is Collector)
            (self.found,) = (c for c in collectors if c.groups.slots[0].parameter is parameter)
        self.state[parameter]["note"] = self.found.total.clone()
        super().step()
        return loss


@dataclass(frozen=True)
class Hoarding(DPSGD):
    """Its checkpoint holds a raw sum."""

    info = replace(DPSGD.info, name="hoarding")

    optimizer_class = Hoard


@pytest.mark.parametrize(
    ("method", "caught"),
    [
        (Peel(), ("replay", "gradients handed on")),
        (Polyak(), ("replay", "weights")),
        (Hoarding(), ("replay", "optimizer and model state")),
        (Repeating(times=2), ("lots", "overlap of lots")),
    ],
    ids=["peel", "loss", "hoard", "twice"],
)
def test_a_leak_beside_the_door_is_caught(method, caught):
    found = verify(method, seed=1, quick=True)
    assert {report.check for report in found.reports if report.findings} == {caught[0]}
    figures = {(r.check, f.what): (f.figure, f.bound) for r in found.reports for f in r.findings}
    figure, bound = figures[caught]
    assert figure > bound
    assert len(figures) == 1 or method.name in ("peel", "polyak")  # whose weights go elsewhere


@pytest.mark.parametrize(
    "name", ["dp-sgd", "fo", "sma", "dp-sam", "dp-is", "fractional-noise", "dp-ftrl"]
)
def test_right_methods_pass(name):
    found = verify(resolve(name), seed=2, quick=True)
    assert [str(finding) for report in found.reports for finding in report.findings] == []


@pytest.mark.parametrize("method", [Dither(), Repeating()], ids=["dither", "drawing"])
def test_what_resembles_a_leak_and_is_none_passes(method):
    found = verify(method, seed=1, quick=True)
    assert [str(finding) for report in found.reports for finding in report.findings] == []


def test_an_unknown_adjacency_is_named():
    class Strange(DPSGD):
        adjacency = "swap two records"

    found = verify(Strange(), seed=1, quick=True)
    assert "swap two records" in str(found.reports[1].findings[0])
    with pytest.raises(ConfigError, match="begin with 'zero out'"):
        observe(Strange(), steps=2)
