# %% [markdown]
# # Write your own memory
#
# A private trainer may remember everything that it has already released: a release is public, and
# what is computed from it costs nothing. A memory rule decides what to make of it. The engine
# recalls the memory *before* the next lot is drawn, so no rule can look at private data, whatever
# it does.

# %%
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.audit.verify import verify
from vestige.memory.rules import Memory, Recall, View
from vestige.methods import MethodInfo
from vestige.methods.catalogue import AT_SIGMA_OVER_BETA
from vestige.methods.memories import RememberingMethod

EPOCHS = int(os.environ.get("TUTORIAL_EPOCHS", "15"))

# %% [markdown]
# ## The rule
#
# A rule sees a `View`: inner products of the releases that are kept, by part of the model. It
# answers with weights, one for each part and lag. This one trusts a release the more, the better it
# agrees with the newest.


# %%
@dataclass(frozen=True)
class Agreeing(Memory):
    """Weights that grow with the cosine to the newest release."""

    window: int
    sharpness: float

    def _recall(self, view: View) -> Recall:
        weights = np.zeros((view.parts, view.lags.size))
        if not view.lags.size:  # before the first release there is nothing to remember
            return Recall(weights, np.ones(view.parts))
        for part in range(view.parts):
            products = view.gram[part]  # of every two releases, the newest first
            lengths = np.sqrt(np.maximum(np.diag(products), 1e-30))
            weights[part] = np.exp(self.sharpness * products[0] / (lengths[0] * lengths))
        return Recall(weights / weights.sum(1, keepdims=True), np.ones(view.parts))


# %% [markdown]
# ## The method around it
#
# A method is a few public settings and a row of facts. Its guarantee is that of every memory: given
# the earlier releases the branch is a constant, so a step costs what DP-SGD costs at sigma/beta.


# %%
@dataclass(frozen=True)
class Agreement(RememberingMethod):
    """release_t = beta * sum_t + (1 - beta) * agreeing releases + noise"""

    info = MethodInfo(
        name="agreement",
        summary="releases that agree with the newest, in the query",
        guarantee=AT_SIGMA_OVER_BETA,
        proof="given the earlier releases the memory is a constant, as for FO-DP-SGD.",
    )

    beta: float = 0.9
    window: int = 6
    sharpness: float = 2.0

    def rule(self, steps_per_epoch: int) -> Memory:
        """The rule at work."""
        return Agreeing(self.window, self.sharpness)


# %%
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    data_loader=DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64),
    target_epsilon=3.0,
    target_delta=1e-5,
    epochs=EPOCHS,
    max_grad_norm=1.0,
    method=Agreement(),
)
for _ in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
print(f"accuracy {(model(x[1500:]).argmax(1) == y[1500:]).float().mean():.3f}")
print(f"epsilon  {engine.get_epsilon(1e-5):.2f}")

# %% [markdown]
# ## Is it what it says?
#
# `verify` runs it on the real engine: it replays a run on neighbouring data, measures how far one
# record moves a sum, tests the law of the noise against the ledger, and attacks it.

# %%
verdict = verify(Agreement(), checks=("claim", "replay", "noise"), quick=True)
for report in verdict.reports:
    print(f"{report.check:8s}", "passed" if report.passed else report.findings)

# %% [markdown]
# **How far this guarantee goes.** A memory rule cannot break it, because all it is given are inner
# products of releases. A method that draws its lots, clips or adds noise in a way of its own needs
# a proof of its own: [architecture](../architecture.md) says where those strategies stand.
