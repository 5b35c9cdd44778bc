"""Accelerate and Fabric around the plain loop, in both orders; and what trainers leave behind.

The files of a real run of `PrivateTrainer` are searched for what must stay inside, as
secrets_test.py does with those of `vestige train`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.leak_search import Secrets
from tests.support.trainers import LENGTH, SIZES, VOCABULARY, N, Sentences, flat, seeded
from vestige import ConfigError, PrivacyEngine


def net():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


class Plain:
    def prepare(self, model, optimizer, loader):
        return model, optimizer, loader

    def backward(self, loss):
        loss.backward()


def accelerated():
    accelerate = pytest.importorskip("accelerate", reason="needs: pip install -e '.[hf]'")
    return accelerate.Accelerator(cpu=True)


class Fabric:
    def __init__(self):
        lightning = pytest.importorskip("lightning", reason="needs: pip install -e '.[lightning]'")
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1)
        self.backward = self.fabric.backward

    def prepare(self, model, optimizer, loader):
        return *self.fabric.setup(model, optimizer), self.fabric.setup_dataloaders(loader)


def trained(around, order, epsilon=None):
    """The weights after two epochs, and the engine; `order` says when `around` prepares."""
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(N, 5, generator=made), torch.randint(0, 3, (N,), generator=made)
    )
    model, engine = seeded(net), PrivacyEngine("rdp", noise_seed=3)
    things = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 6, shuffle=True)

    def make_private(model, optimizer, loader):
        given = {"module": model, "optimizer": optimizer, "data_loader": loader}
        given |= {"max_grad_norm": 1.0, "max_physical_batch_size": 2}
        if epsilon is None:
            return engine.make_private(**given, noise_multiplier=1.0)
        target = {"target_epsilon": epsilon, "target_delta": 1e-3, "epochs": 2}
        return engine.make_private_with_epsilon(**given, **target)

    if order == "before":
        things = make_private(*around.prepare(*things))
    else:
        things = around.prepare(*make_private(*things))
    wrapped, optimizer, loader = things
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            around.backward(F.cross_entropy(wrapped(x), y))
            optimizer.step()
    return flat(model), engine


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("make", [accelerated, Fabric], ids=["accelerate", "fabric"])
def test_prepared_before_or_after_the_weights_are_those_of_the_plain_loop(make, order):
    around = make()
    expected, _ = trained(Plain(), "before")
    weights, engine = trained(around, order)
    assert torch.equal(weights, expected)
    assert engine.released == engine.ledger.steps == 8
    weights, engine = trained(around, order, epsilon=3.0)
    assert 2.5 < engine.get_epsilon(1e-3) <= 3.0


# -- what a trainer leaves behind -----------------------------------------------------------


def observed(folder, private, **options):
    """A run of a trainer, and its losses, norms and records."""
    transformers = pytest.importorskip("transformers", reason="needs: pip install -e '.[hf]'")
    pytest.importorskip("accelerate", reason="needs: pip install -e '.[hf]'")
    from vestige.integrations.transformers import PrivacyArguments, PrivateTrainer

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, intermediate_size=24, max_position_embeddings=LENGTH, **SIZES
    )
    model = seeded(lambda: transformers.BertForSequenceClassification(config))
    secrets = Secrets(numbers={"loss": [], "norm": []})
    secrets.sequences["tokens"] = [row["input_ids"].tolist() for row in Sentences()]
    secrets.sequences["tokens"] = [row for row in secrets.sequences["tokens"] if 0 not in row]

    def losses(outputs, labels, num_items_in_batch=None):
        each = F.cross_entropy(outputs.logits, labels, reduction="none")
        lot.append(each.detach())
        secrets.numbers["loss"] += [*each.tolist(), each.mean().item(), each.sum().item()]
        return each if private else each.mean()

    lot: list[torch.Tensor] = []
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=6,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    given = {"model": model, "args": args, "train_dataset": Sentences()}
    if not private:
        transformers.Trainer(**given, compute_loss_func=losses).train()
        return secrets, lot
    trainer = PrivateTrainer(
        **given,
        compute_loss_func=losses,
        privacy=PrivacyArguments(
            max_grad_norm=1.0, delta=1e-3, noise_multiplier=1.0, accountant="rdp", **options
        ),
    )
    look = None

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **others):
            nonlocal look
            collector = trainer.engine._run.capture.collector
            look, collector._look = collector._look, norms

    def norms(square_norms, group):
        secrets.numbers["norm"] += [*square_norms.sqrt().tolist(), *square_norms.tolist()]
        look(square_norms, group)

    trainer.add_callback(Watch())
    trainer.train()
    secrets.raw["key"] = [trainer.engine._run.door.randomness._key]
    return secrets, lot


def files(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_no_file_of_a_trainer_holds_a_secret(tmp_path):
    secrets, lots = observed(tmp_path, private=True)
    assert len(secrets.numbers["loss"]) > 2 * N and len(secrets.numbers["norm"]) > 2 * N
    assert len(secrets.sequences["tokens"]) > 1
    assert len(lots) == 8
    names = {path.name for path in files(tmp_path)}
    assert {"trainer_state.json", "privacy.pt", "statement.json", "ledger.jsonl"} <= names
    for path in files(tmp_path):
        assert secrets.found_in(path.read_bytes()) == set(), path.name


def test_the_search_finds_what_an_ordinary_trainer_writes_down(tmp_path):
    """The yardstick: losses and times are in trainer_state.json, and the search sees them."""
    secrets, _ = observed(tmp_path, private=False)
    state = tmp_path / "checkpoint-8" / "trainer_state.json"
    assert secrets.found_in(state.read_bytes()) == {"loss"}
    history = json.loads(state.read_text())["log_history"]
    assert all({"loss", "grad_norm"} <= set(entry) for entry in history)


def test_a_loss_that_is_asked_for_is_found_under_its_mark_alone(tmp_path):
    secrets, _ = observed(tmp_path, private=True, train_loss=True)
    state = tmp_path / "checkpoint-8" / "trainer_state.json"
    assert secrets.found_in(state.read_bytes()) == {"loss"}
    content = json.loads(state.read_text())
    for entry in content["log_history"]:
        del entry["loss_outside_guarantee"]
    assert secrets.found_in(json.dumps(content).encode()) == set()


# -- docs/trainers.md -----------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()


@pytest.mark.filterwarnings("ignore")  # of the libraries: few workers, small data
@pytest.mark.parametrize("needs", ["transformers", "lightning", "accelerate"])
def test_the_examples_of_the_page_run_as_printed(needs, tmp_path, monkeypatch, capsys):
    pytest.importorskip(needs, reason=f"needs {needs}, an extra")
    (code,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if re.search(rf"^(import|from) {needs}\b", text, re.M)
    ]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/trainers.md", "exec"), {"__name__": "example"})
    said = re.search(r"epsilon ([\d.]+) after (\d+) releases", capsys.readouterr().out)
    assert 1 < float(said[1]) < 6
    assert int(said[2]) == {"transformers": 12, "lightning": 8, "accelerate": 4}[needs]


@pytest.mark.parametrize(("name", "extra"), [("transformers", "hf"), ("lightning", "lightning")])
def test_a_missing_extra_is_one_line(name, extra, monkeypatch):
    for loaded in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.delitem(sys.modules, f"vestige.integrations.{name}", raising=False)
    with pytest.raises(ConfigError, match=rf"not installed: pip install 'vestige-dp\[{extra}\]'"):
        importlib.import_module(f"vestige.integrations.{name}")
