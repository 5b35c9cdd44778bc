"""How far one record moves the clipped sum of a model."""

from __future__ import annotations

import pytest
import torch

from vestige import ConfigError
from vestige.audit.verify.sensitivity import sensitivity
from vestige.errors import PrivacyError


def small_data(count=7):
    made = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        3 * torch.randn(count, 4, generator=made), torch.randint(0, 3, (count,), generator=made)
    )


def cross_entropies(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def two_layers(*between):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), *between, torch.nn.Linear(6, 3))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("bound", [0.01, 2.0, 1000.0])
def test_a_record_moves_the_sum_by_its_own_clipped_gradient(clipping, bound):
    model, data = two_layers(torch.nn.Tanh()), small_data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = sensitivity(model, data, cross_entropies, max_grad_norm=bound, clipping=clipping)
    assert sorted(one.record for one in found) == list(range(7))
    assert [one.ratio for one in found] == sorted((one.ratio for one in found), reverse=True)
    for one in found:
        x, y = data[one.record]
        model.zero_grad()
        cross_entropies(model, (x[None], y[None])).sum().backward()
        layers = [torch.cat([p.grad.flatten() for p in model[i].parameters()]) for i in (0, 2)]
        parts = layers if clipping == "per_layer" else [torch.cat(layers)]
        share = bound / len(parts) ** 0.5
        expected = [min(1.0, float(part.norm()) / share) for part in parts]
        assert one.groups == pytest.approx(expected, rel=1e-4)
        joint = (sum(r * r for r in expected) / len(parts)) ** 0.5
        assert one.joint == pytest.approx(joint, rel=1e-4) and one.within
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_losses_may_be_one_number_and_lots_may_come_in_parts():
    def mean(model, batch):
        return cross_entropies(model, batch).mean()

    model, data = two_layers(), small_data()
    rows = sensitivity(model, data, cross_entropies)
    for options in ({"loss_reduction": "mean"}, {"max_physical_batch_size": 3}):
        found = sensitivity(model, data, mean, **options)
        assert [one.joint for one in found] == pytest.approx([one.joint for one in rows], rel=1e-4)


def test_a_loss_in_which_records_meet_moves_the_sum_too_far():
    def ranked(model, batch):  # the loudest record decides how the others count
        each = cross_entropies(model, batch)
        return each * (100.0 if float(batch[0].abs().max()) > 20 else 0.001)

    data = small_data(20)
    data.tensors[0][4] = 50.0
    found = sensitivity(two_layers(), data, ranked, records=[4, 5], max_grad_norm=0.1)
    assert found[0].record == 4 and not found[0].within and found[0].ratio > 3
    assert found[1].within


def test_a_model_whose_records_meet_is_refused_as_in_training():
    class Centred(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = two_layers()

        def forward(self, x):
            return self.inner(x - x.mean(0))

    with pytest.raises(PrivacyError, match="meet in"):
        sensitivity(Centred(), small_data(), cross_entropies)


def test_what_cannot_be_measured_is_named():
    model, data = two_layers(torch.nn.Dropout(0.5)), small_data()
    with pytest.raises(ConfigError, match="draws random numbers"):
        sensitivity(model, data, cross_entropies)
    assert sensitivity(model.eval(), data, cross_entropies)[0].within
    with pytest.raises(ConfigError, match="records has 7, and the data has 7"):
        sensitivity(model, data, cross_entropies, records=[7])
    with pytest.raises(ConfigError, match="1 records"):
        sensitivity(model, small_data(1), cross_entropies)
    for name in ("method", "sample_rate"):
        with pytest.raises(ConfigError, match=f"{name} cannot be chosen"):
            sensitivity(model, data, cross_entropies, **{name: 1.0})
