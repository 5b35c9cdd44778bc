"""Small image and sound models of every family: (model, configuration, its settings, inputs)."""

from __future__ import annotations

import torch

from tests.support.language_models import ROWS, Family, H, Inputs


def images(size: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 3, size, size, dtype=torch.float64)}


def sound() -> Inputs:
    return {"input_values": torch.randn(ROWS, 160, dtype=torch.float64)}


VISION = {**H, "intermediate_size": 24, "image_size": 32, "patch_size": 8}
WAVES = {
    **H,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "vocab_size": 50,
}
PYRAMID = {
    "image_size": 32,
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
PERCEPTION: dict[str, Family] = {
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
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAVES, sound),
    "audio spectrogram transformer": (
        "ASTForAudioClassification",
        "ASTConfig",
        {**H, "intermediate_size": 24, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
        lambda: {"input_values": torch.randn(ROWS, 32, 16, dtype=torch.float64)},
    ),
    "vit msn": ("ViTMSNForImageClassification", "ViTMSNConfig", VISION, images),
    "ijepa": ("IJepaForImageClassification", "IJepaConfig", VISION, images),
    "dinov3": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {**VISION, "num_register_tokens": 2},
        images,
    ),
    "pvt": (
        "PvtForImageClassification",
        "PvtConfig",
        {**PYRAMID, "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2]},
        images,
    ),
    "pvt_v2": (
        "PvtV2ForImageClassification",
        "PvtV2Config",
        {**PYRAMID, "sr_ratios": [2, 1], "patch_sizes": [7, 3]},
        images,
    ),
    "focalnet": (
        "FocalNetForImageClassification",
        "FocalNetConfig",
        {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        images,
    ),
    "regnet": (
        "RegNetForImageClassification",
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
        images,
    ),
    "bit": (
        "BitForImageClassification",
        "BitConfig",
        {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
        images,
    ),
    "mobilenet v1": (
        "MobileNetV1ForImageClassification",
        "MobileNetV1Config",
        {"depth_multiplier": 0.25},
        images,
    ),
    "efficientnet": (
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {
            "image_size": 32,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.1,
            "hidden_dim": 320,
            "num_block_repeats": [1] * 7,
        },
        images,
    ),
    "levit": (
        "LevitForImageClassification",
        "LevitConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        lambda: images(64),
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {
            "image_size": 32,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "num_attention_heads": 2,
        },
        images,
    ),
    "hiera": (
        "HieraForImageClassification",
        "HieraConfig",
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "patch_size": [3, 3],
            "patch_stride": [4, 4],
            "patch_padding": [1, 1],
            "query_stride": [2, 2],
            "masked_unit_size": [4, 4],
            "num_query_pool": 1,
            "masked_unit_attention": [True, True],
        },
        images,
    ),
    "hubert": ("HubertForSequenceClassification", "HubertConfig", WAVES, sound),
    "wavlm": ("WavLMForSequenceClassification", "WavLMConfig", WAVES, sound),
    "sew": ("SEWForSequenceClassification", "SEWConfig", WAVES, sound),
    "data2vec audio": (
        "Data2VecAudioForSequenceClassification",
        "Data2VecAudioConfig",
        {**WAVES, "conv_pos_kernel_size": 3},
        sound,
    ),
}
