"""The study of directions: closed forms, noise, settings."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
import torch

from vestige.errors import ConfigError
from vestige.geometry import (
    Box,
    Tangent,
    angle_scale,
)
from vestige.geometry.study import MEASURES, METHODS, DirectionStudy, direction_study

EXPERIMENTS = Path(__file__).parents[3] / "src" / "vestige" / "lab" / "experiments"


def test_the_study_measures_what_is_known_in_closed_form():
    setting = DirectionStudy(400, 256, 2.0, 0.3, trials=20, examples=16, releases=4)
    found = direction_study(setting)
    assert set(found) == {f"{m}_{measure}" for m in METHODS for measure in MEASURES}
    assert found["dp_sgd_gradient_mse"] == pytest.approx((2.0 / 256) ** 2, rel=0.1)
    assert found["averaged_gradient_mse"] == pytest.approx((2.0 / 256) ** 2 / 4, rel=0.1)
    assert found["geodp_direction_mse"] == pytest.approx(
        (2.0 * angle_scale(400, 256, 0.3)) ** 2, rel=0.1
    )
    # |noise| / |mean| = sigma sqrt(d) / (B signal); the mean's length is slightly below signal.
    ratio = 2.0 * 20 / (256 * 0.5)
    assert found["dp_sgd_cosine"] == pytest.approx(1 / math.sqrt(1 + ratio**2), abs=0.02)
    assert direction_study(setting) == found
    assert direction_study(DirectionStudy(400, 256, 2.0, 0.3, trials=20, seed=1)) != found


def test_the_study_without_noise():
    found = direction_study(DirectionStudy(200, 64, 0.0, 1.0, trials=2, examples=8, releases=30))
    for method in ("dp_sgd", "geodp", "averaged"):
        assert found[f"{method}_direction_mse"] < 1e-20
        assert found[f"{method}_cosine"] == pytest.approx(1.0)
    assert found["tangent_cosine"] > 0.99
    # The mean of angles is not the angle of the mean.
    assert 0.3 < found["box_cosine"] < 0.95
    # The first reference has nothing to do with the gradient: a few short turns do not find it.
    short = direction_study(DirectionStudy(200, 64, 0.0, 0.01, trials=2, examples=8, releases=3))
    assert abs(short["tangent_cosine"]) < 0.35


def test_the_last_angle_of_the_study_is_wrapped():
    # Noise alone has a uniform angle: the mean of its wrapped error is pi^2 / 3, unwrapped twice.
    found = direction_study(DirectionStudy(2, 8, 1e3, 0.1, trials=400, examples=8, releases=1))
    assert found["dp_sgd_direction_mse"] == pytest.approx(math.pi**2 / 3, rel=0.2)


def test_the_variants_get_the_noise_of_their_joint_multiplier(monkeypatch):
    seen = {}
    for kind in (Box, Tangent):

        def spy(self, values, lot, decode=kind.gradient):
            seen.setdefault(type(self), []).append((values.clone(), self.bounds(1.0)))
            return decode(self, values, lot)

        monkeypatch.setattr(kind, "gradient", spy)
    direction_study(DirectionStudy(2000, 8, 1e4, 0.5, trials=20, examples=8, releases=2))
    for releases in seen.values():
        assert len(releases) == 40
        for index, part in enumerate((slice(None, -1), slice(-1, None))):
            # At this sigma the contributions are nothing beside the noise.
            scaled = torch.cat([values[part] / bounds[index] for values, bounds in releases])
            multiplier = float(scaled.square().mean().sqrt()) / 1e4
            assert multiplier == pytest.approx(math.sqrt(2), rel=0.01 if index == 0 else 0.4)


def test_angle_errors_may_favour_geodp_where_the_direction_does_not():
    found = direction_study(DirectionStudy(5000, 2048, 0.1, 1.0, signal=0.01, releases=1))
    assert found["geodp_direction_mse"] < found["dp_sgd_direction_mse"]
    assert found["geodp_cosine"] < found["dp_sgd_cosine"] - 0.05


@pytest.mark.parametrize(
    "wrong",
    [
        {"dimension": 1},
        {"dimension": 10.0},
        {"batch": 0},
        {"batch": 100},
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"bounding": 0.0},
        {"bounding": 1.1},
        {"signal": 0.0},
        {"trials": 0},
        {"examples": 0},
        {"releases": 0},
        {"seed": -1},
    ],
)
def test_study_settings(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        DirectionStudy(**{"dimension": 10, "batch": 128, "sigma": 1.0, "bounding": 0.1, **wrong})


@pytest.mark.parametrize("name", ["geodp-fig3", "geodp-fig4"])
def test_the_figures_are_sweeps_of_the_study(name):
    figure = tomllib.loads((EXPERIMENTS / f"{name}.toml").read_text())
    assert figure["name"] == name
    assert figure["kind"] == "direction-error"
    assert figure["assumed"]
    assert figure["paper"]
    assert figure["title"]
    quick = figure["quick"]
    points = 0
    for sweep in figure["sweep"]:
        for value in sweep["values"]:
            point = {**sweep["fixed"], sweep["varied"]: value}
            DirectionStudy(**point)
            small = {
                key: size // quick["divide"].get(key, 1)
                for key, size in point.items()
                if key in quick["divide"]
            }
            DirectionStudy(**{**point, **small, **quick["set"]})
            points += 1
    assert points == {"geodp-fig3": 9 * 6 + 5, "geodp-fig4": 2 * 6}[name]
    found = direction_study(DirectionStudy(**{**point, **small, **quick["set"]}))
    assert all(math.isfinite(value) for value in found.values())
