"""The plot of an audit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from vestige.audit.attack.canary import audit
from vestige.audit.plot import dp_curve, run_curve, write
from vestige.privacy.ledger import Event


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
