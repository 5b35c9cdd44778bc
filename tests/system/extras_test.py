"""What works with the core alone: the extras are hidden from a fresh Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CLI = ("typer", "rich", "sklearn", "pooch", "matplotlib")
LAB = ("pandas",)
TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import vestige
from vestige import PrivacyEngine, accounting, methods, spectrum

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
engine = PrivacyEngine("rdp")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, y in loader:
    optimizer.zero_grad()
    engine.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    optimizer.step()
assert engine.statement(1e-5)["guarantee"]["epsilon"] > 0
"""


def without(
    hidden: tuple[str, ...], program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python where `hidden` are not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
    environment = {name: value for name, value in os.environ.items() if name != "VESTIGE_DATA"}
    return subprocess.run(
        [sys.executable, "-c", hide + program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )


def test_the_core_imports_and_trains_without_the_extras() -> None:
    ran = without(CLI + LAB, TRAINING)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    "program", ["from vestige.cli import main; main()", "import vestige.__main__"]
)
def test_the_command_says_what_to_install(program: str) -> None:
    ran = without(CLI, program, "train")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == (
        "vestige: error: the command needs typer, which is not installed: "
        "pip install 'vestige-dp[cli]'\n"
    )


@pytest.mark.parametrize(
    ("hidden", "arguments", "extra"),
    [
        ("sklearn", "train --device cpu --steps 1", "cli"),
        ("pooch", "train --device cpu --steps 1 --dataset mnist", "cli"),
        ("matplotlib", "spectrum linear --plot a.png", "cli"),
    ],
)
def test_what_a_command_lacks_is_said_in_one_line(hidden: str, arguments: str, extra: str) -> None:
    ran = without((hidden,), "from vestige.cli import main; main()", *arguments.split())
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "not installed" in ran.stderr
    assert f"pip install 'vestige-dp[{extra}]'" in ran.stderr
