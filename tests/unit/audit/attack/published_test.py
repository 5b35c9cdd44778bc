"""Published as private, and not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.audits import (
    PUBLISHED,
)
from vestige import ConfigError
from vestige.audit.attack import audit
from vestige.audit.attack.published import tipping_norms
from vestige.methods import (
    DPAdamAC,
)


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
