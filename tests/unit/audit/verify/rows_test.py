"""Rows against records, on models that fold them."""

from __future__ import annotations

import pytest

from vestige.audit.verify import rows
from vestige.errors import PrivacyError


@pytest.mark.parametrize("name", rows.MODELS)
def test_every_fold_of_rows_reaches_the_bound_and_stays_within_it(name):
    for options in ({}, {"clipping": "per_layer"}, {"self_check": False}):
        one = rows.measure(rows.made(name), **options)
        assert one.within and one.ratio > 0.99  # a record that moves nothing would show nothing


def test_the_gate_is_refused_by_the_self_check_alone():
    gated = rows.made(rows.GATED)
    with pytest.raises(PrivacyError, match="self-check"):
        rows.measure(gated)
    assert rows.measure(gated, self_check=False).ratio > 2
