"""`vestige tune`: a random search over settings whose own cost is part of the reported epsilon."""

from __future__ import annotations

from vestige.train.tune.candidates import Candidate, from_file, from_grid
from vestige.train.tune.scaling import at_lot
from vestige.train.tune.search import Search, tune

__all__ = ["Candidate", "Search", "at_lot", "from_file", "from_grid", "tune"]
