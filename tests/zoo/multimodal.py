"""Models of speech, sound, series, and of text with images."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import BATCH, Entry, Shape, both, images, noise, tokens, transformers

_TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_SPEECH: dict[str, Any] = {
    **_TEXT,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "feat_extract_norm": "layer",
    "layerdrop": 0.0,
    "adapter_kernel_size": 3,
    "vocab_size": 32,
}
_BOTH = both(tokens(), images())


def _model(name: str, family: str, shape: Shape = (8, None), *, head: str = "Model", **more: Any) -> Entry:
    own = {key: more.pop(key) for key in tuple(more) if key in Entry.__dataclass_fields__}
    settings = {key: value for key, value in {**more.pop("small", {}), **more}.items() if value is not ...}
    return Entry(
        name,
        transformers(f"{family}Config", f"{family}{head}", settings=settings),
        own.pop("inputs", _BOTH),
        shapes=own.pop("shapes", {"*": shape}),
        **own,
    )


def _wave(padding: int = 0) -> dict[str, Any]:
    values = torch.randn(BATCH, 400, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(BATCH, 400, dtype=torch.long)
    mask[1, 280:] = 0
    return {"input_values": values, "attention_mask": mask}


_EAGER: dict[str, Any] = {"implementations": ("eager",)}
_SPEECH_INPUTS = noise(
    "input_features", (BATCH, 20, 8), attention_mask=lambda: torch.tensor([[1] * 20, [1] * 14 + [0] * 6])
)

MULTIMODAL = (
    _model("CLIP", "CLIP", text_config=_TEXT, vision_config=_VISION, projection_dim=16),
    _model("SigLIP", "Siglip", text_config=_TEXT, vision_config=_VISION),
    _model("SigLIP 2 text", "Siglip2Text", head="Model", small=_TEXT, inputs=tokens()),
    _model(
        "BLIP", "Blip", text_config={**_TEXT, "is_decoder": False}, vision_config=_VISION, projection_dim=16, **_EAGER
    ),
    _model("CLAP text", "ClapText", small=_TEXT, inputs=tokens(), **_EAGER),
    _model("CLIPSeg", "CLIPSeg", text_config=_TEXT, vision_config=_VISION, projection_dim=16),
    _model("ALTCLIP text", "AltCLIPText", small=_TEXT, project_dim=16, inputs=tokens()),
    _model("ViLT", "Vilt", small={**_TEXT, **_VISION, "max_image_length": -1}, **_EAGER),
    _model(
        "VisualBERT",
        "VisualBert",
        small={**_TEXT, "visual_embedding_dim": 12},
        inputs=both(tokens(), noise("visual_embeds", (BATCH, 4, 12))),
        **_EAGER,
    ),
    _model(
        "LXMERT",
        "Lxmert",
        small={**_TEXT, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 12, "num_hidden_layers": ...},
        inputs=both(tokens(), noise("visual_feats", (BATCH, 4, 12)), noise("visual_pos", (BATCH, 4, 4))),
        extra={"*.x_layers.*": "reports one of the four attentions of a cross-modality layer"},
        **_EAGER,
    ),
    _model("FLAVA text", "FlavaText", small=_TEXT, inputs=tokens(), **_EAGER),
    _model("GIT", "Git", small={**_TEXT, "vision_config": _VISION}, **_EAGER),
    _model(
        "LLaVA",
        "Llava",
        text_config={**_TEXT, "model_type": "llama", "num_key_value_heads": 2},
        vision_config={**_VISION, "model_type": "clip_vision_model"},
        image_token_id=98,
        head="ForConditionalGeneration",
        inputs=lambda: {
            "input_ids": torch.tensor([[1] + [98] * 16 + [5, 6, 7]] * 2),
            "attention_mask": torch.tensor([[1] * 20, [1] * 18 + [0] * 2]),
            **images()(),
        },
    ),
    _model(
        "Qwen2-VL",
        "Qwen2VL",
        head="ForConditionalGeneration",
        text_config={
            **_TEXT,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=98,
        video_token_id=97,
        vision_start_token_id=96,
        inputs=lambda: {
            "input_ids": torch.tensor([[1, 96] + [98] * 4 + [5, 6, 7]]),
            "attention_mask": torch.ones(1, 9, dtype=torch.long),
            "mm_token_type_ids": torch.tensor([[0, 0] + [1] * 4 + [0] * 3]),
            "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(3)),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        },
        extra={"model.visual.*": "reports the attention of the text only"},
    ),
    _model("Wav2Vec2", "Wav2Vec2", small=_SPEECH, inputs=_wave),
    _model("HuBERT", "Hubert", small=_SPEECH, inputs=_wave),
    _model("WavLM", "WavLM", small=_SPEECH, inputs=_wave, **_EAGER),
    _model("UniSpeech", "UniSpeech", small=_SPEECH, inputs=_wave),
    _model("SEW", "SEW", small={**_SPEECH, "squeeze_factor": 1}, inputs=_wave),
    _model(
        "Wav2Vec2-Conformer",
        "Wav2Vec2Conformer",
        small={**_SPEECH, "position_embeddings_type": "relative"},
        inputs=_wave,
    ),
    _model(
        "Wav2Vec2-BERT",
        "Wav2Vec2Bert",
        small={
            **_TEXT,
            "feature_projection_input_dim": 8,
            "apply_spec_augment": False,
            "position_embeddings_type": "relative_key",
        },
        inputs=_SPEECH_INPUTS,
    ),
    _model(
        "Audio Spectrogram Transformer",
        "AST",
        small={**_TEXT, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
        inputs=noise("input_values", (BATCH, 16, 8)),
    ),
    _model(
        "SpeechT5",
        "SpeechT5",
        head="ForTextToSpeech",
        small={
            "vocab_size": 99,
            "hidden_size": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "num_mel_bins": 8,
            "speaker_embedding_dim": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "reduction_factor": 1,
            "encoder_max_relative_position": 8,
        },
        inputs=both(tokens(), noise("decoder_input_values", (BATCH, 6, 8)), noise("speaker_embeddings", (BATCH, 8))),
        **_EAGER,
    ),
    _model(
        "PatchTST",
        "PatchTST",
        small={
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "ffn_dim": 40,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "do_mask_input": False,
        },
        inputs=noise("past_values", (BATCH, 16, 2)),
    ),
    _model(
        "Decision Transformer",
        "DecisionTransformer",
        small={
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 40,
            "max_ep_len": 20,
        },
        inputs=both(
            noise("states", (BATCH, 4, 5)),
            noise("actions", (BATCH, 4, 3)),
            noise("rewards", (BATCH, 4, 1)),
            noise("returns_to_go", (BATCH, 4, 1)),
            lambda: {"timesteps": torch.arange(4).expand(BATCH, 4)},
        ),
    ),
)
