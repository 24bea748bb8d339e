"""Language models that predict the next token."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import Entry, Shape, tokens, transformers
from tests.zoo.truth import with_sink

_SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}


def _decoder(name: str, family: str, shape: Shape = (8, None), *, head: str = "ForCausalLM", **more: Any) -> Entry:
    own = {key: more.pop(key) for key in tuple(more) if key in Entry.__dataclass_fields__}
    small = more.pop("small", _GROUPED)
    settings = {key: value for key, value in {**small, **more}.items() if value is not ...}
    return Entry(
        name,
        transformers(f"{family}Config", f"{family}{head}", settings=settings),
        own.pop("inputs", tokens()),
        shapes=own.pop("shapes", {"*": shape}),
        **own,
    )


_N_STYLE: dict[str, Any] = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_MLA: dict[str, Any] = {
    **_SMALL,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {**_GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS = (
    _decoder("GPT-2", "GPT2", head="LMHeadModel", small=_N_STYLE),
    _decoder(
        "GPT-2, scaled by layer",
        "GPT2",
        head="LMHeadModel",
        small=_N_STYLE,
        scale_attn_by_inverse_layer_idx=True,
        shapes={"*.0.attn": (8, 8**-0.5), "*.1.attn": (8, 8**-0.5 / 2)},
    ),
    _decoder(
        "GPT-Neo",
        "GPTNeo",
        (8, 1.0),
        implementations=("eager",),
        small={
            "vocab_size": 99,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    _decoder("GPT-NeoX", "GPTNeoX", small=_SMALL),
    _decoder("GPT-J", "GPTJ", small={**_N_STYLE, "rotary_dim": 4}),
    _decoder("CodeGen", "CodeGen", small={**_N_STYLE, "rotary_dim": 4}),
    _decoder("GPT-BigCode", "GPTBigCode", small=_N_STYLE),
    _decoder("Llama", "Llama"),
    _decoder(
        "Llama 4",
        "Llama4Text",
        head="Model",
        attention_chunk_size=8,
        num_local_experts=2,
        head_dim=8,
        inputs=tokens(padding=0),
    ),
    _decoder("Mistral", "Mistral", sliding_window=4),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Qwen3", "Qwen3", (10, None), head_dim=10),
    _decoder("Qwen3-MoE", "Qwen3Moe", small=_EXPERTS, head_dim=8),
    _decoder("Gemma", "Gemma", head_dim=8),
    _decoder(
        "Gemma 2",
        "Gemma2",
        (8, 24**-0.5),
        small=_LOCAL,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        implementations=("eager",),
    ),
    _decoder("Gemma 3", "Gemma3Text", (8, 24**-0.5), small=_LOCAL, query_pre_attn_scalar=24, head="Model"),
    _decoder(
        "gpt-oss",
        "GptOss",
        small=_LOCAL,
        num_local_experts=4,
        num_experts_per_tok=2,
        implementations=("eager",),
        reported=with_sink,
    ),
    _decoder("DeepSeek-V2", "DeepseekV2", (10, None), small=_MLA, topk_method="greedy", n_group=..., topk_group=...),
    _decoder("DeepSeek-V3", "DeepseekV3", (10, None), small=_MLA),
    _decoder("Mixtral", "Mixtral", num_local_experts=4),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("OLMoE", "Olmoe", small=_EXPERTS),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("Phi-MoE", "Phimoe", num_local_experts=4),
    _decoder("Cohere", "Cohere"),
    _decoder("StarCoder2", "Starcoder2"),
    _decoder("StableLM", "StableLm"),
    _decoder("Nemotron", "Nemotron"),
    _decoder("Persimmon", "Persimmon"),
    _decoder("Granite", "Granite", (8, 0.125), attention_multiplier=0.125),
    _decoder(
        "GraniteMoE", "GraniteMoe", (8, 0.125), attention_multiplier=0.125, num_local_experts=4, num_experts_per_tok=2
    ),
    _decoder(
        "JetMoE",
        "JetMoe",
        small=_SMALL,
        num_key_value_heads=2,
        kv_channels=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    _decoder("GLM-4", "Glm4", head_dim=8),
    _decoder("SmolLM3", "SmolLM3"),
    _decoder("DiffLlama", "DiffLlama", extra={"*#1@0": "the same scores once more, for the other half of the value"}),
    _decoder(
        "BLOOM",
        "Bloom",
        implementations=("eager",),
        small={"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    _decoder(
        "MPT",
        "Mpt",
        small={"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        implementations=("eager",),
    ),
    _decoder("Falcon", "Falcon", small=_SMALL, num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=40),
    # Its two implementations are not the same: eager adds the bias twice where there is padding.
    _decoder("Falcon, ALiBi", "Falcon", small=_SMALL, alibi=True, ffn_hidden_size=40, implementations=("eager",)),
    _decoder("OPT", "OPT", small={**_SMALL, "ffn_dim": 40, "word_embed_proj_dim": 32}),
    _decoder(
        "XGLM",
        "XGLM",
        small={
            "vocab_size": 99,
            "d_model": 32,
            "ffn_dim": 40,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
        implementations=("eager",),
    ),
    _decoder("BioGPT", "BioGpt", small=_SMALL),
)
