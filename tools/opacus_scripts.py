"""Run Opacus' example scripts and tutorials with `opacus` replaced by `vestige` in their imports.

    python tools/opacus_scripts.py --opacus PATH                  the table
    python tools/opacus_scripts.py --opacus PATH --json FILE      and every run as JSON
    python tools/opacus_scripts.py --opacus PATH --only mnist     one of them
    python tools/opacus_scripts.py --opacus PATH --engine opacus  as they are, for comparison

PATH is a checkout of Opacus: its scripts are read, and not part of this repository. Data that would
be downloaded are stand-ins of the same shapes (tools/opacus_standins.py), and runs are short. Lines
about data, devices and lengths are changed here and not counted. A line that is refused, or that
epsilon has a caveat for, is replaced by what the message says, the script runs again, and the line
counts as edited.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"^(\s*(?:from|import)\s+)opacus\b", re.M)
REFUSALS = ("ConfigError", "PrivacyError", "Refused", "UnsupportedModel")
Changes = dict[str, str]


@dataclass(frozen=True)
class Script:
    """A script: how it is made short, and what has to be edited for the guarantee."""

    path: str
    arguments: tuple[str, ...] = ()
    standins: tuple[str, ...] = ()
    short: Changes = field(default_factory=dict)  # data, devices, lengths: not counted
    edits: Changes = field(default_factory=dict)  # lines that are refused, and their replacement
    environment: Changes = field(default_factory=dict)


CPU = ("--device", "cpu")
SMALL = ("torchvision",)
CIFAR = (*CPU, *"--epochs 1 --batch-size 64 --workers 0 --print-freq 2".split())
CHARS = (*CPU, *"--data-root names --epochs 2 --batch-size 64 --hidden-size 16".split())
IMDB = (*CPU, *"-n 2 --batch-size 16 --workers 0".split())
GAN = "--data-root mnist --workers 0 --batch-size 8 --ngf 8 --ndf 8 --nz 8 --epochs 2".split()
BENCHMARK = (*CPU, *"--workers 0 --steps 4 --batch-size 8 --height 32 --width 32".split())
NO_GPU = {'torch.device("cuda:0")': 'torch.device("cpu")'}
# Rows as long as a public number says, not as the longest of their lot.
STACKED = "    y = torch.stack([elem[{}] for elem in batch]).long()\n"
NAMED, RATED = STACKED.format(1), STACKED.format('"label"')
PAD_NAMES = {NAMED: f"    x = nn.functional.pad(x, (0, 32 - x.shape[1]))\n{NAMED}"}
PAD_REVIEWS = {RATED: f"    x = F.pad(x, (0, 256 - x.shape[1]))\n{RATED}"}
POISSON = "            poisson_sampling=False,\n"
# Training without privacy has a loader of its own.
ORDINARY = {
    "optimizer_nodp, train_loader": (
        "optimizer_nodp, DataLoader(train_ds, batch_size, collate_fn=padded_collate)"
    )
}
# What the loop draws for a lot is secret; the generator learns from a copy, at a public size.
FRESH = "copy.deepcopy(netD)(netG(torch.randn(opt.batch_size, nz, 1, 1, device=device)))"
NOISE = "        noise = torch.randn(batch_size, nz, 1, 1, device=device)\n"
GENERATOR = {
    "import argparse\n": "import argparse\nimport copy\n",
    NOISE: f"        with privacy_engine.secret_randomness():\n    {NOISE}",
    "label_g = torch.full((batch_size,)": "label_g = torch.full((opt.batch_size,)",
    "output_g = netD(fake)": f"output_g = {FRESH}",
}
SCRIPTS = {
    "mnist": Script("examples/mnist.py", (*CPU, "-n", "2", "-b", "32"), SMALL),
    "cifar10": Script("examples/cifar10.py", CIFAR, SMALL),
    "cifar10 --clip_per_layer": Script("examples/cifar10.py", (*CIFAR, "--clip_per_layer"), SMALL),
    "char-lstm": Script("examples/char-lstm-classification.py", CHARS, ("names",), edits=PAD_NAMES),
    "imdb": Script(
        "examples/imdb.py",
        IMDB,
        ("datasets", "transformers"),
        edits=PAD_REVIEWS | {POISSON: "", ".squeeze()": ".squeeze(-1)"},
    ),
    "dcgan": Script("examples/dcgan.py", (*CPU, *GAN), SMALL, edits=GENERATOR),
    "mnist_lightning": Script(
        "examples/mnist_lightning.py",
        (),
        ("lightning", "torchvision"),
        environment={"LIGHTNING_VANILLA": "true"},
    ),
    "image tutorial": Script(
        "tutorials/building_image_classifier.ipynb",
        (),
        ("torchvision", "notebooks"),
        {"EPOCHS = 20": "EPOCHS = 1", "SIZE = 512": "SIZE = 64", "SIZE = 128": "SIZE = 16"},
    ),
    "text tutorial": Script(
        "tutorials/building_text_classifier.ipynb",
        (),
        ("transformers", "notebooks"),
        {
            "EPOCHS = 3": "EPOCHS = 1",
            "LENGHT = 128": "LENGHT = 32",
            "INTERVAL = 5000": "INTERVAL = 2",
        }
        | NO_GPU,
    ),
    "vision_benchmark": Script(
        "examples/vision_benchmark.py",
        (*BENCHMARK, "--benchmark-data-loader"),
        SMALL,
        {"torch.cuda.synchronize()": "pass", ".cuda(non_blocking=True)": ""},
        {POISSON: ""},
    ),
    "non-wrapping tutorial": Script("tutorials/non_wrapping_mode.ipynb"),
    "LSTM tutorial": Script(
        "tutorials/building_lstm_name_classifier.ipynb",
        (),
        ("notebooks",),
        # The last: its own call lacks an argument, and fails with Opacus too.
        {
            "epochs = 50": "epochs = 2",
            "batch_size = 800": "batch_size = 64",
            "train_loader, epoch, device": "train_loader, epoch, None, device",
        },
        PAD_NAMES | ORDINARY,
    ),
}


def cells_of(path: Path) -> list[str]:
    """The code of a script, or of each cell of a notebook."""
    if path.suffix != ".ipynb":
        return [path.read_text()]
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def replaced(cells: list[str], changes: Changes) -> list[str]:
    """The cells with these changes; a change that finds nothing is an error of the runner."""
    for old, new in changes.items():
        if not any(old in cell for cell in cells):
            raise SystemExit(f"{old!r} is not in the script: it is of another version of Opacus.")
        cells = [cell.replace(old, new) for cell in cells]
    return cells


def swapped(cells: list[str]) -> list[str]:
    """The cells with the import changed."""
    return [IMPORT.sub(r"\1vestige", cell) for cell in cells]


def epsilons() -> list[float]:
    """What the engines of this process have spent at delta 1e-5."""
    from vestige import PrivacyEngine

    engines = [thing for thing in gc.get_objects() if isinstance(thing, PrivacyEngine)]
    return [engine.get_epsilon(1e-5) for engine in engines if engine.released]


def caveats() -> list[str]:
    """What their readers must know, once each; that sizes are public is left out."""
    from vestige import PrivacyEngine

    engines = [thing for thing in gc.get_objects() if isinstance(thing, PrivacyEngine)]
    said = [words for engine in engines if engine.released for words in engine.caveats()]
    return sorted({words for words in said if "is treated as public" not in words})


def run_here(script: Script, checkout: Path, engine: str, edited: bool) -> dict[str, Any]:
    """Run a script in this process and this folder."""
    from tools.opacus_standins import install

    install(script.standins)
    os.environ.update(script.environment)
    sys.argv = [script.path, *script.arguments]
    cells = replaced(cells_of(checkout / script.path), script.short)
    cells = replaced(cells, script.edits if edited else {})
    cells = swapped(cells) if engine == "vestige" else cells
    space: dict[str, Any] = {"__name__": "__main__"}
    done, problem = 0, None
    for number, cell in enumerate(cells):
        name = f"{script.path}" + (f", cell {number + 1}" if len(cells) > 1 else "")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                exec(compile(cell, name, "exec"), space)
            done += 1
        except (Exception, SystemExit) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
            line = frames[-1].lineno if frames else None
            text = cell.splitlines()[line - 1].strip() if line else ""
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            problem = {"cell": number + 1, "line": line, "text": text, "said": said}
            break
    spent = epsilons() if engine == "vestige" else []
    told = caveats() if engine == "vestige" else []
    return {
        "cells": len(cells),
        "done": done,
        "problem": problem,
        "epsilons": spent,
        "caveats": told,
    }


def run_apart(name: str, checkout: Path, engine: str, edited: bool) -> dict[str, Any]:
    """Run a script in a process and a folder of its own."""
    command = [sys.executable, __file__, "--opacus", str(checkout), "--only", name]
    command += ["--here", "--engine", engine, *(["--edited"] if edited else [])]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    if not ran.stdout.strip():
        raise SystemExit(f"{name} ended without an answer:\n{ran.stderr[-2000:]}")
    return {"output": ran.stderr, **json.loads(ran.stdout.splitlines()[-1])}


def outcome(run: dict[str, Any]) -> str:
    """What a run has come to, in words; the whole message is in the JSON."""
    problem = run["problem"]
    if problem is None:
        return "runs" + "".join(f"; caveat: {words.split(':')[0]}" for words in run["caveats"])
    place = f"cell {problem['cell']}" if run["cells"] > 1 else f"line {problem['line']}"
    kind, _, said = problem["said"].partition(": ")
    verb = "refused" if kind in REFUSALS else f"fails with {kind}"
    said = re.sub(r"\(/\S*/(\w+)", r"(\1", said)  # a file by its name
    return f"{place} {verb}: {re.split(r'[:.](?: |$)', said)[0]}"


def edited(script: Script, checkout: Path) -> int:
    """How many lines the edits change, add or take away."""
    before = replaced(cells_of(checkout / script.path), script.short)
    texts = ["\n".join(cells).splitlines() for cells in (before, replaced(before, script.edits))]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    spans = (span for span in matcher.get_opcodes() if span[0] != "equal")
    return sum(max(b - a, d - c) for _, a, b, c, d in spans)


def report(name: str, checkout: Path, engine: str) -> dict[str, Any]:
    """A script as it is, and with its edits where it has some."""
    script = SCRIPTS[name]
    first = run_apart(name, checkout, engine, False)
    row = {"script": name, "edited lines": 0, "outcome": outcome(first), "first": first}
    if script.edits:
        second = run_apart(name, checkout, engine, True)
        row |= {"edited lines": edited(script, checkout), "after": outcome(second)}
        row["second"] = second
    spent = row.get("second", first)["epsilons"]
    return row | {"epsilon": max(spent, default=None)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = ["| script | as it is | edited lines | with them |", "|---|---|---:|---|"]
    for row in rows:
        last = row.get("after", "")
        lines.append(f"| {row['script']} | {row['outcome']} | {row['edited lines']} | {last} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opacus", type=Path, required=True, help="a checkout of Opacus")
    parser.add_argument("--only", choices=SCRIPTS, help="one script")
    parser.add_argument("--engine", choices=("vestige", "opacus"), default="vestige")
    parser.add_argument("--json", type=Path, help="a file for every run's outcome and output")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--edited", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkout = given.opacus.resolve()
    if given.here:
        print(json.dumps(run_here(SCRIPTS[given.only], checkout, given.engine, given.edited)))
        return
    names = [given.only] if given.only else list(SCRIPTS)
    rows = [report(name, checkout, given.engine) for name in names]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
