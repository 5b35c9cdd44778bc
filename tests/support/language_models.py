"""Small language models of every family: (model, configuration, its settings, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROWS, LENGTH = 5, 7
Inputs = dict[str, Tensor]
Family = tuple[str, str, dict[str, Any], Callable[..., Inputs]]


def text(**more: Tensor) -> Inputs:
    """Tokens padded on the right, every row with a length of its own."""
    lengths = torch.tensor([7, 3, 5, 6, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": torch.randint(5, 50, (ROWS, LENGTH)), "attention_mask": mask, **more}


def pair() -> Inputs:
    """Tokens and what is said of them so far."""
    return text(decoder_input_ids=torch.randint(3, 50, (ROWS, 4)))


H = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
D = {**H, "intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 32}
NEW = {**D, "num_key_value_heads": 1, "pad_token_id": 0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
BART = {
    "d_model": 16,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
}
ENDS = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4}
MAMBA_HEADS = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
SQUEEZED = ("q", "k", "v", "post_attention", "intermediate", "output")
LANGUAGE: dict[str, Family] = {
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
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12, **ENDS},
        lambda: {
            "input_features": torch.randn(ROWS, 8, 20, dtype=torch.float64),
            "decoder_input_ids": torch.randint(3, 50, (ROWS, 4)),
        },
    ),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", {**T5, "decoder_start_token_id": 0}, pair),
    "umt5": (
        "UMT5ForConditionalGeneration",
        "UMT5Config",
        {**T5, "decoder_start_token_id": 0},
        pair,
    ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", BART, pair),
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        {**BART, "pad_token_id": 0, "decoder_start_token_id": 0, "decoder_vocab_size": 50},
        pair,
    ),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", BART, pair),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, pair),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {**MAMBA, **MAMBA_HEADS}, text),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", MAMBA, text),
    "mixtral with batched_mm": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**NEW, "num_local_experts": 2, "experts_implementation": "batched_mm"},
        text,
    ),
    "qwen2_moe with batched_mm": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **NEW,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "experts_implementation": "batched_mm",
        },
        text,
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", NEW, text),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**NEW, "head_dim": 8}, text),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", NEW, text),
    "glm": ("GlmForCausalLM", "GlmConfig", {**NEW, "head_dim": 8}, text),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", NEW, text),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", D, text),
    "deberta-v3": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {
            **D,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_buckets": 8,
            "position_biased_input": False,
        },
        text,
    ),
    "modernbert": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**D, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 4},
        text,
    ),
    "roformer": ("RoFormerForSequenceClassification", "RoFormerConfig", D, text),
    "convbert": (
        "ConvBertForSequenceClassification",
        "ConvBertConfig",
        {**D, "embedding_size": 16, "conv_kernel_size": 3},
        text,
    ),
    "squeezebert": (
        "SqueezeBertForSequenceClassification",
        "SqueezeBertConfig",
        {**D, "embedding_size": 16, **{f"{part}_groups": 1 for part in SQUEEZED}},
        text,
    ),
    "mobilebert": (
        "MobileBertForSequenceClassification",
        "MobileBertConfig",
        {**D, "embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8},
        text,
    ),
    "rembert": (
        "RemBertForSequenceClassification",
        "RemBertConfig",
        {**D, "input_embedding_size": 8, "output_embedding_size": 8},
        text,
    ),
    "megatron bert": ("MegatronBertForSequenceClassification", "MegatronBertConfig", D, text),
    "ernie": ("ErnieForSequenceClassification", "ErnieConfig", D, text),
    "fnet": (
        "FNetForSequenceClassification",
        "FNetConfig",
        {key: value for key, value in D.items() if key != "num_attention_heads"},
        lambda: {"input_ids": torch.randint(5, 50, (ROWS, LENGTH))},
    ),
    "layoutlm": (
        "LayoutLMForSequenceClassification",
        "LayoutLMConfig",
        D,
        lambda: text(
            bbox=torch.randint(0, 100, (ROWS, LENGTH, 4)).sort(-1).values,
            token_type_ids=torch.zeros(ROWS, LENGTH, dtype=torch.long),
        ),
    ),
    "longformer": (
        "LongformerForSequenceClassification",
        "LongformerConfig",
        {**D, "attention_window": 4, "pad_token_id": 0},
        text,
    ),
    "big_bird": (
        "BigBirdForSequenceClassification",
        "BigBirdConfig",
        {**D, "attention_type": "original_full"},
        text,
    ),
    "nystromformer": (
        "NystromformerForSequenceClassification",
        "NystromformerConfig",
        {**D, "num_landmarks": 7, "segment_means_seq_len": 7},
        text,
    ),
    "data2vec text": ("Data2VecTextForSequenceClassification", "Data2VecTextConfig", D, text),
    "clap text": ("ClapTextModel", "ClapTextConfig", D, text),
    "esm": (
        "EsmForSequenceClassification",
        "EsmConfig",
        {**D, "pad_token_id": 0, "mask_token_id": 4},
        text,
    ),
}
