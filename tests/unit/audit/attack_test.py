"""The audit: its bounds against closed forms, its teeth, its honesty, and its command.

Statistical tests have fixed seeds; where they count how often a bound fails over many simulations,
the limit is the binomial quantile that an honest bound exceeds with probability 1e-6.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm
from typer.testing import CliRunner

from vestige import ConfigError
from vestige.audit.attack import attack, coins, inclusion
from vestige.audit.bounds import (
    Split,
    clopper_pearson,
    family_events,
    membership_epsilon,
    shift_lower,
    shift_of,
)
from vestige.audit.canaries import Canaries, CanaryModel
from vestige.audit.canary import audit, loss
from vestige.audit.directions import tangent_readings
from vestige.audit.one_run import audit_one_run, guessing_bound
from vestige.audit.one_run_bound import one_run_epsilon, p_value
from vestige.audit.plot import dp_curve, run_curve, write
from vestige.audit.published import tipping_norms
from vestige.audit.readings import readings
from vestige.audit.rows_attack import audit_rows, misread
from vestige.audit.setting import Setting
from vestige.audit.table import write_rows, write_table
from vestige.audit.transcript import listening
from vestige.audit.whitening import correlated_scores, stretch_signals
from vestige.cli import app as cli
from vestige.cli import audit as cli_audit
from vestige.gradients.rows import Rows
from vestige.methods import DPFTRL, DPSAM, METHODS, Disk, DPAdamAC, FractionalNoise, Kalman, resolve
from vestige.privacy.accounting import Charge, epsilon
from vestige.privacy.ledger import Event
from vestige.release.door import Door

ALPHA = 0.05
RARE = 1e-6
PRIVATE = [name for name, method in METHODS.items() if method.private]
PUBLISHED = [name for name, method in METHODS.items() if not method.private]
VARIANTS = {
    "dp-sam, fresh": DPSAM(sample="fresh"),
    "disk, ahead": Disk(ahead=0.5),
    "kalman, beta": Kalman(beta=0.7),
    "dp-ftrl, restarts": DPFTRL(restart=1),
    "dp-ftrl, plain tree": DPFTRL(honaker=False),
    "fractional-noise, 3 bands": FractionalNoise(bands=3),
}


def often(failures, simulations):
    """Whether a bound at 95 % fails more often than chance explains."""
    return failures > binom.ppf(1 - RARE, simulations, ALPHA)


# -- the bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_clopper_pearson_without_errors_has_a_closed_form(n):
    lower, upper = clopper_pearson(0, n, 0.025)
    assert lower == 0 and float(upper) == pytest.approx(1 - 0.025 ** (1 / n))
    lower, upper = clopper_pearson(n, n, 0.025)
    assert float(lower) == pytest.approx(0.025 ** (1 / n)) and upper == 1


def test_the_ends_are_where_the_binomial_tails_are_alpha():
    for k, n in ((1, 7), (5, 40), (321, 2000)):
        lower, upper = clopper_pearson(k, n, 0.01)
        assert binom.cdf(k, n, upper) == pytest.approx(0.01)
        assert binom.sf(k - 1, n, lower) == pytest.approx(0.01)


def test_the_shift_of_a_pair_of_error_rates_is_that_of_the_gaussian():
    for mu in (0.1, 0.5, 2.0):
        for cut in (-1.0, 0.0, 1.5):
            assert shift_of(norm.sf(cut), norm.cdf(cut - mu)) == pytest.approx(mu)


def test_two_kinds_that_never_mix_give_the_bound_of_no_errors():
    labels = np.arange(400) % 2 == 0
    split = Split.by_canary(np.arange(400), 400)
    found, cut = membership_epsilon(np.where(labels, 1.0, 0.0), labels, split, 1e-5, 0.95)
    hit, alarm = 0.025 ** (1 / 100), 1 - 0.025 ** (1 / 100)
    assert found == pytest.approx(math.log((hit - 1e-5) / alarm))
    assert (cut.hits, cut.false_alarms, cut.hit_trials, cut.alarm_trials) == (100, 0, 100, 100)


def test_the_familys_events_are_the_plan_at_the_noise_that_is_allowed():
    charges = {Charge(0.1, 0.5): 3, Charge(0.1, 0.25): 1, Charge(1.0, 0.0, 0.02): 2}
    assert family_events(charges, 2.0, 4.0, 4.0) == (Event(0.1, 4.0, 3), Event(0.1, 8.0, 1))
    twice = family_events(charges, 2.0, 4.0, 8.0)
    assert twice == (Event(0.1, 8.0, 3), Event(0.1, 16.0, 1))
    assert epsilon(twice, 1e-5) < epsilon(family_events(charges, 2.0, 4.0, 4.0), 1e-5)
    assert family_events(charges, 2.0, 4.0, math.inf) == ()


@pytest.mark.parametrize("mu", [0.4, 1.0])
def test_the_shift_bound_fails_no_more_often_than_it_says_and_is_close(mu):
    rng, found = np.random.default_rng(1), []
    split = Split.by_canary(np.arange(8000), 8000)
    for _ in range(300):
        inside = rng.random(8000) < 0.3
        found.append(shift_lower(rng.standard_normal(8000) + mu * inside, inside, split, 0.95))
    assert not often(sum(value > mu for value in found), 300)
    assert np.median(found) > (0.6 if mu < 1 else 0.8) * mu


def test_the_shift_bound_is_honest_where_the_trials_differ():
    """Half of the canaries are at a worse place: the bound is on the best place's shift."""
    rng, failures = np.random.default_rng(2), 0
    split = Split.by_canary(np.arange(1000), 1000)
    for _ in range(300):
        inside, good = rng.random(1000) < 0.5, rng.random(1000) < 0.5
        scores = rng.standard_normal(1000) + np.where(good, 1.0, 0.3) * inside
        failures += shift_lower(scores, inside, split, 0.95) > 1.0
    assert not often(failures, 300)


@pytest.mark.parametrize("true", [0.5, 2.0])
def test_the_membership_bound_fails_no_more_often_than_it_says(true):
    """Randomised response is (epsilon, 0)-DP exactly, so the bound has nothing to give away."""
    rng, found = np.random.default_rng(3), []
    split = Split.by_canary(np.arange(2000), 2000)
    honest = 1 / (1 + math.exp(-true))
    for _ in range(400):
        member = rng.random(2000) < 0.5
        said = np.where(rng.random(2000) < honest, member, ~member)
        found.append(membership_epsilon(said + 0.0, member, split, 1e-5, 0.95)[0])
    assert not often(sum(value > true for value in found), 400)
    assert np.median(found) > 0.6 * true


# -- one run ------------------------------------------------------------------------------------


def test_the_one_run_bound_gives_the_papers_printed_values():
    """Appendix D and section 7 of arXiv 2305.08846."""
    assert one_run_epsilon(1000, 100, 75, 1e-4, 0.95) == pytest.approx(0.673, abs=1e-3)
    assert one_run_epsilon(100_000, 1510, 1439, 1e-5, 0.95) == pytest.approx(2.675, abs=1e-3)


def test_without_delta_the_p_value_is_a_binomial_tail():
    for eps in (0.0, 0.7, 3.0):
        chance = math.exp(eps) / (1 + math.exp(eps))
        assert p_value(1, 1, 1, eps, 0.0) == pytest.approx(chance)
        assert p_value(2, 2, 1, eps, 0.0) == pytest.approx(1 - (1 - chance) ** 2)
        assert p_value(50, 20, 13, eps, 0.0) == pytest.approx(binom.sf(12, 20, chance))


def test_the_p_value_covers_a_mechanism_that_tells_everything_with_probability_delta():
    """It is (epsilon, delta)-DP: randomised response otherwise."""
    for m, eps, delta in ((1, 0.5, 0.05), (5, 1.0, 0.01), (40, 0.3, 0.001)):
        chance = 1 / (1 + math.exp(-eps))
        for v in range(m + 1):
            exact = delta + (1 - delta) * binom.sf(v - 1, m, chance)
            assert exact <= p_value(m, m, v, eps, delta) + 1e-12


def test_more_correct_guesses_refute_more_and_delta_refutes_less():
    found = [one_run_epsilon(500, 100, v, 1e-5, 0.95) for v in range(40, 101, 5)]
    assert found == sorted(found) and found[0] == 0 < found[-1]
    assert one_run_epsilon(500, 100, 90, 1e-3, 0.95) < one_run_epsilon(500, 100, 90, 0, 0.95)
    with pytest.raises(ConfigError, match="impossible"):
        p_value(10, 11, 3, 1.0, 0.0)


def test_the_one_run_bound_fails_no_more_often_than_it_says():
    rng, found = np.random.default_rng(4), []
    true = 1.0
    for _ in range(100):
        member = rng.random(800) < 0.5
        said = np.where(rng.random(800) < 1 / (1 + math.exp(-true)), member, ~member)
        scores = said + 0.1 * rng.random(800)
        found.append(guessing_bound(scores, member, 1e-5, 0.95)[0])
    assert not often(sum(value > true for value in found), 100)
    assert np.median(found) > 0.6 * true


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma", "dp-sam", "dp-ftrl", "geodp"])
def test_the_one_run_audit_trains_the_real_engine_and_stays_below_the_claim(method):
    result = audit_one_run(method, noise_multiplier=1.0, steps=12, trials=300, seed=5)
    assert result.mode == "one-run" and result.epsilon_lower_family is None
    if METHODS[method].private:
        assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    else:
        assert result.epsilon_claimed is None and result.epsilon_published > 0


def test_the_one_run_audit_sees_a_run_with_little_noise():
    result = audit_one_run("dp-sgd", noise_multiplier=0.2, trials=1000, seed=6)
    assert 1 < result.epsilon_lower <= result.epsilon_claimed
    assert result.trials == 1000


# -- reading the releases -----------------------------------------------------------------------


def observed(method, noise, trials=300, steps=12, clipping=None):
    setting = Setting.checked(
        method, noise_multiplier=noise, trials=trials, steps=steps, seed=11, clipping=clipping
    )
    canaries = Canaries.tossed(trials, coins(setting), setting.zeroed)
    records = trials if setting.zeroed else trials // 2
    found = attack(
        setting,
        CanaryModel(trials, setting.layers),
        canaries.dataset(),
        setting.batch_size(records),
        noise,
        loss,
        declared=None if setting.zeroed else records,
    )
    return setting, canaries, found


PLAIN = {
    **{name: resolve(name) for name in PRIVATE if not name.startswith("geodp")},
    **VARIANTS,
}
CORRELATED = [
    key for key, method in PLAIN.items() if method.name in ("dp-ftrl", "fractional-noise")
]


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        *((name, None) for name in PLAIN if name not in CORRELATED),
        ("dp-sgd", "per_layer"),
        ("fo", "auto"),
        ("sma", "quantile_per_layer"),
    ],
)
def test_without_noise_a_reading_says_exactly_who_was_in_the_lot(name, clipping):
    """So every canary saturates every group in every look, and touches nobody else."""
    _, canaries, found = observed(PLAIN[name], 1e-5, clipping=clipping)
    read, mu = readings(found, canaries.count)
    inside = inclusion(found.lots, canaries.count)
    assert 0.02 < inside.mean() < 0.1  # a tenth of the half that is in the data
    assert not inside[:, ~canaries.member].any()
    assert np.abs(read / mu[:, None] - inside).max() < 2e-3


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        ("dp-sgd", None),
        ("fo", None),
        ("sma", None),
        ("kalman, beta", None),
        ("dp-sam", None),
        ("dp-is", None),
        ("dp-adam-ac-private", None),
        ("sma", "quantile_per_layer"),
    ],
)
def test_readings_have_the_claimed_law_and_are_independent(name, clipping):
    """False alarms: 5 standard deviations of each of three statistics, below 2e-6 together."""
    setting, canaries, found = observed(PLAIN[name], 1.3, trials=1000, clipping=clipping)
    read, mu = readings(found, canaries.count)
    assert np.allclose(1 / mu, setting.multipliers(1.3), rtol=1e-6)
    noise = read - mu[:, None] * (inclusion(found.lots, canaries.count) & canaries.member)
    assert standard(noise.ravel())
    steps = (noise[1:] * noise[:-1]).ravel()
    others = (noise[:, 1:] * noise[:, :-1]).ravel()
    assert abs(steps.mean()) * math.sqrt(len(steps)) < 5
    assert abs(others.mean()) * math.sqrt(len(others)) < 5


def standard(values):
    n = len(values)
    return abs(values.mean()) * n**0.5 < 5 and abs(values.var() - 1) * (n / 2) ** 0.5 < 5


@pytest.mark.parametrize("name", CORRELATED)
def test_whitened_scores_are_standard_without_the_canary_and_shifted_with_it(name):
    setting, canaries, found = observed(PLAIN[name], 2.0, trials=1500, steps=16)
    scores = correlated_scores(setting, found, canaries, 2.0)
    assert standard(scores.family[~scores.inside])
    shift = scores.family[scores.inside]
    planned = max(charge.weight for charge in setting.charges(len(canaries.dataset()))) / 2.0
    assert shift.var() < 1.3
    assert 0.3 * planned < shift.mean() < planned * 1.05


def test_the_lots_of_a_stretch_by_hand():
    drawn = np.zeros((5, 4), dtype=bool)
    drawn[1, 0] = drawn[3, 0] = True  # second place of both stretches
    drawn[2, 1] = True  # first place of the second
    signals = stretch_signals(drawn, 2)
    assert signals.shape == (3, 5, 4)
    assert signals[0, :, 0].tolist() == [0, 1, 0, 0, 0]
    assert signals[1, :, 0].tolist() == [0, 0, 0, 1, 0]
    assert signals[2, :, 0].tolist() == [0, 0, 0, 0, 0]  # after the end of the run
    assert signals[0, :, 1].tolist() == [1, 0, 0, 0, 0]
    assert signals[2, :, 1].tolist() == [0, 0, 0, 0, 1]
    assert signals[0, :, 2].tolist() == [1, 0, 0, 0, 0]  # never drawn: any place


def test_tangents_of_the_other_canaries_are_taken_off_exactly():
    _, canaries, found = observed("geodp-tangent", 1e-5)
    read, mu = tangent_readings(found, canaries.count)
    inside = inclusion(found.lots, canaries.count)
    assert np.abs((read / mu[:, None])[~inside]).max() < 1e-3
    assert (read / mu[:, None])[inside].min() > 0.9
    _, canaries, found = observed("geodp-tangent", 1.5, trials=1000)
    read, mu = tangent_readings(found, canaries.count)
    assert standard(read[~inclusion(found.lots, canaries.count)])


def test_canaries_of_angles_use_nearly_the_whole_bound():
    from vestige.audit.angles import run_angles

    setting = Setting.checked("geodp-box", noise_multiplier=1e-3, steps=4, trials=200, seed=1)
    found, read, mu, member, inside = run_angles(setting, 1e-3, 0, 200, lambda step: None)
    assert not inside[:, ~member].any()
    assert np.abs((read / mu[:, None])[~inside]).max() < 0.02
    assert (read / mu[:, None])[inside].min() > 0.95
    # mu is half of what a step is charged for: the direction, at sqrt(2) sigma.
    assert mu == pytest.approx(np.full(4, 1 / (math.sqrt(2) * 1e-3)), rel=0.01)
    assert len(found.references) == 4


def test_the_hook_goes_away_and_changes_nothing():
    def weights(listen):
        setting = Setting.checked("fo", noise_multiplier=1.0, trials=100, steps=4, seed=2)
        canaries = Canaries.tossed(100, coins(setting), False)
        model = CanaryModel(100, 1)
        arguments = setting, model, canaries.dataset(), 5, 1.0, loss
        if listen:
            attack(*arguments, declared=50)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("vestige.audit.attack.listening", silent)
                attack(*arguments, declared=50)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(True), weights(False))
    _, _, found = observed("fo", 1.0, trials=100, steps=2)
    door = found.engine._run.door
    with listening(found.engine):
        assert "release" in vars(door)
    assert "release" not in vars(door) and "first_look" not in vars(door)


class silent:  # noqa: N801 - stands in for a function
    def __init__(self, engine):
        pass

    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


# -- teeth and honesty --------------------------------------------------------------------------


@pytest.mark.parametrize("target", [2.0, 4.0])
@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma"])
def test_the_family_bound_reaches_60_percent_of_the_claim(method, target):
    result = audit(method, epsilon=target, trials=4000, seed=21)
    assert result.epsilon_claimed == pytest.approx(target, rel=1e-3)
    assert 0.6 * target <= result.epsilon_lower_family <= result.epsilon_claimed
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    assert not result.violated
    assert result.trials == 4000 and result.family_trials == 4000 * result.steps
    assert result.seconds < 60


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("target", "trials"), [(1.0, 20_000), (2.0, 4000), (4.0, 4000)])
@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma"])
def test_the_audit_has_teeth_at_every_claim_and_seed(method, target, trials, seed):
    result = audit(method, epsilon=target, trials=trials, seed=seed)
    assert 0.6 * target <= result.epsilon_lower_family <= result.epsilon_claimed
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed


@pytest.mark.parametrize("name", PRIVATE)
def test_no_bound_exceeds_the_claim_of_any_method(name):
    result = audit(name, noise_multiplier=1.2, steps=4, trials=300, seed=31)
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    assert 0 <= result.epsilon_lower_family <= result.epsilon_claimed
    assert result.epsilon_published is None and not result.violated


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("name", [*PRIVATE, *VARIANTS])
def test_no_bound_exceeds_the_claim_with_many_trials(name):
    """One method in a few hundred audits may fail by chance; these seeds do not."""
    result = audit(VARIANTS.get(name, name), epsilon=2.0, trials=4000, seed=41)
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    assert 0 < result.epsilon_lower_family <= result.epsilon_claimed


@pytest.mark.slow
@pytest.mark.audit
def test_both_bounds_of_the_real_engine_fail_no_more_often_than_they_say():
    found = [audit("sma", noise_multiplier=1.3, steps=8, trials=600, seed=s) for s in range(150)]
    assert not often(sum(r.epsilon_lower > r.epsilon_claimed for r in found), 150)
    assert not often(sum(r.epsilon_lower_family > r.epsilon_claimed for r in found), 150)


@pytest.mark.parametrize("method", ["dp-sgd", "sma", "dp-sam"])
def test_halved_noise_is_caught(method, monkeypatch):
    honest = Door._noise

    def halved(door, *arguments):
        for block, noise, std in honest(door, *arguments):
            yield block, noise, std / 2

    monkeypatch.setattr(Door, "_noise", halved)
    result = audit(method, epsilon=2.0, trials=4000, seed=51)
    assert result.epsilon_lower_family > result.epsilon_claimed
    assert result.violated
    assert result.noise_multiplier_upper < result.noise_multiplier_attacked


def test_an_audit_repeats_itself_with_a_seed_and_only_then():
    def one(seed):
        return audit("dp-sgd", noise_multiplier=1.5, steps=2, trials=200, seed=seed)

    first, again, fresh, other = one(5), one(5), one(None), one(None)
    assert np.array_equal(first.evidence.scores, again.evidence.scores)
    assert not np.array_equal(fresh.evidence.scores, other.evidence.scores)
    assert first.seeded and not fresh.seeded


def test_an_instance_with_settings_of_its_own_can_be_audited():
    result = audit(Kalman(beta=0.5), noise_multiplier=1.0, steps=4, trials=300, seed=1)
    assert result.noise_multiplier_attacked == pytest.approx(2.0)
    assert result.method == "kalman"


# -- published as private, and not --------------------------------------------------------------


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_published_claim_is_violated(method):
    result = audit(method, epsilon=1.0, trials=400, seed=61)
    assert result.epsilon_claimed is None  # the engine itself says infinity
    assert result.epsilon_published == pytest.approx(1.0, rel=1e-3)
    assert result.epsilon_lower > 3 > result.epsilon_published
    assert result.violated and result.epsilon_lower_family is None
    assert any("no family bound" in note for note in result.notes)


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("method", PUBLISHED)
def test_the_published_claim_is_violated_at_epsilon_4_too(method):
    result = audit(method, epsilon=4.0, trials=4000, seed=62)
    assert result.epsilon_lower > 5 > result.epsilon_published


def test_one_norm_tips_the_quantile_from_end_to_end():
    method = DPAdamAC()
    norms = tipping_norms(method)
    assert norms == [0.1] * 5 + [10.0]
    assert np.quantile(norms, 0.8) == pytest.approx(0.1)
    assert np.quantile([*norms, 10.0], 0.8) == pytest.approx(8.02)
    with pytest.raises(ConfigError, match="from step 2 on"):
        audit("dp-adam-ac", epsilon=1.0, steps=1, trials=100)


# -- the plot, the table, the command -----------------------------------------------------------


def test_the_curve_of_one_gaussian_is_the_closed_form():
    x = np.linspace(0.01, 0.99, 50)
    expected = norm.cdf(norm.ppf(1 - x) - 1.0)
    found = run_curve(x, (Event(1.0, 1.0),), 4.0)
    assert np.abs(found - expected).max() < 0.01
    assert (found >= dp_curve(x, 2.0, float(delta_of_gaussian(2.0))) - 1e-3).all()


def delta_of_gaussian(eps, mu=1.0):
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("method", ["fo", "geodp"])
def test_a_plot_is_written(method, suffix, tmp_path):
    result = audit(method, noise_multiplier=2.0, steps=2, trials=200, seed=1)
    path = tmp_path / f"plot.{suffix}"
    write(result, path)
    start = b"\x89PNG" if suffix == "png" else b"<?xml"
    assert path.read_bytes().startswith(start) and path.stat().st_size > 10_000


def test_the_table_has_a_row_for_each_method(tmp_path):
    made = write_table(tmp_path / "out", ["disk", "geodp"], 2.0, 300, 3, "a command")
    assert [path.name for path in made] == ["audit.json", "table.md", "geodp.png"]
    numbers = json.loads(made[0].read_text())
    assert [row["method"] for row in numbers["methods"]] == ["disk", "geodp"]
    assert numbers["command"] == "a command" and numbers["teeth"] == []
    text = made[1].read_text()
    assert "| disk | 2.00 |" in text and text.count("violated") == 2
    assert [row["violated"] for row in numbers["rows"]] == [True, False]
    assert "| mis-attributed rows | 0.44 | **" in text
    assert "| geodp | none; published 2.00 | **" in text
    assert numbers["methods"][0]["confidence"] == pytest.approx(1 - 0.05 / 4)
    with pytest.raises(ConfigError, match="unknown"):
        write_table(tmp_path / "t.md", ["nope"], 2.0, 300, 3, "")
    with pytest.raises(ConfigError, match="must be a folder"):
        write_table(tmp_path / "t.txt", ["disk"], 2.0, 300, 3, "")


def test_the_part_on_rows_is_made_anew_and_nothing_else_changes(tmp_path):
    text = "a table\n\n| row |\n"
    numbers = {"command": "an earlier one", "methods": [{"epsilon_lower": 0.1 + 0.2}], "teeth": []}
    (tmp_path / "table.md").write_text(text)
    with pytest.raises(ConfigError, match="make the whole table first"):
        write_rows(tmp_path, 100, 3, "a command")
    (tmp_path / "audit.json").write_text(json.dumps(numbers, indent=2) + "\n")
    for command in ("a command", "another"):
        write_rows(tmp_path, 100, 3, command)
        now = (tmp_path / "table.md").read_text()
        assert now.startswith(text) and now.count("| mis-attributed rows |") == 1
        assert f"`{command}`" in now
        kept = (tmp_path / "audit.json").read_text()
        assert kept.startswith(json.dumps(numbers, indent=2).removesuffix("\n}"))
        assert json.loads(kept)["rows_command"] == command


def test_the_table_that_is_kept_has_mis_attributed_rows():
    kept = Path(__file__).parents[3] / "results" / "audit"
    broken, whole = json.loads((kept / "audit.json").read_text())["rows"]
    assert broken["method"] == "mis-attributed rows" and broken["violated"]
    assert broken["epsilon_lower"] > 3 > 1 > broken["epsilon_claimed"]
    assert whole["epsilon_claimed"] == broken["epsilon_claimed"] and not whole["violated"]
    assert "| mis-attributed rows | 0.44 | **" in (kept / "table.md").read_text()


@pytest.mark.parametrize("seed", [1, 2])
def test_mis_attributed_rows_are_caught_and_rightly_attributed_ones_are_not(seed):
    broken, whole = (audit_rows(b, trials=200, seed=seed) for b in (True, False))
    assert broken.epsilon_claimed == whole.epsilon_claimed == pytest.approx(0.434, abs=1e-3)
    assert broken.violated and broken.epsilon_lower > 2
    assert "by 35.19 C" in broken.notes[0]
    assert not whole.violated and "by 1 C" in whole.notes[0]


def test_the_engine_is_broken_for_the_attack_only():
    first = Rows.first
    with pytest.raises(KeyError), misread():
        assert Rows.first is not first
        raise KeyError
    assert Rows.first is first


def command(*arguments):
    if "audit" not in {one.callback.__name__ for one in cli.app.registered_commands}:
        cli_audit.register(cli.app)
    return CliRunner().invoke(cli.app, ["audit", *arguments])


KEYS = {
    "epsilon_lower",
    "epsilon_lower_family",
    "epsilon_claimed",
    "epsilon_published",
    "confidence",
    "trials",
    "seconds",
    "method",
    "mode",
    "delta",
    "steps",
    "sample_rate",
    "noise_multiplier",
    "seeded",
}
QUICK = ("--noise-multiplier", "1.5", "--steps", "2", "--trials", "200", "--seed", "1")


@pytest.mark.parametrize("mode", ["canary", "one-run"])
def test_the_command_prints_json_alone(mode):
    ran = command("--method", "fo", "--mode", mode, "--json", *QUICK)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert set(found) >= KEYS
    assert found["mode"] == mode and found["trials"] == 200 and found["seeded"]
    assert (found["epsilon_lower_family"] is None) == (mode == "one-run")
    assert "seed" not in found  # a seed is never written down


def test_the_command_writes_a_folder_and_speaks_plainly(tmp_path):
    ran = command("--method", "dp-sgd", "--out", str(tmp_path / "a"), *QUICK)
    assert ran.exit_code == 0
    assert "Not refuted" in ran.stdout and "no proof" in ran.stdout
    assert (tmp_path / "a" / "tradeoff.png").stat().st_size > 10_000
    assert set(json.loads((tmp_path / "a" / "audit.json").read_text())) >= KEYS


def test_a_violated_claim_of_the_engine_ends_with_exit_code_1(monkeypatch):
    monkeypatch.setattr(Door, "_noise", lambda *_: iter([(slice(0, 10**6), torch.zeros(1), 0.0)]))
    ran = command("--method", "dp-sgd", *QUICK)
    assert ran.exit_code == 1 and "VIOLATED" in ran.stdout


def test_a_violated_publication_is_a_result_and_not_a_failure():
    ran = command("--method", "geodp", "--epsilon", "1", "--trials", "300", "--seed", "1")
    assert ran.exit_code == 0
    assert "VIOLATED" in ran.stdout and "No guarantee is given" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "nope"), "method='nope' is unknown"),
        (("--method", "fo", "--mode", "both"), "mode='both' is unknown"),
        (("--method", "fo", "--epsilon", "1", "--noise-multiplier", "1"), "give one of them"),
        (("--method", "fo", "--noise-multiplier", "0"), "noise_multiplier=0.0 must be"),
        (("--method", "fo", "--epsilon", "-1"), "epsilon=-1.0 must be"),
        (("--method", "fo", "--trials", "10"), "trials=10 is too small"),
        (("--method", "fo", "--confidence", "1"), "confidence=1.0 must be"),
        (("--method", "fo", "--confidence", "0"), "confidence=0.0 must be"),
        (("--method", "fo", "--delta", "2"), "delta=2.0 must be"),
        (("--method", "fo", "--steps", "0"), "steps=0"),
        (("--method", "fo", "--sample-rate", "1"), "sample_rate=1.0 must be"),
        (("--method", "fo", "--clipping", "nope"), "clipping='nope' is unknown"),
        (("--method", "dp-is", "--clipping", "per_layer"), "use flat clipping"),
        (("--method", "fo", "--out", "plot.gif"), "no known image format"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[2:]) or "method",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    ran = command(*arguments)
    assert ran.exit_code == 2
    assert words in ran.stderr and ran.stderr.count("\n") == 1 and ran.stdout == ""


def test_a_partition_by_names_is_refused():
    with pytest.raises(ConfigError, match="brings its own model"):
        Setting.checked("fo", clipping=[["a"], ["b"]])


def test_the_command_is_parsed_and_checked_without_torch():
    code = (
        "import sys, vestige.cli.audit, vestige.audit.setting as s;"
        "s.Setting.checked('fo', epsilon=1.0);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
