"""Caches for generation are off while a model is trained, and only then."""

from __future__ import annotations

import types

import pytest
from torch import nn

from vestige.gradients.caches import Caches, handed


def model(*asks):
    parts = nn.ModuleList(nn.Identity() for _ in asks)
    for part, use_cache in zip(parts, asks, strict=True):
        part.config = types.SimpleNamespace(use_cache=use_cache)
    return parts


def answers(parts):
    return [part.config.use_cache for part in parts]


def test_every_part_is_off_and_as_it_was_afterwards():
    parts = model(True, False, None, True)
    caches = Caches(parts)
    with caches.off():
        assert answers(parts) == [False, False, None, False]
    assert answers(parts) == [True, False, None, True]


def test_it_is_as_it_was_after_an_error_and_within_itself():
    parts = model(True)
    caches = Caches(parts)
    with pytest.raises(KeyError), caches.off(), caches.off():
        raise KeyError
    assert answers(parts) == [True]


def test_a_setting_of_the_user_is_seen_at_every_pass():
    parts = model(True)
    caches = Caches(parts)
    parts[0].config.use_cache = False
    with caches.off():
        pass
    assert answers(parts) == [False]


def test_a_layer_is_handed_a_cache_under_one_of_its_names():
    assert handed({"cache_params": object(), "x": 1}) == "cache_params"
    assert handed({"past_key_values": None, "x": 1}) is None
