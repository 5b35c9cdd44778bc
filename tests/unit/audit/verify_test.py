"""`vestige verify MODULE:factory`: the checks on somebody else's method, and what may go wrong."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from vestige.audit import rows_check
from vestige.audit.findings import Finding, Report
from vestige.audit.lots_check import lots_check
from vestige.audit.mixing import Mixing
from vestige.audit.neighbours import sensitivity
from vestige.audit.observation import observe
from vestige.audit.setting import FEWEST_TRIALS
from vestige.audit.verify import CHECKS, TRIALS, load, verify
from vestige.cli import verify as cli_verify
from vestige.cli.app import _Program
from vestige.engine.run import Run
from vestige.errors import ConfigError, PrivacyError
from vestige.gradients.collector import Collector
from vestige.methods import DPFTRL, DPSGD, FO, FractionalNoise, GeoDP, Method, resolve
from vestige.methods.catalogue import AT_SIGMA, MethodInfo
from vestige.privacy.accounting import Charge
from vestige.privacy.factorisation import tree_sensitivity
from vestige.sampling.lots import Poisson
from vestige.sampling.streams import NOISE
from vestige.updates.filters import Filter

PAGE = Path(__file__).parents[3] / "docs" / "verify.md"

app = typer.Typer(cls=_Program)
app.callback()(lambda: None)
cli_verify.register(app)


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)


def examples():
    """The page's own module: its Python blocks, one after the other."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


def printed():
    """What the page shows after each command: (arguments, output)."""
    console = r"```console\n\$ vestige verify (.*?)\n(.*?)```"
    return dict(re.findall(console, PAGE.read_text(), re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with modules of our own, forgotten afterwards."""
    before = set(sys.modules)
    (tmp_path / "my_methods.py").write_text(examples())
    (tmp_path / "odd.py").write_text(
        "number = 3\n"
        "def fails():\n    raise ValueError('no such\\nthing')\n"
        "def returns():\n    return number\n"
        "def needs(argument):\n    return argument\n"
        "def a_class():\n    from vestige.methods import FO\n    return FO\n"
        "def an_instance():\n    from vestige.methods import FO\n    return FO(beta=0.5)\n"
    )
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "worse.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("my_methods", "odd", "broken", "worse"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("odd", "not of the form MODULE:factory"),
        (":odd", "not of the form MODULE:factory"),
        ("odd:", "not of the form MODULE:factory"),
        ("nowhere:x", "module 'nowhere' was not found"),
        ("json.nowhere:x", "module 'json.nowhere' was not found"),
        ("broken:x", "module 'broken' needs another: No module named 'nowhere_to_be_found'"),
        ("worse:x", "module 'worse' could not be imported: RuntimeError: not today"),
        ("odd:missing", "module 'odd' has no 'missing'"),
        ("odd:number", "is a int, which cannot be called"),
        ("odd:fails", "raised ValueError: no such thing"),
        ("odd:needs", "raised TypeError"),
        ("odd:returns", "returned a int"),
    ],
)
def test_a_wrong_target_is_one_line_and_exit_code_2(target, words, folder):
    result = run(target)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line


def test_a_factory_may_return_an_instance_or_a_class_or_be_one(folder):
    assert load("odd:an_instance") == FO(beta=0.5)
    assert load("odd:a_class") == FO()
    assert load("vestige.methods:FO") == FO()
    assert load("my_methods:Echo").name == "echo"
    assert str(folder) not in sys.path


@pytest.mark.parametrize(("name", "failing"), [("Echo", []), ("Eager", ["replay"])])
def test_the_examples_of_the_page_pass_and_fail(name, failing, folder):
    result = run(f"my_methods:{name}", "--quick", "--seed", "1", "--json")
    assert result.exit_code == bool(failing)
    verdict = json.loads(result.stdout, parse_constant=pytest.fail)  # no NaN, no Infinity
    assert verdict["method"] == name.lower() and verdict["passed"] == (not failing)
    assert [check["check"] for check in verdict["checks"]] == list(CHECKS)
    assert [c["check"] for c in verdict["checks"] if not c["passed"]] == failing
    for check in verdict["checks"]:
        assert bool(check["findings"]) != check["passed"]
        for finding in check["findings"]:
            assert finding["figure"] > finding["bound"] and finding["sentence"].endswith(".")


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("place", range(2))
def test_the_page_shows_what_is_printed(place, folder):
    arguments, shown = list(printed().items())[place]
    result = run(*arguments.split())
    seconds = re.compile(r"\d+ seconds")
    ours, theirs = seconds.sub("s", result.stdout), seconds.sub("s", shown)
    assert [line.rstrip() for line in ours.splitlines()] == [
        line.rstrip() for line in theirs.splitlines()
    ]


def test_the_table_says_what_was_seen_and_what_was_found(folder):
    result = run("my_methods:Eager", "--quick", "--seed", "1")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout and "5 of 6 checks passed" in result.stdout
    assert "replay: ordinary lots: one record moves the whole query by" in result.stdout


def test_few_trials_are_refused():
    assert cli_verify._TRIALS == TRIALS
    assert cli_verify._FEWEST == FEWEST_TRIALS
    result = run("vestige.methods:FO", "--trials", "5")
    assert result.exit_code == 2 and "trials" in result.stderr


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
        from collections import Counter

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


def test_findings_are_strict_json():
    finding = Finding("what", "It is.", 3, float("inf"), 1.0)
    report = Report("noise", (finding,), {"a": float("nan"), "b": {"c": -float("inf")}})
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False)) == {
        "check": "noise",
        "passed": False,
        "not_applicable": None,
        "findings": [
            {"what": "what", "sentence": "It is.", "step": 3, "figure": "inf", "bound": 1.0}
        ],
        "figures": {"a": "nan", "b": {"c": "-inf"}},
    }
    assert str(finding) == "It is." and Report("noise").passed


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


@dataclass(frozen=True)
class Repeating(DPSGD):
    """Every lot is used `times` times in a row, or all lots come again after `period`."""

    info = replace(DPSGD.info, name="repeating")

    times: int = 1
    period: int = 10**6

    def lots(self, context):
        poisson = Poisson(context.randomness, context.records, context.plan.sample_rate)
        times, period = self.times, self.period

        class Repeated:
            def lot(self, number):
                return poisson.lot((number - number % times) % period)

        return Repeated()


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


def test_lots_that_come_again_much_later_are_caught():
    found = {
        finding.what: finding for finding in lots_check(Repeating(period=10), steps=60, seed=1)
    }
    assert "0 charges apart" in str(found["overlap of lots"])  # 10, 20 or 30


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


@pytest.mark.parametrize(
    "method",
    [FractionalNoise(order=0.5, bands=4), DPFTRL(), DPFTRL(honaker=False, restart=1)],
    ids=["banded", "honaker", "plain"],
)
def test_the_mixing_knows_the_marginals_and_reveals_no_more_than_is_charged(method):
    seen = observe(method, steps=24, seed=1)
    mixing = Mixing(method, seen.plan, 24)
    for row, look in enumerate(seen.whole.looks):
        told = look.stds[0] / (seen.setting.noise_multiplier * seen.setting.clip)
        assert mixing.marginals[row] == pytest.approx(told, rel=1e-9)
    if isinstance(method, FractionalNoise):
        # One lot of a record, the band's length before the end: exactly one release at sigma.
        assert mixing.revealed(24, [7]) == pytest.approx(1.0, rel=1e-9)
        assert mixing.revealed(24, [3, 4]) > 2.0  # neighbouring lots would cost more than two
    else:
        length = 24 if method.restart is None else seen.plan.lots_per_epoch
        pattern = list(range(2, length, seen.plan.lots_per_epoch))
        allowed = tree_sensitivity(length, seen.plan.lots_per_epoch)
        assert 1.0 < mixing.revealed(24, pattern) <= allowed * (1 + 1e-9)


def test_the_command_is_known_before_torch_is_imported():
    code = (
        "import sys, typer; from vestige import cli_verify; cli_verify.register(typer.Typer());"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_adjacency_is_named():
    class Strange(DPSGD):
        adjacency = "swap two records"

    found = verify(Strange(), seed=1, quick=True)
    assert "swap two records" in str(found.reports[1].findings[0])
    with pytest.raises(ConfigError, match="begin with 'zero out'"):
        observe(Strange(), steps=2)


# -- how far one record moves the sum of a model -----------------------------------------------


def small_data(count=7):
    made = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        3 * torch.randn(count, 4, generator=made), torch.randint(0, 3, (count,), generator=made)
    )


def cross_entropies(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def two_layers(*between):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), *between, torch.nn.Linear(6, 3))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("bound", [0.01, 2.0, 1000.0])
def test_a_record_moves_the_sum_by_its_own_clipped_gradient(clipping, bound):
    model, data = two_layers(torch.nn.Tanh()), small_data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = sensitivity(model, data, cross_entropies, max_grad_norm=bound, clipping=clipping)
    assert sorted(one.record for one in found) == list(range(7))
    assert [one.ratio for one in found] == sorted((one.ratio for one in found), reverse=True)
    for one in found:
        x, y = data[one.record]
        model.zero_grad()
        cross_entropies(model, (x[None], y[None])).sum().backward()
        layers = [torch.cat([p.grad.flatten() for p in model[i].parameters()]) for i in (0, 2)]
        parts = layers if clipping == "per_layer" else [torch.cat(layers)]
        share = bound / len(parts) ** 0.5
        expected = [min(1.0, float(part.norm()) / share) for part in parts]
        assert one.groups == pytest.approx(expected, rel=1e-4)
        joint = (sum(r * r for r in expected) / len(parts)) ** 0.5
        assert one.joint == pytest.approx(joint, rel=1e-4) and one.within
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_losses_may_be_one_number_and_lots_may_come_in_parts():
    def mean(model, batch):
        return cross_entropies(model, batch).mean()

    model, data = two_layers(), small_data()
    rows = sensitivity(model, data, cross_entropies)
    for options in ({"loss_reduction": "mean"}, {"max_physical_batch_size": 3}):
        found = sensitivity(model, data, mean, **options)
        assert [one.joint for one in found] == pytest.approx([one.joint for one in rows], rel=1e-4)


def test_a_loss_in_which_records_meet_moves_the_sum_too_far():
    def ranked(model, batch):  # the loudest record decides how the others count
        each = cross_entropies(model, batch)
        return each * (100.0 if float(batch[0].abs().max()) > 20 else 0.001)

    data = small_data(20)
    data.tensors[0][4] = 50.0
    found = sensitivity(two_layers(), data, ranked, records=[4, 5], max_grad_norm=0.1)
    assert found[0].record == 4 and not found[0].within and found[0].ratio > 3
    assert found[1].within


def test_a_model_whose_records_meet_is_refused_as_in_training():
    class Centred(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = two_layers()

        def forward(self, x):
            return self.inner(x - x.mean(0))

    with pytest.raises(PrivacyError, match="meet in"):
        sensitivity(Centred(), small_data(), cross_entropies)


def test_what_cannot_be_measured_is_named():
    model, data = two_layers(torch.nn.Dropout(0.5)), small_data()
    with pytest.raises(ConfigError, match="draws random numbers"):
        sensitivity(model, data, cross_entropies)
    assert sensitivity(model.eval(), data, cross_entropies)[0].within
    with pytest.raises(ConfigError, match="records has 7, and the data has 7"):
        sensitivity(model, data, cross_entropies, records=[7])
    with pytest.raises(ConfigError, match="1 records"):
        sensitivity(model, small_data(1), cross_entropies)
    for name in ("method", "sample_rate"):
        with pytest.raises(ConfigError, match=f"{name} cannot be chosen"):
            sensitivity(model, data, cross_entropies, **{name: 1.0})


@pytest.mark.parametrize("name", rows_check.MODELS)
def test_every_fold_of_rows_reaches_the_bound_and_stays_within_it(name):
    for options in ({}, {"clipping": "per_layer"}, {"self_check": False}):
        one = rows_check.measure(rows_check.made(name), **options)
        assert one.within and one.ratio > 0.99  # a record that moves nothing would show nothing


def test_the_gate_is_refused_by_the_self_check_alone():
    gated = rows_check.made(rows_check.GATED)
    with pytest.raises(PrivacyError, match="self-check"):
        rows_check.measure(gated)
    assert rows_check.measure(gated, self_check=False).ratio > 2


def test_mis_attributed_rows_are_said_in_words(folder, monkeypatch):
    monkeypatch.setattr(Run, "_check_way", lambda self, args, kwargs: None)
    result = run("my_methods:Echo", "--quick", "--seed", "1")
    assert result.exit_code == 1
    assert "rows: mis-attributed rows: record 0 of the model 'a gate on the batch'" in result.stdout
