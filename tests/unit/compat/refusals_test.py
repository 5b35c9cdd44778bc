"""Every name that stays refused says why, and what to do instead."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools.budget import OPACUS, lines_of
from torch import nn

import vestige
from tests.support.loops import private
from vestige.compat.refusals import REASONS
from vestige.errors import PrivacyError, UnsupportedModel

NAMES = [
    *(f"accountants.{name}" for name in ("register_accountant",)),
    "distributed.DifferentiallyPrivateDistributedDataParallel",
    *(
        f"grad_sample.{name}"
        for name in (
            "AbstractGradSampleModule",
            "GradSampleModule",
            "GradSampleModuleFastGradientClipping",
            "GradSampleModuleFastGradientClippingTP",
            "register_grad_sampler",
            "register_norm_sampler",
            "functorch.make_functional",
        )
    ),
    "GradSampleModule",
    "optimizers.DPOptimizer",
    "optimizers.DPOptimizerFastGradientClipping",
    "optimizers.DistributedDPOptimizer",
    "optimizers.FSDPOptimizerFastGradientClipping",
    "optimizers.optimizer.DPOptimizer",
    "utils.uniform_sampler.UniformWithReplacementSampler",
    "utils.uniform_sampler.DistributedUniformWithReplacementSampler",
    "utils.batch_memory_manager.wrap_data_loader",
    "data_loader.wrap_collate_with_empty",
    "optimizers.AdaClipDPOptimizer",
    "optimizers.DPPerLayerOptimizer",
    "optimizers.DistributedDPOptimizerFastGradientClipping",
    "optimizers.SimpleDistributedPerLayerOptimizer",
    "validators.register_module_fixer",
    "validators.register_module_validator",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_name_can_be_imported_and_says_why_when_it_is_called(name):
    module, _, last = f"vestige.{name}".rpartition(".")
    refused = getattr(importlib.import_module(module), last)
    assert not isinstance(nn.Linear(1, 1), refused)
    with pytest.raises(PrivacyError) as raised:
        refused(nn.Linear(1, 1), gamma=0.9)
    assert str(raised.value) == f"{last} is refused: {REASONS[last]}"


@pytest.mark.parametrize("reason", REASONS.values())
def test_a_reason_is_a_sentence_with_a_remedy(reason):
    why, remedy = reason.split(". ", 1)
    assert len(why.split()) > 6 and why[0].islower()
    assert remedy[0].isupper() and remedy.endswith(".") and "\n" not in reason
    verbs = ("Take", "Pass", "Leave", "Change", "Call", "Use", "Give", "Read", "Go on", "Build")
    assert remedy.startswith(verbs)


@pytest.mark.parametrize(
    "name", ["IllegalModuleConfiguration", "NotYetSupportedModule", "ShouldReplaceModule"]
)
def test_every_error_about_a_model_is_the_one_that_is_raised(name):
    errors = importlib.import_module("vestige.validators.errors")
    assert getattr(errors, f"{name}Error") is UnsupportedModel


def test_opacus_modules_are_found_after_import_vestige_alone():
    program = """
import vestige
assert vestige.validators.ModuleValidator.fix and vestige.layers.DPLSTM
assert vestige.accountants.RDPAccountant and vestige.optimizers.DPOptimizer
assert vestige.GradSampleModule is vestige.grad_sample.GradSampleModule
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("accountants.accountant", "IAccountant", "accountants"),
        ("accountants.gdp", "GaussianAccountant", "accountants"),
        ("accountants.prv", "PRVAccountant", "accountants"),
        ("accountants.rdp", "RDPAccountant", "accountants"),
        ("grad_sample.grad_sample_module", "GradSampleModule", "grad_sample"),
        ("grad_sample.utils", "register_grad_sampler", "grad_sample"),
        ("layers.dp_multihead_attention", "DPMultiheadAttention", "layers"),
        ("schedulers.grad_clip_scheduler", "StepGradClip", "schedulers"),
        ("schedulers.noise_scheduler", "ExponentialNoise", "schedulers"),
        ("validators.utils", "register_module_fixer", "validators"),
    ],
)
def test_a_name_is_the_same_wherever_opacus_has_it(module, name, home):
    found, kept = (importlib.import_module(f"vestige.{place}") for place in (module, home))
    assert getattr(found, name) is getattr(kept, name)


@pytest.mark.parametrize(
    "module",
    [
        "accountants.analysis.rdp",
        "dp_model_inspector",
        "privacy_analysis",
        "utils.module_modification",
        "utils.stats",
        "utils.fast_gradient_clipping_utils",
        "utils.fsdp_utils",
        "utils.module_utils",
    ],
)
def test_a_module_without_a_counterpart_says_what_to_do(module):
    with pytest.raises(ImportError, match=r"has no counterpart: .*\. docs/from-opacus\.md"):
        importlib.import_module(f"vestige.{module}")


def test_every_import_name_is_a_few_lines():
    source = Path(vestige.__file__).parent
    for room in OPACUS:
        for path in (source / room).rglob("*.py"):
            assert path.name == "__init__.py" and lines_of(path) <= 10, path


def test_reading_grad_sample_says_why_and_setting_it_is_nobodys_loss():
    model = private()[1]
    parameter = model[0].weight
    assert not hasattr(parameter, "grad_sample") and getattr(parameter, "grad_sample", 7) == 7
    with pytest.raises(PrivacyError, match=r"parameter\.grad_sample is refused: per-example grad"):
        _ = parameter.grad_sample
    parameter.grad_sample = torch.ones(2)  # as another library of the process does
    assert torch.equal(parameter.grad_sample, torch.ones(2))
    del parameter.grad_sample
