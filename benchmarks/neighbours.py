"""`python -m benchmarks.neighbours`: how far one more record moves the whole clipped sum.

    python -m benchmarks.neighbours                   small forms on a CPU
    python -m benchmarks.neighbours --device cuda     GPT-2 and ResNet-18, bf16, TF32 and float32

The real engine takes all records (a sampling rate of 1) without noise; what leaves the door is the
clipped sum. S' is that of n + 1 records, S that of n of them, and R = |S' - S| / C has the changes
of all other rows in it: kernels are chosen by shape, and n + 1 rows may be added in another order.
`others` is what those n rows move by alone, |S in n rows - S in n + 1 rows| / C, where the last row
is masked (its loss is zero). `padded` is R where both lots have the fixed shape of n + 1 rows.
The records are made up: the figures are exact functions of them.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import GPT2Size
from benchmarks.store import RESULTS, OtherMachineError, Results, Row, machine
from benchmarks.timing import free
from benchmarks.workloads import Workload
from vestige import PrivacyEngine
from vestige.audit.tape import Tape

CLIP = 1e-3  # below every record's gradient, so that all are clipped
SMALL = {"length": 48, "size": GPT2Size(words=300, length=64, width=64, heads=4, depth=4)}


class Lot:
    """A model and n + 1 records, of which the last one comes and goes."""

    def __init__(self, workload: Workload, device: str, clipping: str) -> None:
        self._workload, self._device, self._clipping = workload, device, clipping
        self._model, self._x, self._y = workload.make(device)

    def total(self, rows: int, kept: int) -> Tensor:
        """The clipped sum of a batch of `rows` rows of which the first `kept` count."""
        model = copy.deepcopy(self._model)
        keep = (torch.arange(rows, device=self._device) < kept).float()
        data = TensorDataset(self._x[:rows], self._y[:rows], keep)
        engine = PrivacyEngine("rdp")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=rows),
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            sample_rate=1.0,
            dataset_size=rows,
            clipping=self._clipping,
        )
        try:
            with Tape(engine, sums=False) as tape:
                for batch in loader:
                    engine.backward(self._losses(model, *batch))
                    optimizer.step()
            return tape.seen.looks[0].values.double()
        finally:
            engine.detach()

    def _losses(self, model: nn.Module, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        """One for each row; that of a masked row is zero."""
        with self._workload.autocast(self._device):
            logits = model(x)
        each = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="none")
        return each.view(len(y), -1).mean(1) * keep


def measure(workload: Workload, device: str, clipping: str) -> Row:
    """R of one pair of neighbours; the workload's lot is n + 1."""
    rows = workload.lot
    with workload.products():
        lot = Lot(workload, device, clipping)
        more, less = lot.total(rows, rows), lot.total(rows - 1, rows - 1)
        masked = lot.total(rows, rows - 1)
    free(device)

    def apart(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm()) / CLIP

    return {
        "section": "neighbours",
        "case": case_of(workload),
        "engine": clipping,
        "model": workload.model,
        "precision": workload.precision,
        "n": rows - 1,
        "r": apart(more, less),
        "others": apart(masked, less),
        "padded": apart(more, masked),
    }


def case_of(workload: Workload) -> str:
    """Model, precision and n."""
    return f"{workload.model}-{workload.precision}, {workload.lot - 1}"


def workloads(device: str) -> Iterator[Workload]:
    """Both models in every precision that the device has, at several n."""
    if device == "cuda":
        lots = {"gpt2": (15, 31, 32), "resnet18": (31, 127, 512)}
        precisions: Sequence[str] = ("bf16", "tf32", "fp32")
    else:
        lots, precisions = {"gpt2": (7, 15, 32), "resnet18": (3, 8)}, ("bf16", "fp32")
    for model, numbers in lots.items():
        sizes = SMALL if device == "cpu" and model == "gpt2" else {}
        for precision in precisions:
            for n in numbers:
                yield Workload(model, n + 1, precision, sizes)


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line for each pair; differences from 1, which is what a record may move."""
    lines = [
        "| model, precision | clipping | n | R - 1 | others / C | R - 1, padded |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        more, padded = row["r"] - 1, row["padded"] - 1
        lines.append(
            f"| {row['model']}, {row['precision']} | {row['engine']} | {row['n']} | {more:.1e} "
            f"| {row['others']:.1e} | {padded:.1e} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the table, merge it into the JSON."""
    made = argparse.ArgumentParser(prog="benchmarks.neighbours", description=__doc__)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--models", nargs="*", help="only these")
    made.add_argument("--out", type=Path, help="default: results/neighbours-DEVICE-COMMIT.json")
    options = made.parse_args(words)
    warnings.filterwarnings("ignore")
    on = machine(options.device)
    path = options.out or RESULTS / f"neighbours-{options.device}-{on['commit']}.json"
    try:
        results = Results(path, on)
    except OtherMachineError as error:
        made.error(str(error))
    for workload in workloads(options.device):
        if options.models and workload.model not in options.models:
            continue
        for clipping in results.missing("neighbours", case_of(workload), ("flat", "per_layer")):
            results.put([measure(workload, options.device, clipping)])
    print(table(list(results.rows.values())))


if __name__ == "__main__":
    main()
