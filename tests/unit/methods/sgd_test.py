"""DP-IS as a method: what it goes with, and what it refuses."""

from __future__ import annotations

import math

import pytest

from tests.support.importance_runs import CLIPPED, NORMS, go, records
from tests.support.small_runs import private
from vestige import ConfigError
from vestige.methods import DPIS
from vestige.updates.adam import AdamBC


def test_lots_are_drawn_too_late_for_workers():
    with pytest.raises(ConfigError, match="workers cannot read ahead: use num_workers=0 instead"):
        records(NORMS, 3, DPIS(), workers=1)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (DPIS(floor=0.2), {}, r"floor=0.2 is below the sampling rate 0.25"),
        (DPIS(), {"clipping": "per_layer"}, "not at 2 groups of it: use flat clipping"),
        (DPIS(), {"clipping": "quantile"}, "takes a fixed clip bound"),
        (DPIS(), {"clipping": "auto"}, "takes a fixed clip bound"),
        (DPIS(), {"sample_rate": [0.1, 0.11, 0.12, 0.13], "steps": 4}, "rate of its own"),
        (DPIS(), {"noise_multiplier": [1.0, 2.0], "steps": 2}, "no schedule"),
        (DPIS(), {"denoiser": "doppler"}, "scales its releases itself"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(method, options, message):
    with pytest.raises(ConfigError, match=message):
        private(method, **options)


@pytest.mark.parametrize(
    "bad", [{"floor": 0.0}, {"floor": 1.5}, {"norm_noise": 0.0}, {"norm_noise": math.inf}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DPIS(**bad)


def test_the_corrected_adam_knows_the_noise_of_the_gradient():
    engine, model, optimizer, loader = records(
        NORMS, 3, DPIS(0.3, 1e-9), 3, noise_multiplier=0.8, optimizer=lambda p: AdamBC(p, 0.01)
    )
    go(engine, model, optimizer, loader, 2)
    std = 0.8 * CLIPPED.mean() / 3
    assert optimizer.noise_variances[id(model.weight)] == pytest.approx(std**2, rel=1e-6)
