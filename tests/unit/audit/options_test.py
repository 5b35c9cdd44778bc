"""What is audited: refusals, and no torch before them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vestige import ConfigError
from vestige.audit.options import AuditOptions


def test_a_partition_by_names_is_refused():
    with pytest.raises(ConfigError, match="brings its own model"):
        AuditOptions(method="fo", clipping=[["a"], ["b"]])


def test_the_command_is_parsed_and_checked_without_torch():
    code = (
        "import sys, vestige.cli.audit, vestige.audit.options as s;"
        "s.AuditOptions(method='fo', epsilon=1.0);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
