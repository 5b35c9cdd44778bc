"""The papers' models: sizes, shapes, seeds, and that no example touches another."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from vestige.errors import ConfigError
from vestige.train.models import MODELS, ResidualBlock, build

# Least squares has scores once its moments are known: recipes/least_squares_test.py.
STEPWISE = [name for name in MODELS if name != "least-squares"]
IMAGES = ((1, 8, 8), (1, 28, 28), (3, 32, 32))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("linear", (1, 8, 8), 10, 65 * 10),
        ("linear", (5,), 3, 6 * 3),
        ("mlp", (1, 8, 8), 10, 65 * 64 + 65 * 32 + 33 * 10),
        ("mlp", (1, 28, 28), 10, 785 * 64 + 65 * 32 + 33 * 10),
        ("mlp", (3, 32, 32), 100, 3073 * 64 + 65 * 32 + 33 * 100),
        ("cnn", (3, 32, 32), 10, 550_570),
        ("cnn", (1, 28, 28), 10, 550_570 - 2 * 9 * 32),
        ("cnn", (1, 8, 8), 10, 550_570 - 2 * 9 * 32 - 15 * 128 * 128),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18", (1, 8, 8), 100, 11_173_962 - 2 * 9 * 64 + 90 * 513),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    assert parameters(build(name, shape, classes)) == count


@pytest.mark.parametrize(("name", "shape"), list(itertools.product(STEPWISE, IMAGES)))
def test_scores_have_one_row_per_example(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=0)
    for rows in (1, 2):
        scores = model(torch.randn(rows, *shape))
        assert scores.shape == (rows, 7)
        assert scores.isfinite().all()
    scores.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in STEPWISE if "scatter" not in name])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (3, 9, 17)])
def test_odd_image_sizes_work(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, shape, 2)(torch.randn(2, *shape)).shape == (2, 2)


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 4, 5)])
def test_flat_models_take_any_shape(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, list(shape), 3)(torch.randn(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("training", [True, False])
def test_examples_do_not_touch_each_other(name: str, training: bool) -> None:
    model = build(name, (3, 8, 8), 4, seed=1).double().train(training)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    together = model(x)
    alone = torch.cat([model(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(together[2].sum(), x)
    assert gradient[2].abs().sum() > 0
    assert gradient[[0, 1, 3]].abs().sum() == 0


@pytest.mark.parametrize("name", STEPWISE)
def test_seed_fixes_the_weights_and_nothing_else(name: str) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = flat(build(name, (1, 8, 8), 10, seed=5))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, flat(build(name, (1, 8, 8), 10, seed=5)))
    assert not torch.equal(first, flat(build(name, (1, 8, 8), 10, seed=6)))


def test_without_a_seed_the_global_state_is_used() -> None:
    torch.manual_seed(3)
    first, second = (flat(build("mlp", (4,), 2)) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, flat(build("mlp", (4,), 2, seed=3)))


def test_weights_are_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        model = build("mlp", (4,), 2, seed=3)
    assert torch.equal(flat(model), flat(build("mlp", (4,), 2, seed=3)))


def test_mlp_is_the_papers_with_default_initialisation() -> None:
    model = build("mlp", (1, 8, 8), 10, seed=9)
    layers = [layer for layer in model if not isinstance(layer, nn.Flatten)]
    kinds = [type(layer) for layer in layers]
    assert kinds == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    torch.manual_seed(9)
    plain = [nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 10)]
    assert torch.equal(flat(model), flat(nn.ModuleList(plain)))


def test_cnn_is_six_convolutions_and_two_linear_layers() -> None:
    model = build("cnn", (3, 32, 32), 10)
    kinds = [type(layer) for layer in model.modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.Linear)) == (6, 2)
    assert (kinds.count(nn.Tanh), kinds.count(nn.MaxPool2d)) == (7, 3)
    channels = [layer.out_channels for layer in model if isinstance(layer, nn.Conv2d)]
    assert channels == [32, 32, 64, 64, 128, 128]


def test_resnet18_has_group_norm_only() -> None:
    model = build("resnet18", (3, 32, 32), 10)
    kinds = [type(layer) for layer in model.modules()]
    # 17 convolutions and 3 shortcuts, each with its norm, and one linear layer: 18 layers deep.
    assert (kinds.count(nn.Conv2d), kinds.count(nn.GroupNorm), kinds.count(nn.Linear)) == (
        20,
        20,
        1,
    )
    assert all(m.num_groups == 32 for m in model.modules() if isinstance(m, nn.GroupNorm))
    assert not list(model.buffers())


def test_group_norm_falls_back_to_a_divisor() -> None:
    block = ResidualBlock(6, 12, stride=1)
    assert (block.norm1.num_groups, block.norm1.num_channels) == (4, 12)
    assert block(torch.randn(2, 6, 4, 4)).shape == (2, 12, 4, 4)


@pytest.mark.parametrize("name", STEPWISE)
def test_nothing_works_in_place(name: str) -> None:
    model = build(name, (1, 8, 8), 3)
    assert not any(getattr(layer, "inplace", False) for layer in model.modules())
    kept: list[tuple[torch.Tensor, int]] = []
    for layer in model.modules():
        layer.register_forward_hook(
            lambda _, inputs, output: kept.extend((t, t._version) for t in (*inputs, output))
        )
    x = torch.randn(2, 1, 8, 8)
    before = x.clone()
    model(x).sum().backward()
    assert torch.equal(x, before)
    assert all(tensor._version == version for tensor, version in kept)


def test_weights_load_with_weights_only(tmp_path: Any) -> None:
    model, other = build("resnet18", (1, 8, 8), 3, seed=0), build("resnet18", (1, 8, 8), 3, seed=1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(flat(model), flat(other))


def test_unknown_model_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"Unknown model 'vgg'; .*linear, mlp, cnn, resnet18"):
        build("vgg", (1, 8, 8), 10)


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 2, 3, 4)])
def test_image_models_refuse_what_is_no_image(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"{name} needs images .*use the model mlp or linear"):
        build(name, shape, 10)


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (6, 4, 3)])
def test_image_models_refuse_channels_last(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"looks like \(height, width, channels\)"):
        build("cnn", shape, 10)
    build("mlp", shape, 10)


@pytest.mark.parametrize("shape", [(), (0, 8, 8), (1, -8, 8), (1.0, 8, 8), (True, 8, 8)])
def test_bad_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(ConfigError, match="input_shape is"):
        build("mlp", shape, 10)


@pytest.mark.parametrize("classes", [0, -3, 2.0, True, None])
def test_bad_classes_are_refused(classes: Any) -> None:
    with pytest.raises(ConfigError, match="classes is"):
        build("mlp", (4,), classes)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed is"):
        build("mlp", (4,), 2, seed=seed)
    assert parameters(build("mlp", (4,), 2, seed=2**63 - 1)) > 0
