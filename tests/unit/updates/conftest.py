"""What the tests of updates share."""

from __future__ import annotations

import pytest

from tests.support.small_runs import LOT
from vestige.release.door import Door


@pytest.fixture
def seen(monkeypatch):
    """Every release of the test's runs, divided by the lot."""
    found, original = [], Door.release

    def release(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        found.append(out.values.clone() / LOT)
        return out

    monkeypatch.setattr(Door, "release", release)
    return found
