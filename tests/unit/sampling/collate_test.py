"""From records to rows: views of one record each, and blank rows."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from vestige import ConfigError, FlipAndCrop
from vestige.sampling.collate import Collate, Views, blank
from vestige.sampling.loader import LotSampler, PrivateLoader
from vestige.sampling.streams import Randomness


class Noted:
    """An augmentation that notes what it is given."""

    def __init__(self, make):
        self.make, self.given = make, []

    def __call__(self, value):
        self.given.append(value)
        return self.make(value)


def test_one_view_is_made_as_often_as_there_are_views():
    augment = Noted(lambda x: x + len(augment.given))
    rows = Views(augment, 3).of((torch.zeros(2), 7))
    assert [(x.tolist(), y) for x, y in rows] == [([1, 1], 7), ([2, 2], 7), ([3, 3], 7)]
    assert all(given.tolist() == [0, 0] for given in augment.given)


@pytest.mark.parametrize("kind", [torch.stack, list, tuple])
def test_views_that_come_together_are_made_once(kind):
    augment = Noted(lambda x: kind([x, x + 1]))
    rows = Views(augment, 2).of((torch.zeros(2), 7, "more"))
    assert [(x.tolist(), *rest) for x, *rest in rows] == [
        ([0, 0], 7, "more"),
        ([1, 1], 7, "more"),
    ]
    assert len(augment.given) == 1


def test_a_record_that_is_its_input_has_views_alone():
    assert [v.tolist() for v in Views(lambda x: x * 2, 2).of(torch.ones(1))] == [[2], [2]]


def test_an_input_that_is_no_tensor_has_one_view_at_a_time():
    rows = Views(lambda word: torch.tensor([len(word)]), 2).of(("word", 1))
    assert [(x.tolist(), y) for x, y in rows] == [([4], 1), ([4], 1)]


@pytest.mark.parametrize(
    ("augment", "match"),
    [
        (lambda x: torch.stack([x] * 3), "3 views stacked, and views=2"),
        (lambda x: [x], "1 views stacked, and views=2"),
        (lambda x: x.sum(), "return one view, with as many axes"),
    ],
)
def test_what_are_no_views_is_refused(augment, match):
    with pytest.raises(ConfigError, match=match):
        Views(augment, 2).of((torch.zeros(2), 1))


def test_a_mapping_has_no_known_input():
    with pytest.raises(ConfigError, match="a dict"):
        Views(lambda x: x, 2).of({"x": torch.zeros(2)})


def test_rows_are_collated_record_by_record():
    data = TensorDataset(torch.arange(4.0).unsqueeze(1), torch.arange(4))
    collate = Collate(data, default_collate, Views(lambda x: torch.stack([x, -x]), 2), 2)
    x, y = collate([data[3], data[1]])
    assert x.flatten().tolist() == [3, -3, 1, -1]
    assert y.tolist() == [3, 3, 1, 1]


def test_a_batch_without_records_has_the_blank_rows_of_one_unit():
    data = TensorDataset(torch.ones(4, 3), torch.arange(4))
    views = Views(lambda x: x[:2], 2)  # another shape than the record's
    x, y = Collate(data, default_collate, views, 6)([])
    assert x.shape == (6, 2)
    assert not x.any()
    assert y.tolist() == [0] * 6


def test_blank_keeps_structure_and_nothing_else():
    assert blank({"a": (torch.ones(2), "word", 3)})["a"][1:] == ("", 0)


# -- flips and crops ---------------------------------------------------------------------------


def test_every_view_is_a_moved_image_mirrored_or_not():
    torch.manual_seed(0)
    image = torch.arange(75.0).view(3, 5, 5)
    around = torch.nn.functional.pad(image[None], [1] * 4, mode="reflect")[0]
    possible = [around[:, i : i + 5, j : j + 5] for i in range(3) for j in range(3)]
    possible += [crop.flip(2) for crop in possible]
    views = FlipAndCrop(1).views(image[None], 400)
    which = [next(i for i, p in enumerate(possible) if torch.equal(p, view)) for view in views]
    assert set(which) == set(range(18))
    assert FlipAndCrop(1)(image).shape == image.shape


def test_views_of_many_images_are_each_of_their_own():
    torch.manual_seed(0)
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 6, 6)
    views = FlipAndCrop(2).views(images, 4)
    assert views.shape == (12, 2, 6, 6)
    assert torch.equal(views, images.repeat_interleave(4, 0))
    still = torch.randn(2, 1, 4, 4)
    assert torch.equal(FlipAndCrop(0, flip=False).views(still, 1), still)


def test_mixtures_lie_between_two_views_of_the_same_image():
    torch.manual_seed(0)
    images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    views = FlipAndCrop(2, mix=True).views(images, 7).view(5, 7, -1)
    inside = 0
    for own in views:
        plain = own[:4].unique(dim=0)  # two views may be the same by chance
        for mixture in own[4:]:
            weights = torch.linalg.lstsq(plain.T, mixture).solution
            used = weights.abs() > 1e-9
            assert used.sum() <= 2
            assert weights[used].sum() == pytest.approx(1)
            assert weights.min() > -1e-9
            inside += int(used.sum() == 2)
    assert inside > 8  # most weights of Beta(0.2, 0.2) are neither 0 nor 1
    one = Views(FlipAndCrop(2, mix=True), 4).of((images[0], 1))
    assert [x.shape for x, _ in one] == [(3, 8, 8)] * 4


def test_mixtures_need_several_views():
    with pytest.raises(ConfigError, match="at least 4 views"):
        FlipAndCrop(2, mix=True).views(torch.zeros(1, 1, 8, 8), 3)
    with pytest.raises(ConfigError, match=r"Slow\(mix=True\) is called for one view"):
        Views(Slow(2, mix=True), 4).of((torch.zeros(1, 8, 8), 1))


@pytest.mark.parametrize("shape", [(6, 6), (1, 3, 3), (1, 2, 6, 6)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(ConfigError, match=r"FlipAndCrop\(3\) is given"):
        FlipAndCrop(3)(torch.zeros(shape))


@pytest.mark.parametrize("padding", [-1, 1.5, None])
def test_a_padding_is_a_whole_number(padding):
    with pytest.raises(ConfigError, match="FlipAndCrop"):
        FlipAndCrop(padding)


# -- in a loader -------------------------------------------------------------------------------


def loader(augment, seed=1, workers=0):
    data = TensorDataset(torch.randn(40, 1, 8, 8), torch.arange(40))
    lots = LotSampler(Randomness(seed), 40, 0.2, 5)
    lots.views = Views(augment, 3)
    return data, PrivateLoader(DataLoader(data, num_workers=workers), lots, lambda batch: None)


class Slow(FlipAndCrop):
    """The same image by image: what a user's own function is."""


@pytest.mark.parametrize("augment", [FlipAndCrop(0, flip=False), Slow(0, flip=False)])
def test_rows_of_a_batch_are_views_with_their_labels(augment):
    data, private = loader(augment)
    for x, y in private:
        assert torch.equal(x, data.tensors[0][y])
        assert torch.equal(y[::3], y[1::3])


@pytest.mark.parametrize("kind", [FlipAndCrop, Slow])
def test_views_follow_the_secret_key_and_no_seed(kind):
    def views(seed, public):
        torch.manual_seed(0)
        _, private = loader(kind(2), seed)
        torch.manual_seed(public)
        before = torch.get_rng_state()
        rows = [x for x, _ in private]
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat(rows)

    assert torch.equal(views(1, 3), views(1, 4))
    assert views(1, 3).shape != views(2, 3).shape or not torch.equal(views(1, 3), views(2, 3))


def test_workers_make_views_too():
    data, private = loader(Slow(0, flip=False), workers=1)
    for x, y in private:
        assert torch.equal(x, data.tensors[0][y])


def test_a_generator_that_an_augmentation_holds_follows_the_key_too():
    own = torch.Generator().manual_seed(0)

    def shaken(x):
        return x + torch.randn(x.shape, generator=own)

    def first(seed):
        before = own.get_state()
        torch.manual_seed(0)
        _, private = loader(shaken, seed)
        rows = [x for x, _ in private]
        assert torch.equal(own.get_state(), before)
        return rows[0][:1]

    one, again, other = first(1), first(1), first(2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def by_content(rows):
    """A collate function that sorts, as before pack_padded_sequence."""
    return default_collate(sorted(rows, key=lambda row: -float(row[0].sum())))


def test_a_collate_function_cannot_move_rows_to_other_units():
    data = TensorDataset(torch.arange(6.0).view(6, 1), torch.arange(6))
    x, y = Collate(data, by_content, rows=2)([data[i] for i in (0, 5, 3, 1)])
    assert y.tolist() == [5, 0, 3, 1]
    assert x[:, 0].tolist() == [5, 0, 3, 1]


def test_what_a_collate_function_makes_of_units_is_put_together():
    data = [{"x": [1.0, 2.0], "name": str(i)} for i in range(4)]

    def collate(rows):
        return {"x": torch.tensor([r["x"] for r in rows]), "name": [r["name"] for r in rows]}

    made = Collate(data, collate, rows=2)(data)
    assert made["x"].shape == (4, 2)
    assert made["name"] == ["0", "1", "2", "3"]


def test_units_of_different_shapes_cannot_be_put_together():
    rows = [torch.zeros(n) for n in (1, 1, 3, 3)]
    with pytest.raises(ConfigError, match=r"cannot be put together.*PadTo"):
        Collate(rows, lambda unit: torch.stack(unit), rows=2)(rows)


def test_a_list_made_of_a_list_is_one_view():
    calls = []
    views = Views(lambda tokens: calls.append(1) or tokens[::-1], 2).of(([1, 2], 0))
    assert views == [([2, 1], 0), ([2, 1], 0)]
    assert len(calls) == 2


def test_arrays_of_numpy_come_stacked_too():
    import numpy as np

    views = Views(lambda image: np.stack([image, image + 1]), 2).of((np.zeros(3), 0))
    assert [view[0].tolist() for view in views] == [[0, 0, 0], [1, 1, 1]]
