"""Opacus' data module: the loader that make_private was given is the one that trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.loops import mlp, private, records, step
from vestige import PrivacyEngine
from vestige.data_loader import DPDataLoader

lightning = pytest.importorskip("pytorch_lightning")


class Data(lightning.LightningDataModule):
    """Ordinary loaders, new ones each time."""

    def train_dataloader(self):
        return DataLoader(records(), batch_size=6)

    def test_dataloader(self):
        return DataLoader(records(seed=5), batch_size=6)


class Lit(lightning.LightningModule):
    """Makes itself private when its optimizer is asked for, as Opacus' example does."""

    def __init__(self, data):
        super().__init__()
        self.net, self.engine, self.given = mlp(), PrivacyEngine(noise_seed=11), data

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        loader = self.given.train_dataloader()
        self.engine.make_private(
            module=self,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=isinstance(loader, DPDataLoader),
        )
        return optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, index):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


def test_a_trainer_makes_the_releases_of_the_plain_loop(tmp_path):
    from vestige.lightning import DPLightningDataModule

    data = DPLightningDataModule(Data())
    assert data.train_dataloader() is data.train_dataloader()
    lit = Lit(data)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(lit, data)
    assert lit.engine.released == 8
    assert trainer.test(lit, data, verbose=False)[0]["loss"] > 0

    _, model, optimizer, loader = private()
    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, x, y)
    for found, expected in zip(lit.net.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
