"""Transformers and LoRA models, unwrapped: clipped sums equal a loop over single examples."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.support.reference import clip_and_sum
from vestige import PrivacyEngine, PrivacyError
from vestige.gradients.clipping import Clip

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[hf]'")
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


def tokens():
    return {"input_ids": torch.randint(0, 50, (7,))}


def next_token_losses(model, batch):
    logits, ids = model(**batch).logits, batch["input_ids"]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def class_losses(model, batch):
    logits = model(**batch).logits
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="none")


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), tokens, next_token_losses


def llama():
    config = transformers.LlamaConfig(
        vocab_size=50, intermediate_size=24, num_key_value_heads=1, **SIZES
    )
    return transformers.LlamaForCausalLM(config), tokens, next_token_losses


def bert():
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=24, max_position_embeddings=16, **SIZES
    )
    return transformers.BertForSequenceClassification(config), tokens, class_losses


def vit():
    config = transformers.ViTConfig(
        intermediate_size=24, image_size=16, patch_size=4, num_labels=2, **SIZES
    )

    def image():
        return {"pixel_values": torch.randn(3, 16, 16, dtype=torch.float64)}

    return transformers.ViTForImageClassification(config), image, class_losses


def lora():
    peft = pytest.importorskip("peft", reason="needs the extra: pip install -e '.[hf]'")
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False
    )
    model, example, losses = gpt2()
    return peft.get_peft_model(model, config), example, losses


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("make", [gpt2, llama, bert, vit, lora])
def test_clipped_sum_equals_a_loop_over_examples(make, clipping):
    torch.manual_seed(0)
    model, example, losses = make()
    model = model.double().eval()
    twin = copy.deepcopy(model)
    examples = [example() for _ in range(6)]

    def collate(rows):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        data_loader=DataLoader(examples, batch_size=6, collate_fn=collate),
        noise_multiplier=0.0,
        max_grad_norm=1e-3,
        clipping=clipping,
    )
    for batch in loader:
        engine.backward(losses(model, batch))
        optimizer.step()
    slots = engine._run.groups.slots
    got = torch.cat([slot.parameter.grad.flatten() for slot in slots]) * 6
    parameters = dict(twin.named_parameters())
    rows = []
    for one in examples:
        loss = losses(twin, collate([one]))[0]
        wanted = [parameters[slot.name] for slot in slots]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        zipped = zip(gradients, wanted, strict=True)
        rows.append(
            torch.cat(
                [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zipped]
            )
        )
    expected = clip_and_sum(torch.stack(rows), engine._run.groups, Clip(engine.plan.bounds))
    assert (got - expected).norm() < 1e-9 * expected.norm()


def lot_sum(make, examples, bound, **more):
    """The clipped sum of one lot of examples with labels, in units of the bound."""
    torch.manual_seed(0)
    model = make()[0].double().eval()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=Labelled(model, **more),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(examples, batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        sample_rate=1.0,
        dataset_size=6,
    )
    batch = next(iter(loader))
    loss = model(**batch)
    engine.backward(loss) if loss.ndim else loss.backward()
    optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()]) * 6 / bound


class Labelled(torch.nn.Module):
    """A model that is given labels, and returns its own loss."""

    def __init__(self, inner, **more):
        super().__init__()
        self.inner, self.more = inner, more

    def forward(self, input_ids, labels):
        return self.inner(input_ids=input_ids, labels=labels, **self.more).loss


def masked_lm():
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=24, max_position_embeddings=16, **SIZES
    )
    return (transformers.BertForMaskedLM(config),)


@pytest.mark.filterwarnings("ignore:the self-check was skipped")
@pytest.mark.parametrize("bound", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("make", [gpt2, llama, masked_lm])
def test_the_models_own_loss_keeps_the_bound(make, bound):
    """One long example and five short ones: the token mean must not move the short ones."""
    examples = [dict(tokens()) for _ in range(6)]
    for i, example in enumerate(examples):
        example["labels"] = example["input_ids"].clone()
        example["labels"][2 if i else 7 :] = -100
    whole, part = lot_sum(make, examples, bound), lot_sum(make, examples[1:], bound)
    assert 0 < float((whole - part).norm()) <= 1 + 1e-6


@pytest.mark.filterwarnings("ignore:the self-check was skipped")
def test_the_trainers_normaliser_does_not_couple_examples():
    """A count that the model divides by is replaced or refused, and never divides."""
    examples = [{"input_ids": torch.arange(7), "labels": torch.arange(7)} for _ in range(6)]
    refusals = r"not divided by the 6 rows|part in the loss"
    try:
        counted = lot_sum(gpt2, examples, 1.0, num_items_in_batch=torch.tensor(5))
    except PrivacyError as error:
        assert re.search(refusals, str(error))  # by the self-check, where it runs
    else:
        assert torch.allclose(counted, lot_sum(gpt2, examples, 1.0), rtol=1e-6)
    with pytest.raises(PrivacyError, match=refusals):
        lot_sum(gpt2, examples, 1.0, num_items_in_batch=5)


@pytest.mark.parametrize("make", [gpt2, llama, bert, vit, lora])
def test_gradient_checkpointing_changes_nothing(make):
    """Dropout is on: its masks are drawn again from the lot's own stream."""
    weights = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, example, losses = make()
        model.double().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = [example() for _ in range(6)]
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = PrivacyEngine(accountant="rdp", noise_seed=1)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(trained, lr=1.0),
            data_loader=DataLoader(rows, batch_size=6, collate_fn=torch.utils.data.default_collate),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        for batch in loader:
            losses(model, batch).mean().backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in trained]))
    assert torch.equal(*weights)
