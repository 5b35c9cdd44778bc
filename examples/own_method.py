"""A method of your own: one memory rule, one row, and everything else works.

    python examples/own_method.py                 trains with it
    vestige verify examples.own_method:LastTwo    replays, measures and attacks it

The rule sees inner products of earlier releases and answers with weights. The engine mixes the
releases before the next lot exists, so the accounting is that of every memory: sigma/beta.

Guarantee: the epsilon that is printed holds for every training record, as long as the rule's own
code looks at nothing but the view that it is given. `vestige verify` tests that; code that reads
records behind the engine's back is outside of the guarantee.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.memory.rules import Memory, Recall, View
from vestige.methods import MethodInfo, register
from vestige.methods.catalogue import AT_SIGMA_OVER_BETA
from vestige.methods.memories import RememberingMethod


@dataclass(frozen=True)
class TwoNewest(Memory):
    """All weight on the two newest releases, more of it on the newer one."""

    window: int
    newer: float

    def _recall(self, view: View) -> Recall:
        weights = np.zeros((view.parts, view.lags.size))
        weights[:, :2] = (self.newer, 1 - self.newer)[: view.lags.size]
        return Recall(weights, np.ones(view.parts))


@dataclass(frozen=True)
class LastTwo(RememberingMethod):
    """release_t = beta * sum_t + (1 - beta) * (newer * y_(t-1) + (1 - newer) * y_(t-2)) + noise"""

    info = MethodInfo(
        name="last-two",
        summary="the two newest releases in the query",
        guarantee=AT_SIGMA_OVER_BETA,
        proof="given the earlier releases the memory is a constant, as for FO-DP-SGD.",
    )

    beta: float = 0.9
    window: int = 3
    newer: float = 0.7

    def rule(self, steps_per_epoch: int) -> Memory:
        """The rule at work."""
        return TwoNewest(self.window, self.newer)


register(MethodInfo(**{**vars(LastTwo.info), "home": LastTwo}))


def main() -> None:
    """Train on the digits, with epsilon 3 solved for."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=20,
        max_grad_norm=1.0,
        method="last-two",
    )
    for _ in range(20):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"accuracy {accuracy:.3f}, epsilon {engine.get_epsilon(1e-5):.2f}")


if __name__ == "__main__":
    main()
