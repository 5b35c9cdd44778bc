# %% [markdown]
# # Your first private model
#
# We train a small network on scikit-learn's handwritten digits, privately, in an ordinary PyTorch
# loop. You need `pip install 'vestige-dp[all]'` and about a minute.
#
# The data are public here, so that everything can be shown. With your own data nothing changes but
# the first cell.

# %%
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine

EPOCHS = int(os.environ.get("TUTORIAL_EPOCHS", "20"))

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)  # 16 is the whitest pixel
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

# %% [markdown]
# Pixels are divided by 16 because that is the largest value a pixel can have, not because it is the
# largest one in the data. A mean or a maximum of the data would be a release of its own.
#
# ## One call
#
# `make_private_with_epsilon` solves for the noise: after the planned epochs epsilon is at most 3.
# The model and the optimizer that come back are your own objects. The loader is new: each of its
# batches is a *lot*, in which every record is independently with probability 64 / 1500.

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    data_loader=DataLoader(TensorDataset(x_train, y_train), batch_size=64),
    target_epsilon=3.0,
    target_delta=1e-5,
    epochs=EPOCHS,
    max_grad_norm=1.0,
)
print(f"noise multiplier {engine.plan.noise_multiplier:.2f}")


# %% [markdown]
# ## The loop you know
#
# Between `backward()` and `step()` every `.grad` is None: the clipped sum of the lot stays inside
# the engine. `step()` charges the ledger, adds the noise, and only then is there a gradient.


# %%
def accuracy() -> float:
    """On held-out digits. Of private data this figure would not be covered by the guarantee."""
    with torch.no_grad():
        return float((model(x_test).argmax(1) == y_test).float().mean())


for epoch in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    if (epoch + 1) % max(1, EPOCHS // 4) == 0:
        epsilon = engine.get_epsilon(1e-5)
        print(f"epoch {epoch + 1:2d}  accuracy {accuracy():.3f}  epsilon {epsilon:.2f}")

# %% [markdown]
# ## What you may say
#
# `engine.caveats()` lists what a reader of epsilon must know. `engine.statement(delta)` is the
# whole of it, to be signed; `vestige statement` prints the one of a run folder.

# %%
for caveat in engine.caveats():
    print("-", caveat)

# %% [markdown]
# **How far this guarantee goes.** The weights, and whatever is computed from them, are
# (3, 1e-5)-differentially private for adding or removing one record. What the loop prints of a
# training batch is not covered. A second run on the same data spends a second epsilon: give it the
# first one's ledger, `PrivacyEngine(ledger=engine.ledger)`.
