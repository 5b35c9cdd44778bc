"""Whole families of models: the clipped sum equals a loop over single records, or it is refused.

Each is built small from its own configuration, with random weights, in float64. What becomes of
every family is printed (`pytest -rP`); docs/models.md has the table.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.language_models import LANGUAGE, ROWS, Inputs
from tests.support.perception_models import PERCEPTION
from tests.support.reference import clip_and_sum
from vestige import fix
from vestige.errors import VestigeError
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.gradients.self_check import self_check
from vestige.sampling.loader import Batch

pytestmark = pytest.mark.slow
BOUND = 1e-3
# A refusal ends with what to do.
REMEDY = r"\. (Use|Move|Keep|Call|Take|Pass) |: (use|call) |\((call|use) "


def outputs_of(out: Any) -> Tensor:
    """The first floating tensor that a model returns."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


def verdict(model: nn.Module, inputs: Inputs, rows: int = ROWS, training: bool = False) -> str:
    """'works' if every row's gradient is the loop's; else why the model is refused."""
    model = model.double().train(training)
    twin = copy.deepcopy(model)
    groups = partition(model, "flat")
    watch = Capture(model, groups, Clip((BOUND,)))
    watch.mean_loss = False
    watch.attach()
    try:
        skipped = self_check(watch, (), inputs, 0)
        watch.collector.clear()
        watch.start(Batch(rows))
        out = outputs_of(model(**inputs))
        cotangent = torch.randn_like(out)
        (out * cotangent).sum().backward()
    except VestigeError as error:
        assert re.search(REMEDY, str(error)), error
        return f"refused: {error}"
    finally:
        watch.detach()
    assert out.shape[0] == rows
    parameters = dict(twin.named_parameters())
    gradients = []
    for i in range(rows):
        one = {k: v[i : i + 1] for k, v in inputs.items()}
        alone = outputs_of(twin(**one))
        wanted = [parameters[slot.name] for slot in groups.slots]
        loss = (alone * cotangent[i : i + 1]).sum()
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        pairs = zip(found, wanted, strict=True)
        gradients.append(
            torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        )
    expected = clip_and_sum(torch.stack(gradients), groups, Clip((BOUND,)))
    error = float((watch.collector.total - expected).norm() / expected.norm())
    assert error < 1e-8, error
    return "works" if skipped is None else f"works, not self-checked: {skipped}"


HUGGING_FACE = {**LANGUAGE, **PERCEPTION}
# Their examples meet, or an operation is not followed: the reason is what the error names.
REFUSED = {
    "mixtral": "set_experts_implementation",  # tokens of all rows are sorted by expert
    "xlnet": "XLNetRelativeAttention",  # its positions are in front of its rows
    "longformer": "as_strided",  # windows overlap in memory
    "m2m_100": "M2M100Encoder",  # it looks at its mask to choose a way
    "dinov3": "from outside the model's forward",  # positions kept from one pass to the next
    "wavlm": "WavLMAttention",  # rows and heads are folded in what all layers share
}
# In eval() they keep biases from one pass to the next.
IN_TRAINING = {"levit", "levit_128s", "efficientvit_m0"}


@pytest.mark.parametrize("name", list(HUGGING_FACE))
def test_a_hugging_face_family_is_exact_or_refused(name):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    model_class, config_class, given, inputs = HUGGING_FACE[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**given)
    model = fix(getattr(transformers, model_class)(config))
    said = verdict(model, inputs(), training=name in IN_TRAINING)
    print(f"{name}: {said}")
    assert said.startswith("refused") == (name in REFUSED), said
    assert re.search(REFUSED.get(name, "works"), said)


# name -> (class of the configuration, its settings)
VIRTUAL = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
ON = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 2, **ON}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True, **ON}),
    "rslora": ("LoraConfig", {"r": 2, "use_rslora": True, **ON}),
    "adalora": ("AdaLoraConfig", {"total_step": 10, **ON}),
    "vera": ("VeraConfig", {"r": 2, **ON}),
    "lokr": ("LoKrConfig", {"r": 2, **ON}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, **ON}),
    "ia3": ("IA3Config", {"feedforward_modules": [], **ON}),
    "prefix": ("PrefixTuningConfig", VIRTUAL),
    "prompt": ("PromptTuningConfig", VIRTUAL),
    "loha": ("LoHaConfig", {"r": 2, **ON}),
    "oft": ("OFTConfig", {"oft_block_size": 4, **ON}),
}
ADAPTERS_REFUSED = {
    "loha": "hada_w",  # an autograd function of its own makes the weight
    "oft": "einsum",  # an einsum with dots
}


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_an_adapter_is_exact_or_refused(name):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    peft = pytest.importorskip("peft", reason="pip install -e '.[hf]'")
    _, _, given, inputs = HUGGING_FACE["llama"]
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    config_class, settings = ADAPTERS[name]
    model = peft.get_peft_model(base, getattr(peft, config_class)(**settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)  # half of them start at zero
    said = verdict(model, inputs())
    print(f"{name}: {said}")
    assert said.startswith("refused") == (name in ADAPTERS_REFUSED), said
    assert re.search(ADAPTERS_REFUSED.get(name, "works"), said)


# -- timm -------------------------------------------------------------------------------------


DECLARED: list[torch.library.Library] = []  # kept: what a library declares goes with it


def declare_torchvision_operators() -> None:
    """torchvision without its compiled part can be imported once its operators have names."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or DECLARED:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        source = (Path(found.origin).parent / "_meta_registrations.py").read_text()
        names = set(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', source))
        DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in names:
            DECLARED[0].define(f"{name}(Tensor a) -> Tensor")
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]


def named(names: str, **settings: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), settings)


# name -> settings; of every family one that is small at 64 pixels
TIMM: dict[str, dict[str, Any]] = {
    **named("resnet18 resnet10t resnetv2_18 resnest14d legacy_seresnet18 skresnet18"),
    **named("res2net50_26w_4s resnext26ts gernet_s regnetx_002 regnety_002 regnetz_005 rexnet_100"),
    **named("mobilenetv1_100 mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035"),
    **named("efficientnet_lite0 efficientnet_b0 mnasnet_small tinynet_e mixnet_s fbnetc_100"),
    **named("spnasnet_100 hardcorenas_a lcnet_035 lcnetv2_base ghostnet_050 repghostnet_050"),
    **named("densenet121 dla34 dla46_c dpn48b hrnet_w18_small inception_next_atto xception41"),
    **named("inception_v3 inception_v4", img_size=96),
    **named("selecsls42 ese_vovnet19b_dw cs3darknet_s hgnetv2_b0 nf_regnet_b0"),
    **named("convnext_atto convnextv2_atto poolformer_s12 pvt_v2_b0 mobilevit_xxs mobilevitv2_050"),
    **named("edgenext_xx_small fastvit_t8 mobileone_s0 repvgg_a0 repvit_m0_9 starnet_s050"),
    **named("fasternet_t0 shvit_s1 mambaout_femto efficientvit_b0 swiftformer_xs iformer_t"),
    **named("resmlp_12_224 gmlp_ti16_224 levit_128s visformer_tiny nest_tiny", img_size=64),
    **named("pit_ti_224 coat_tiny coat_lite_tiny convit_tiny gcvit_xxtiny", img_size=64),
    **named("vitamin_small_224 maxvit_pico_rw_256 coatnet_pico_rw_224", img_size=64),
    **named("vit_tiny_patch16_224 deit_tiny_distilled_patch16_224", img_size=64, depth=2),
    **named("cait_xxs24_224 xcit_nano_12_p16_224 tnt_s_patch16_224", img_size=64, depth=2),
    **named("vit_relpos_small_patch16_224 vit_tiny_r_s16_p8_224", img_size=64, depth=2),
    **named("efficientvit_m0", img_size=224),
    **named("eva02_tiny_patch14_224", img_size=56, depth=2),
    **named("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4),
    **named(
        "swin_tiny_patch4_window7_224 swinv2_cr_tiny_224",
        img_size=32,
        window_size=4,
        depths=(2, 1),
        embed_dim=12,
        num_heads=(2, 2),
    ),
}
TIMM_REFUSED = {
    "xcit_nano_12_p16_224": "pos_embed",  # a convolution of positions, shared by all rows
    "tnt_s_patch16_224": "pixel_embed",  # its outputs have patches in front, as many as rows
    # Global queries went to the windows of other rows before timm 1.0.31, which is exact.
    "gcvit_xxtiny": "output changes|^works$",
}


def parts(model: nn.Module) -> Counter[str]:
    """How many modules of each kind a model has, apart from norms."""
    kinds = (type(part).__name__ for part in model.modules())
    return Counter(kind for kind in kinds if "BatchNorm" not in kind and "GroupNorm" not in kind)


def timm_model(name: str) -> tuple[nn.Module, Inputs]:
    declare_torchvision_operators()
    reason = "timm needs torchvision: pip install timm torchvision"
    timm = pytest.importorskip("timm", reason=reason, exc_type=ImportError)
    given, size = dict(TIMM[name]), TIMM[name].get("img_size", 64)
    if name.startswith("inception"):
        given.pop("img_size", None)  # it has no such setting: any size will do
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=3, **given)
    fixed = fix(model)
    assert parts(fixed) == parts(model)  # activations inside norms are still there
    return fixed, {"x": torch.randn(3, 3, size, size, dtype=torch.float64)}


@pytest.mark.parametrize("name", list(TIMM))
def test_a_timm_family_is_exact_or_refused(name):
    model, inputs = timm_model(name)
    said = verdict(model, inputs, rows=3, training=name in IN_TRAINING)
    print(f"{name}: {said}")
    assert re.search(TIMM_REFUSED.get(name, "^works"), said), said
