"""The arguments of make_private that few runs need: declared once, typed, and refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from tests.support.small_runs import private
from vestige import ConfigError
from vestige.engine.options import Keywords, Options, check_counts


def test_type_checkers_know_the_keywords_that_there_are():
    assert set(get_type_hints(Keywords)) == {field.name for field in fields(Options)}


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no argument 'noise_sed'.*mean noise_seed=\.\.\.\?"):
        private("dp-sgd", noise_sed=3)
    with pytest.raises(ConfigError, match=r"no argument 'max_norm'"):
        Options.of({"max_norm": 1.0}, ("max_grad_norm",))
    with pytest.raises(ConfigError, match=r"mean max_grad_norm=\.\.\.\?"):
        Options.of({"max_gradnorm": 1.0}, ("max_grad_norm",))
    for name in ("epochs", "target_epsilon"):
        with pytest.raises(ConfigError, match=r"with_epsilon\(target_epsilon=.*steps="):
            Options.of({name: 3}, ())
    with pytest.raises(ConfigError, match=r"no argument 'colour'\.$"):
        Options.of({"colour": 1.0}, ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"poisson_sampling": False}, "poisson_sampling=False is refused"),
        ({"noise_generator": torch.Generator()}, "noise_generator is refused"),
        ({"history_dtype": torch.float16}, r"history_dtype=torch.float16 .* torch.bfloat16"),
        ({"rows_per_unit": 3}, r"rows_per_unit=3 without units"),
        ({"units": [1], "rows_per_unit": 0}, r"rows_per_unit=0"),
        ({"views": 3}, r"views=3 without augment.*FlipAndCrop"),
        ({"views": 1.5, "augment": abs}, r"views=1.5"),
        ({"augment": "flip"}, r"augment is a str"),
        ({"history_device": "disk"}, r"history_device='disk' .* use 'cpu'"),
    ],
)
def test_what_would_break_the_guarantee_says_why_and_what_to_do(given, message):
    with pytest.raises(ConfigError, match=message):
        Options.of(given, ())


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_counts_are_positive_whole_numbers_or_nothing(value):
    check_counts(steps=None, max_physical_batch_size=4)
    with pytest.raises(ConfigError, match=f"steps={value!r}"):
        check_counts(steps=value)
