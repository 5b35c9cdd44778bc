# %% [markdown]
# # LoRA: a private text classifier
#
# Adapters are small, so there is little to add noise to, and the frozen model is public. That makes
# LoRA the usual way to fine-tune a language model privately. You need
# `pip install 'vestige-dp[all,hf]'`.
#
# The model below has random weights and reads bytes, so that the tutorial runs anywhere. With a
# model from a hub only `model` and `encode` change.

# %%
import os
import random
import tempfile

import peft
import torch
import transformers

from vestige.integrations.transformers import PrivacyArguments, PrivateTrainer

EPOCHS = int(os.environ.get("TUTORIAL_EPOCHS", "20"))
torch.manual_seed(0)
random.seed(0)

GOOD, BAD = ["lovely", "superb", "a joy", "brilliant"], ["dull", "awful", "a bore", "dreadful"]
THINGS = ["film", "book", "play", "song", "dish"]


def encode(text: str) -> dict[str, torch.Tensor]:
    """Bytes, padded to a fixed length: the longest text of a lot would be private."""
    ids = list(text.encode())[:24]
    rest = 24 - len(ids)
    return {
        "input_ids": torch.tensor(ids + [0] * rest),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * rest),
    }


def review(good: bool) -> dict[str, torch.Tensor]:
    """A made-up review."""
    text = f"the {random.choice(THINGS)} was {random.choice(GOOD if good else BAD)}"
    return encode(text) | {"labels": torch.tensor(int(good))}


train = [review(i % 2 == 0) for i in range(512)]
test = [review(i % 2 == 0) for i in range(128)]

# %% [markdown]
# ## Adapters on a frozen model
#
# The classifier on top is trained as well: it is new.

# %%
config = transformers.BertConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
model = peft.get_peft_model(
    transformers.BertForSequenceClassification(config),
    peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"]),
)
model.print_trainable_parameters()


# %% [markdown]
# ## The trainer
#
# `PrivateTrainer` is Hugging Face's `Trainer` on the engine. A lot has batch size x accumulation
# steps records in expectation. Training loss and gradient norm are not logged: they follow single
# lots. The model begins with random weights, so it needs its 20 epochs and a large learning rate;
# with 6 epochs at a tenth of that rate it stays at chance, 0.5. Three runs of this page had all 128
# held-out reviews right.


# %%
def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    """On held-out reviews."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


trainer = PrivateTrainer(
    model=model,
    args=transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_train_epochs=EPOCHS,
        learning_rate=1e-1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=accuracy,
    privacy=PrivacyArguments(target_epsilon=8.0, delta=1e-4, max_grad_norm=1.0),
)
trainer.train()
print(trainer.evaluate())

# %% [markdown]
# ## What was spent

# %%
print(f"epsilon {trainer.engine.get_epsilon(1e-4):.2f}")
for caveat in trainer.engine.caveats():
    print("-", caveat)

# %% [markdown]
# **How far this guarantee goes.** It covers the adapters and the classifier, for adding or removing
# one review. It does not cover what the frozen model had seen before: if your reviews were in its
# training data, that is not undone. Texts are padded to a public length, because the longest text
# of a lot would tell of others.
