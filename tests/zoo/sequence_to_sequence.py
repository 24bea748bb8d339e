"""Models with an encoder and a decoder."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import BATCH, Entry, Shape, both, noise, tokens, transformers, translation
from tests.zoo.truth import heads_second, softmaxed

_BART: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}


def _pair(name: str, family: str, shape: Shape = (8, None), *, head: str = "Model", **more: Any) -> Entry:
    own = {key: more.pop(key) for key in tuple(more) if key in Entry.__dataclass_fields__}
    small = more.pop("small", _BART)
    settings = {key: value for key, value in {**small, **more}.items() if value is not ...}
    return Entry(
        name,
        transformers(f"{family}Config", f"{family}{head}", settings=settings),
        own.pop("inputs", translation()),
        shapes={"*": shape},
        **own,
    )


_EAGER: dict[str, Any] = {"implementations": ("eager",)}
_GEMMA: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 24,
    "sliding_window": 4,
    "max_position_embeddings": 64,
}

SEQUENCE_TO_SEQUENCE = (
    _pair("T5", "T5", (8, 1.0), small=_T5),
    _pair("UMT5", "UMT5", (8, 1.0), small=_T5),
    _pair("mT5", "MT5", (8, 1.0), small=_T5),
    _pair("LongT5, local", "LongT5", (8, 1.0), small={**_T5, "local_radius": 2}, **_EAGER),
    _pair(
        "LongT5, transient global",
        "LongT5",
        (8, 1.0),
        small={**_T5, "local_radius": 2, "global_block_size": 3, "encoder_attention_type": "transient-global"},
        **_EAGER,
    ),
    _pair(
        "Switch Transformers",
        "SwitchTransformers",
        (8, 1.0),
        small={
            **_T5,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
            "num_experts": 4,
            "router_jitter_noise": 0.0,
        },
        **_EAGER,
    ),
    _pair("BART", "Bart"),
    _pair("mBART", "MBart"),
    _pair("Pegasus", "Pegasus"),
    _pair(
        "Pegasus-X",
        "PegasusX",
        unfactored=["*#1@*"],
        num_global_tokens=3,
        block_size=4,
        stagger_local_blocks=True,
        reported=heads_second,
        **_EAGER,
    ),
    _pair("Marian", "Marian"),
    _pair("Blenderbot", "Blenderbot"),
    _pair("M2M-100", "M2M100"),
    _pair(
        "NLLB-MoE",
        "NllbMoe",
        num_experts=4,
        expert_capacity=8,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        router_jitter_noise=0.0,
        **_EAGER,
    ),
    _pair("PLBart", "PLBart"),
    _pair(
        "ProphetNet",
        "ProphetNet",
        small={
            "vocab_size": 99,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "max_position_embeddings": 64,
            "ngram": 2,
            "relative_max_distance": 16,
            "num_buckets": 8,
            "disable_ngram_loss": True,
        },
        reported=softmaxed,
        **_EAGER,
    ),
    _pair(
        "LED",
        "LED",
        unfactored=["*longformer*"],
        pieces=2,
        small={
            **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 4,
        },
        inputs=both(tokens(12, padding=0), tokens(7, padding=0, prefix="decoder_")),
        **_EAGER,
    ),
    _pair("BigBird-Pegasus", "BigBirdPegasus", attention_type="original_full", **_EAGER),
    _pair(
        "T5Gemma", "T5Gemma", (8, 24**-0.5), small={"encoder": _GEMMA, "decoder": _GEMMA, "vocab_size": 99}, **_EAGER
    ),
    _pair(
        "Whisper",
        "Whisper",
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        max_position_embeddings=...,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        inputs=both(noise("input_features", (BATCH, 8, 20)), tokens(7, padding=2, prefix="decoder_")),
    ),
    _pair(
        "Speech2Text",
        "Speech2Text",
        input_feat_per_channel=8,
        input_channels=1,
        num_conv_layers=2,
        conv_kernel_sizes=(3, 3),
        conv_channels=16,
        max_source_positions=40,
        max_target_positions=16,
        max_position_embeddings=...,
        inputs=both(noise("input_features", (BATCH, 24, 8)), tokens(7, padding=2, prefix="decoder_")),
        **_EAGER,
    ),
    _pair(
        "Moonshine",
        "Moonshine",
        small={
            "vocab_size": 99,
            "hidden_size": 32,
            "intermediate_size": 40,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        inputs=both(noise("input_values", (BATCH, 4000)), tokens(7, padding=2, prefix="decoder_")),
    ),
)
