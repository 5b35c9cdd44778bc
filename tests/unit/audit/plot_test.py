"""The plot of an audit."""

from __future__ import annotations

import pytest

from vestige.audit.attack import audit
from vestige.audit.plot import write


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("method", ["fo", "geodp"])
def test_a_plot_is_written(method, suffix, tmp_path):
    result = audit(method, noise_multiplier=2.0, steps=2, trials=200, seed=1)
    path = tmp_path / f"plot.{suffix}"
    write(result, path)
    start = b"\x89PNG" if suffix == "png" else b"<?xml"
    assert path.read_bytes().startswith(start) and path.stat().st_size > 10_000
