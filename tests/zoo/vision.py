"""Models of images and video."""

from __future__ import annotations

import math
from typing import Any

from tests.zoo.entry import BATCH, Entry, Shape, images, transformers
from tests.zoo.truth import heads_folded, heads_second

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def _vision(name: str, family: str, shape: Shape = (8, None), *, head: str = "Model", **more: Any) -> Entry:
    own = {key: more.pop(key) for key in tuple(more) if key in Entry.__dataclass_fields__}
    small = more.pop("small", _SMALL)
    settings = {key: value for key, value in {**small, **more}.items() if value is not ...}
    return Entry(
        name,
        transformers(f"{family}Config", f"{family}{head}", settings=settings),
        own.pop("inputs", images()),
        shapes=own.pop("shapes", {"*": shape}),
        **own,
    )


_EAGER: dict[str, Any] = {"implementations": ("eager",)}
_SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_STAGES: dict[str, Any] = {
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [2, 4],
    "sr_ratios": [2, 1],
    "num_encoder_blocks": 2,
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
_FRAMES: dict[str, Any] = {**_SMALL, "image_size": 16, "num_frames": 4}

VISION = (
    _vision("ViT", "ViT"),
    _vision("DeiT", "DeiT"),
    _vision(
        "ViT-MAE",
        "ViTMAE",
        decoder_num_attention_heads=4,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=40,
    ),
    _vision("BEiT", "Beit", use_relative_position_bias=True),
    _vision("Data2Vec vision", "Data2VecVision", use_relative_position_bias=True),
    _vision("DINOv2", "Dinov2", mlp_ratio=2),
    _vision("DINOv2 with registers", "Dinov2WithRegisters", mlp_ratio=2),
    _vision("DINOv3", "DINOv3ViT"),
    _vision("I-JEPA", "IJepa"),
    _vision("YOLOS", "Yolos", image_size=[32, 32], num_detection_tokens=3),
    _vision("Swin", "Swin", small=_SWIN),
    _vision("Swin v2", "Swinv2", (8, math.nan), small=_SWIN, **_EAGER),
    _vision("Donut Swin", "DonutSwin", small=_SWIN, **_EAGER),
    _vision("SegFormer", "Segformer", small=_STAGES),
    _vision(
        "PVT",
        "Pvt",
        small={**_STAGES, "sequence_reduction_ratios": [2, 1], "image_size": 32, "patch_sizes": [4, 2]},
        **_EAGER,
    ),
    _vision("PVT v2", "PvtV2", small={**_STAGES, "image_size": 32, "num_encoder_blocks": 2}, **_EAGER),
    _vision("GLPN", "GLPN", small=_STAGES, **_EAGER),
    _vision(
        "MobileViT",
        "MobileViT",
        small={
            "image_size": 32,
            "hidden_sizes": [32, 32, 32],
            "num_attention_heads": 4,
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
        },
        extra={"*": "reports no attention"},
        **_EAGER,
    ),
    _vision(
        "LeViT",
        "Levit",
        small={
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 4, 6],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        inputs=images(64),
        extra={"*": "reports no attention"},
        **_EAGER,
    ),
    _vision(
        "CvT",
        "Cvt",
        shapes={"*.stages.0.*": (16, 16**-0.5), "*.stages.1.*": (12, 24**-0.5), "*.stages.2.*": (8, 32**-0.5)},
        small={
            "embed_dim": [16, 24, 32],
            "num_heads": [1, 2, 4],
            "depth": [1, 2, 3],
            "attention_drop_rate": [0.0] * 3,
            "drop_rate": [0.0] * 3,
            "drop_path_rate": [0.0] * 3,
        },
        extra={"*": "reports no attention"},
        **_EAGER,
    ),
    _vision(
        "Hiera",
        "Hiera",
        small={
            "embed_dim": 16,
            "image_size": [64, 64],
            "depths": [1, 1],
            "num_heads": [2, 4],
            "masked_unit_size": [8, 8],
            "query_stride": [2, 2],
            "patch_stride": [4, 4],
            "masked_unit_attention": [True, False],
            "num_query_pool": 1,
        },
        inputs=images(64),
        reported=heads_second,
        **_EAGER,
    ),
    _vision("VideoMAE", "VideoMAE", small={**_FRAMES, "tubelet_size": 2}, inputs=images(16, lead=(BATCH, 4, 3))),
    _vision(
        "TimeSformer",
        "Timesformer",
        small=_FRAMES,
        inputs=images(16, lead=(BATCH, 4, 3)),
        extra={"*.temporal_attention.*": "reports the spatial attention only"},
        **_EAGER,
    ),
    _vision("ViViT", "Vivit", small={**_FRAMES, "tubelet_size": [2, 8, 8]}, inputs=images(16, lead=(BATCH, 4, 3))),
    _vision(
        "SAM vision encoder",
        "SamVision",
        (8, None),
        output_channels=16,
        window_size=2,
        global_attn_indexes=[1],
        use_rel_pos=True,
        mlp_dim=40,
        reported=heads_folded(4),
    ),
    _vision(
        "ConvNeXt",
        "ConvNext",
        small={"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        note="no attention",
        **_EAGER,
    ),
    _vision(
        "Conditional DETR",
        "ConditionalDetr",
        shapes={"*.encoder_attn": (16, None), "*": (8, None)},
        small={
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage4"],
            },
        },
        inputs=images(64),
        **_EAGER,
    ),
    _vision(
        "DETR",
        "Detr",
        small={
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage4"],
            },
        },
        inputs=images(64),
        **_EAGER,
    ),
)
