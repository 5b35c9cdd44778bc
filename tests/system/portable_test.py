"""The library without what only Unix has: it is imported, opens a ledger file and trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vestige"
PROGRAM = """
import os, sys, warnings
sys.modules["fcntl"] = None
for name in ("pread", "O_NONBLOCK", "fchmod", "fork"):
    if hasattr(os, name):
        delattr(os, name)
warnings.simplefilter("ignore")  # filelock says that it makes do with lock files

import pathlib
import torch, vestige
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from vestige.privacy.ledger_file import LedgerFile, read

path = pathlib.Path(sys.argv[1])
engine = vestige.PrivacyEngine(ledger=path)
model = nn.Linear(4, 2)
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 2), batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, y in loader:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert sum(event.count for event in read(path).events) >= engine.ledger.steps
try:
    LedgerFile(path)
except vestige.ConfigError as error:
    assert "is in use by another run" in str(error)
else:
    raise AssertionError("a ledger was opened twice")
engine.ledger.file.close()
LedgerFile(path).close()
print(sum(event.count for event in read(path).events))
"""


def test_it_trains_without_fcntl(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ledger.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4\n"


def test_nothing_that_only_unix_has_is_imported_with_a_module() -> None:
    unix = {"fcntl", "resource", "pwd", "grp", "termios"}
    for path in SOURCE.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert not unix & {line.removeprefix("import ") for line in lines}, path
