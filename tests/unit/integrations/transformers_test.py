"""PrivateTrainer: the same releases as a plain loop, resumed runs, and what it logs and saves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.support.trainers import (
    LENGTH,
    SIZES,
    VOCABULARY,
    N,
    Releases,
    Sentences,
    equal,
    flat,
    seeded,
)
from vestige import ConfigError, PrivacyEngine, PrivacyError

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[hf]'")
accelerate = pytest.importorskip("accelerate", reason="needs the extra: pip install -e '.[hf]'")
from vestige.integrations.transformers import PrivacyArguments, PrivateTrainer  # noqa: E402

PRIVACY = PrivacyArguments(
    max_grad_norm=1.0, delta=1e-3, noise_multiplier=1.0, noise_seed=3, accountant="rdp"
)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, intermediate_size=24, max_position_embeddings=LENGTH, **SIZES
    )
    return transformers.BertForSequenceClassification(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=24, num_key_value_heads=1, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


class Watch(transformers.TrainerCallback):
    """Puts an observer on the engine's door when training begins, and ends it early if told so."""

    def __init__(self, stop):
        self.trainer, self.releases, self.stop = None, Releases(), stop

    def on_step_end(self, args, state, control, **others):
        if state.global_step == self.stop:
            control.should_training_stop = True

    def on_train_begin(self, args, state, control, **others):
        self.trainer.engine.door.observers.append(self.releases)


def trainer_of(model, folder, data=None, privacy=PRIVACY, rows=6, accumulated=1, **arguments):
    """A trainer of SGD at a constant rate, with lots of 6 records."""
    options = {"logging_steps": 1, "save_strategy": "no", "num_train_epochs": 1} | arguments
    watch = Watch(options.pop("stop", None))
    built = {name: options.pop(name) for name in ("compute_loss_func", "eval") if name in options}
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulated,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = PrivateTrainer(
        model=model,
        args=args,
        train_dataset=Sentences() if data is None else data,
        eval_dataset=built.pop("eval", None),
        optimizers=(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), None),
        privacy=privacy,
        callbacks=[watch],
        **built,
    )
    watch.trainer = trainer
    return trainer, watch.releases


def plain_loop(model, losses, data, physical=None, epochs=2, lot=6):
    """The documented loop, with the trainer's settings."""
    engine = PrivacyEngine("rdp", noise_seed=3)
    model.train()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
        data_loader=DataLoader(data, batch_size=lot),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
    )
    releases = Releases()
    engine.door.observers.append(releases)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            engine.backward(losses(model, batch))
            optimizer.step()
    return releases.values


def class_losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def token_losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = []
    for row, labels in zip(logits[:, :-1], batch["labels"][:, 1:], strict=True):
        each = F.cross_entropy(row, labels, ignore_index=-100, reduction="none")
        losses.append(each.sum() / (labels != -100).sum().clamp(min=1))
    return torch.stack(losses)


@pytest.mark.parametrize(("name", "physical"), [("bert", None), ("bert", 3), ("llama", 3)])
def test_two_epochs_release_what_a_plain_loop_releases(name, physical, tmp_path):
    """Dropout, padding and ignored labels included; the masks are used in both."""
    make, losses, tokens = {
        "bert": (bert, class_losses, False),
        "llama": (llama, token_losses, True),
    }[name]
    data, model = Sentences(tokens=tokens), seeded(make)
    split = {} if physical is None else {"rows": physical, "accumulated": 6 // physical}
    trainer, releases = trainer_of(model, tmp_path, data, num_train_epochs=2, **split)
    out = trainer.train()
    assert out.global_step == trainer.engine.released == 2 * 4
    other = seeded(make)
    expected = plain_loop(other, losses, data, physical)
    assert len(expected) == 8
    if name == "bert":  # token losses add up in another order
        assert equal(releases.values, expected)
        assert torch.equal(flat(model), flat(other))
    for one, two in zip(releases.values, expected, strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    assert model.config._attn_implementation == "sdpa"  # as it was


def test_gradient_checkpointing_changes_no_release(tmp_path):
    seen = []
    for on in (False, True):
        folder = tmp_path / str(on)
        trainer, releases = trainer_of(seeded(bert), folder, gradient_checkpointing=on)
        trainer.train()
        seen.append(releases.values)
    assert len(seen[0]) == 4 and equal(*seen)


def test_adapters_are_trained_and_the_rest_stays(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra: pip install -e '.[hf]'")
    base = seeded(bert)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = seeded(lambda: peft.get_peft_model(base, config))
    trainer, releases = trainer_of(model, tmp_path, rows=3, accumulated=2, save_strategy="epoch")
    start = flat(model)
    trainer.train()
    assert len(releases.values) == 4 and releases.values[0].numel() == start.numel()
    assert (flat(model) != start).all()
    kept = {name.replace("base_layer.", ""): value for name, value in base.state_dict().items()}
    frozen = [n for n in before if "classifier" not in n]
    assert all(torch.equal(before[name], kept[name]) for name in frozen)
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "privacy.pt", "statement.json", "statement.md"} <= names


def test_a_parameter_without_a_part_in_the_first_release_stops_the_run(tmp_path):
    model = seeded(bert)
    model.idle = nn.Linear(2, 2)
    trainer, releases = trainer_of(model, tmp_path, compute_loss_func=rowwise)
    with pytest.raises(PrivacyError, match=r"'idle.weight' and 1 more had no part in the first"):
        trainer.train()
    assert len(releases.values) == 1 and trainer.state.log_history == []
    model.idle.requires_grad_(False)
    trainer, _ = trainer_of(model, tmp_path, compute_loss_func=rowwise)
    assert trainer.train().global_step == 4


def rowwise(outputs, labels, num_items_in_batch=None):
    assert num_items_in_batch is None
    return F.cross_entropy(outputs.logits, labels, reduction="none")


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    """From the middle of an epoch: lots, noise, epochs and charges."""
    at = 3

    def make(folder, **more):
        model = seeded(bert)
        options = {"save_strategy": "steps", "save_steps": at, "num_train_epochs": 2}
        return model, *trainer_of(model, folder, rows=3, accumulated=2, **options, **more)

    model, trainer, _ = make(tmp_path / "whole")
    trainer.train()
    _, cut, _ = make(tmp_path / "cut", stop=at)
    assert cut.train().global_step == at
    resumed, again, releases = make(tmp_path / "cut")
    out = again.train(resume_from_checkpoint=True)
    assert out.global_step == 8 and len(releases.values) == 8 - at
    assert torch.equal(flat(resumed), flat(model))
    assert again.engine.ledger.steps == again.engine.released == 8 and again.engine.lost == 0
    assert again.engine.get_epsilon(1e-3) == trainer.engine.get_epsilon(1e-3)
    told = [(entry["step"], entry["epoch"]) for entry in again.state.log_history]
    assert told == [(entry["step"], entry["epoch"]) for entry in trainer.state.log_history]


def test_a_checkpoint_without_its_state_is_refused(tmp_path):
    trainer, _ = trainer_of(seeded(bert), tmp_path, save_strategy="epoch")
    trainer.train()
    (tmp_path / "checkpoint-4" / "privacy.pt").unlink()
    again, _ = trainer_of(seeded(bert), tmp_path)
    with pytest.raises(ConfigError, match=r"has no privacy.pt: .* what its run has spent is"):
        again.train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        trainer_of(seeded(bert), tmp_path / "none")[0].train(resume_from_checkpoint=True)


def test_what_is_logged_and_saved_is_the_same_on_neighbours(tmp_path):
    """The state that the trainer writes down, all of it, and its logs."""
    written = []
    for records in (N, N - 1):
        privacy = replace(PRIVACY, dataset_size=N)
        folder = tmp_path / str(records)
        trainer, _ = trainer_of(
            seeded(bert), folder, Sentences(records), privacy, 3, 2, save_strategy="epoch"
        )
        out = trainer.train()
        assert math.isnan(out.training_loss) and set(out.metrics) <= {"epsilon", "epoch"}
        state = (folder / "checkpoint-4" / "trainer_state.json").read_text()
        written.append((state, trainer.state.log_history, trainer.engine.released))
    assert written[0] == written[1]
    history = json.loads(written[0][0])["log_history"]
    assert all(set(e) == {"epoch", "epsilon", "learning_rate", "step"} for e in history)
    spent = [entry["epsilon"] for entry in history]
    assert spent == sorted(spent) and len(spent) == 4


def test_the_training_loss_is_marked_where_it_is_wanted(tmp_path):
    privacy = replace(PRIVACY, train_loss=True)
    trainer, _ = trainer_of(seeded(bert), tmp_path, privacy=privacy)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss_outside_guarantee" in entry]
    assert len(logged) == 4 and all(0 < e["loss_outside_guarantee"] < 2 for e in logged)
    assert not any("loss" in entry or "grad_norm" in entry for entry in trainer.state.log_history)
    assert any("training loss is logged" in caveat for caveat in trainer.engine.caveats())


def test_evaluation_is_untouched_and_choosing_by_it_is_a_caveat(tmp_path):
    model = seeded(bert)
    trainer, _ = trainer_of(
        model,
        tmp_path,
        eval=Sentences(8, seed=5),
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=5))
    trainer.train()
    found = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert len(found) == 2 and trainer.engine.released == 8
    with torch.no_grad():
        model.eval()
        batch = torch.utils.data.default_collate(list(Sentences(8, seed=5)))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(model(**batch).loss))
    stated = json.loads((tmp_path / "checkpoint-8" / "statement.json").read_text())
    for said in ("the best checkpoint is kept", "training stops early"):
        assert any(said in caveat for caveat in trainer.engine.caveats())
        assert said in json.dumps(stated)


def test_a_target_is_met_and_a_second_run_composes(tmp_path):
    privacy = PrivacyArguments(max_grad_norm=1.0, delta=1e-3, target_epsilon=4.0, accountant="rdp")
    trainer, _ = trainer_of(seeded(bert), tmp_path, privacy=privacy)
    trainer.train()
    assert 3.5 < trainer.engine.get_epsilon(1e-3) <= 4.0
    with pytest.raises(ConfigError, match="epsilon"):  # all of it is spent
        trainer.train()
    trainer.privacy = PRIVACY
    trainer.train()
    assert (trainer.engine.released, trainer.engine.ledger.steps) == (4, 8)


def test_methods_that_a_step_without_a_closure_does_not_do_are_refused(tmp_path):
    trainer, _ = trainer_of(seeded(bert), tmp_path, privacy=replace(PRIVACY, method="dp-sam"))
    with pytest.raises(PrivacyError, match="evaluates every batch twice"):
        trainer.train()
    privacy = replace(PRIVACY, method="dp-is")
    trainer, _ = trainer_of(seeded(bert), tmp_path, privacy=privacy)
    trainer.train()
    assert trainer.engine.released == 4
    trainer, _ = trainer_of(seeded(bert), tmp_path, privacy=privacy, rows=3, accumulated=2)
    with pytest.raises(ConfigError, match="'dp-is' hands out all records beside its lots"):
        trainer.train()


REFUSED = {
    "torch_compile": {"torch_compile": True},
    "train_sampling_strategy": {"train_sampling_strategy": "group_by_length"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_go_with_it_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=f"does not take {name}="):
        trainer_of(seeded(bert), tmp_path, **REFUSED[name])


def test_exactly_one_way_to_say_how_much_noise():
    for given in ({}, {"target_epsilon": 1.0, "noise_multiplier": 1.0}):
        with pytest.raises(ConfigError, match="exactly one of them"):
            PrivacyArguments(max_grad_norm=1.0, delta=1e-3, **given)


def test_an_interrupt_in_the_middle_of_a_lot_is_charged(tmp_path):
    def interrupt(outputs, labels, num_items_in_batch=None):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rowwise(outputs, labels)

    calls = []
    trainer, _ = trainer_of(
        seeded(bert), tmp_path, rows=3, accumulated=2, compute_loss_func=interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (trainer.engine.released, trainer.engine.ledger.steps) == (0, 1)
    assert accelerate.Accelerator(cpu=True).sync_gradients  # loops of others step again
