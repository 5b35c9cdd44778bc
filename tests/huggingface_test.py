"""Transformers and LoRA models, unwrapped: clipped sums equal a loop over single examples."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.reference import clip_and_sum
from vestige import PrivacyEngine
from vestige.clipping import Clip

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
