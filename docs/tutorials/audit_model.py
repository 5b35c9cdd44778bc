# %% [markdown]
# # Attack your own training
#
# An accountant gives an upper bound on epsilon. An audit gives a lower bound: it plays the attacker
# who knows everything but whether one record was used, and counts how often the guess is right. A
# lower bound above the claim proves that the claim is false. A lower bound near the claim says that
# the accountant wastes little.

# %%
import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from vestige.audit.attack import audit
from vestige.audit.verify.sensitivity import sensitivity

TRIALS = 400 if os.environ.get("TUTORIAL_EPOCHS") else 4000

# %%
result = audit("fo", epsilon=2.0, trials=TRIALS, seed=1)
print(f"claimed     {result.epsilon_claimed:.2f}")
print(f"confirmed   {result.epsilon_lower_family:.2f} with {result.level} confidence")

# %% [markdown]
# ## A method that is not private
#
# GeoDP noises the direction of a gradient and leaves its length as it is. Its paper claims epsilon;
# the engine reports infinity, and the audit says why:

# %%
broken = audit("geodp", epsilon=2.0, trials=TRIALS, seed=1)
print(f"published   {broken.epsilon_published:.2f}")
print(f"confirmed   {broken.epsilon_lower:.2f}: the published claim is wrong")

# %%
figure, axes = plt.subplots(figsize=(5.5, 2.2))
names, bounds = ["fo", "geodp"], [result.epsilon_lower_family, broken.epsilon_lower]
axes.barh(names, bounds)
axes.axvline(2.0, ls="--", color="black", label="claim")
axes.set(xlabel="epsilon that an attacker confirms")
axes.legend()

# %% [markdown]
# ## Your own model
#
# The accountant's claim rests on one fact about your model: a record moves the clipped sum by at
# most C. `sensitivity` measures it, record by record, by leaving each of them out. R is that
# distance in units of C; above 1 the guarantee is broken.

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
records = TensorDataset(torch.randn(24, 8), torch.arange(24) % 3)
moved = sensitivity(
    model,
    records,
    lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"),
)
print(moved[0])

# %% [markdown]
# **How far this goes.** An audit can refute a claim and cannot prove one: it tries the attacks it
# knows. `vestige verify mymodule:MyMethod` runs all of them, and replays on neighbouring data, on a
# method of your own. [Audit](../audit.md) says what each bound assumes.
