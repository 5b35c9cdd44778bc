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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.reference import clip_and_sum
from vestige import fix
from vestige.errors import VestigeError
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.gradients.self_check import self_check
from vestige.sampling.loader import Batch

pytestmark = pytest.mark.slow
ROWS, LENGTH, BOUND = 5, 7, 1e-3

Inputs = dict[str, Tensor]


def outputs_of(out: Any) -> Tensor:
    """The first floating tensor that a model returns."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


def verdict(model: nn.Module, inputs: Inputs, rows: int = ROWS) -> str:
    """'works' if every row's gradient is the loop's; else why the model is refused."""
    model = model.double().eval()
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


def text(**more: Tensor) -> Inputs:
    """Tokens padded on the right, every row with a length of its own."""
    lengths = torch.tensor([7, 3, 5, 6, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": torch.randint(5, 50, (ROWS, LENGTH)), "attention_mask": mask, **more}


def images(size: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 3, size, size, dtype=torch.float64)}


H = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
D = {**H, "intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 32}
NEW = {**D, "num_key_value_heads": 1, "pad_token_id": 0}
VISION = {**H, "intermediate_size": 24, "image_size": 32, "patch_size": 8}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
BART = {
    "d_model": 16,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
}
# name -> (class of the model, of its configuration, settings, inputs)
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2},
        text,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", NEW, text),
    "mistral": ("MistralForCausalLM", "MistralConfig", NEW, text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", NEW, text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**NEW, "head_dim": 8}, text),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**NEW, "head_dim": 8}, text),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**NEW, "head_dim": 8}, text),
    "phi": ("PhiForCausalLM", "PhiConfig", {**NEW, "num_key_value_heads": 2}, text),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", NEW, text),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", NEW, text),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**NEW, "num_key_value_heads": 2},
        text,
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", NEW, text),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", NEW, text),
    "cohere": ("CohereForCausalLM", "CohereConfig", NEW, text),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**H, "vocab_size": 50},
        text,
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**H, "vocab_size": 50, "ffn_dim": 24, "word_embed_proj_dim": 16},
        text,
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50},
        text,
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 50,
            "max_position_embeddings": 32,
            "attention_types": [[["global", "local"], 1]],
        },
        text,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", D, text),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": 50,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "rotary_dim": 4,
        },
        text,
    ),
    "codegen": (
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {
            "vocab_size": 50,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
        },
        text,
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 50, "max_seq_len": 32},
        text,
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**NEW, "num_local_experts": 2}, text),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4},
        text,
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", D, text),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", D, text),
    "xlm-roberta": ("XLMRobertaForTokenClassification", "XLMRobertaConfig", D, text),
    "camembert": ("CamembertForMaskedLM", "CamembertConfig", D, text),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 50, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
        text,
    ),
    "electra": (
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {**D, "embedding_size": 8},
        text,
    ),
    "albert": (
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {**D, "embedding_size": 8},
        text,
    ),
    "mpnet": ("MPNetForSequenceClassification", "MPNetConfig", D, text),
    "deberta": (
        "DebertaForSequenceClassification",
        "DebertaConfig",
        {**D, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        text,
    ),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**D, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        text,
    ),
    "xlnet": (
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": 50, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
        text,
    ),
    "funnel": (
        "FunnelForSequenceClassification",
        "FunnelConfig",
        {
            "vocab_size": 50,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
        },
        text,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "decoder_start_token_id": 0},
        lambda: text(decoder_input_ids=torch.randint(1, 50, (ROWS, 4))),
    ),
    "t5 encoder": ("T5EncoderModel", "T5Config", T5, text),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        BART,
        lambda: text(decoder_input_ids=torch.randint(3, 50, (ROWS, 4))),
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        BART,
        lambda: text(decoder_input_ids=torch.randint(3, 50, (ROWS, 4))),
    ),
    "clip text": ("CLIPTextModel", "CLIPTextConfig", {**D, "eos_token_id": 49}, text),
    "clip vision": ("CLIPVisionModel", "CLIPVisionConfig", VISION, images),
    "siglip vision": ("SiglipVisionModel", "SiglipVisionConfig", VISION, images),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, images),
    "deit": ("DeiTForImageClassification", "DeiTConfig", VISION, images),
    "beit": ("BeitForImageClassification", "BeitConfig", VISION, images),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", VISION, images),
    "vit mae": (
        "ViTMAEModel",
        "ViTMAEConfig",
        VISION,
        lambda: {**images(), "noise": torch.rand(ROWS, 16, dtype=torch.float64)},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        images,
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        images,
    ),
    "segformer": (
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
        images,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        images,
    ),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        images,
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        images,
    ),
    "mobilenet v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", {}, images),
    "poolformer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
        },
        images,
    ),
    "whisper encoder": (
        "WhisperForAudioClassification",
        "WhisperConfig",
        {
            "d_model": 16,
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "max_source_positions": 10,
        },
        lambda: {"input_features": torch.randn(ROWS, 8, 20, dtype=torch.float64)},
    ),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **H,
            "intermediate_size": 24,
            "conv_dim": [8, 8],
            "conv_stride": [4, 2],
            "conv_kernel": [8, 3],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 8,
            "vocab_size": 50,
        },
        lambda: {"input_values": torch.randn(ROWS, 160, dtype=torch.float64)},
    ),
    "audio spectrogram transformer": (
        "ASTForAudioClassification",
        "ASTConfig",
        {**H, "intermediate_size": 24, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
        lambda: {"input_values": torch.randn(ROWS, 32, 16, dtype=torch.float64)},
    ),
}
# Their examples meet, or an operation is not followed: the reason is what the error names.
REFUSED = {
    "mixtral": "_grouped_mm",  # experts chosen by token: their rows differ in number
    "deberta": "rel_embeddings",  # a table that meets layers as an argument
    "deberta-v2": "rel_embeddings",
    "xlnet": "XLNetRelativeAttention",  # its positions are in front of its rows
}


@pytest.mark.parametrize("name", list(HUGGING_FACE))
def test_a_hugging_face_family_is_exact_or_refused(name):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    model_class, config_class, given, inputs = HUGGING_FACE[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**given)
    config.use_cache = False
    model = fix(getattr(transformers, model_class)(config))
    said = verdict(model, inputs())
    print(f"{name}: {said}")
    assert said.startswith("refused") == (name in REFUSED), said
    assert re.search(REFUSED.get(name, "works"), said)


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


# name -> settings; one of every family that is small at 32 to 64 pixels
TIMM: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in "resnet18 mobilenetv2_035 mobilenetv3_small_050 efficientnet_lite0 regnetx_002 "
        "regnety_002 ghostnet_050 convnext_atto convnextv2_atto poolformer_s12 pvt_v2_b0 "
        "mobilevit_xxs edgenext_xx_small fastvit_t8".split()
    },
    **{
        name: {"img_size": 64}
        for name in "resmlp_12_224 gmlp_ti16_224 levit_128s visformer_tiny nest_tiny".split()
    },
    **{
        name: {"img_size": 64, "depth": 2}
        for name in "vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 cait_xxs24_224 "
        "xcit_nano_12_p16_224 tnt_s_patch16_224".split()
    },
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4},
    **{
        name: {
            "img_size": 32,
            "window_size": 4,
            "depths": (2, 1),
            "embed_dim": 12,
            "num_heads": (2, 2),
        }
        for name in ("swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224")
    },
}
TIMM_REFUSED = {
    "levit_128s": "Attention",  # in evaluation it keeps biases from one pass to the next
    "xcit_nano_12_p16_224": "pos_embed",  # a convolution of positions, shared by all rows
    "tnt_s_patch16_224": "pixel_embed",  # its outputs have patches in front, as many as rows
}


def timm_model(name: str) -> tuple[nn.Module, Inputs]:
    declare_torchvision_operators()
    reason = "timm needs torchvision: pip install timm torchvision"
    timm = pytest.importorskip("timm", reason=reason, exc_type=ImportError)
    given = TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=3, **given)
    size = given.get("img_size", 64)
    return fix(model), {"x": torch.randn(3, 3, size, size, dtype=torch.float64)}


@pytest.mark.parametrize("name", list(TIMM))
def test_a_timm_family_is_exact_or_refused(name):
    model, inputs = timm_model(name)
    said = verdict(model, inputs, rows=3)
    print(f"{name}: {said}")
    assert said.startswith("refused") == (name in TIMM_REFUSED), said
    assert re.search(TIMM_REFUSED.get(name, "works"), said)
