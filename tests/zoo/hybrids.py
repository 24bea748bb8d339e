"""Models in which only some layers have attention, or none."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import Entry, Shape, tokens, transformers

_SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2}


def _hybrid(name: str, family: str, shape: Shape = (8, None), *, head: str = "ForCausalLM", **more: Any) -> Entry:
    own = {key: more.pop(key) for key in tuple(more) if key in Entry.__dataclass_fields__}
    settings = {key: value for key, value in {**more.pop("small", _SMALL), **more}.items() if value is not ...}
    return Entry(
        name,
        transformers(f"{family}Config", f"{family}{head}", settings=settings),
        own.pop("inputs", tokens()),
        shapes={"*": shape},
        **own,
    )


_EAGER: dict[str, Any] = {"implementations": ("eager",)}

HYBRIDS = (
    _hybrid(
        "Jamba",
        "Jamba",
        small={**_SMALL, **_MAMBA},
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts_per_tok=2,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    ),
    _hybrid(
        "Bamba",
        "Bamba",
        small={**_SMALL, **_MAMBA},
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    _hybrid(
        "Zamba 2",
        "Zamba2",
        (16, 8**-0.5),
        small={**_SMALL, **_MAMBA},
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        mamba_headdim=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=4,
        num_key_value_heads=4,
        adapter_rank=4,
        num_mem_blocks=1,
        use_shared_attention_adapter=False,
    ),
    _hybrid(
        "Granite-MoE hybrid",
        "GraniteMoeHybrid",
        (8, 1.0),
        small={**_SMALL, **_MAMBA},
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_chunk_size=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    _hybrid(
        "Nemotron-H",
        "NemotronH",
        small=_SMALL,
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=4,
        head_dim=8,
        num_hidden_layers=...,
    ),
    _hybrid(
        "Falcon-H1",
        "FalconH1",
        small={**_SMALL, **_MAMBA},
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_ssm=64,
        mamba_chunk_size=4,
        mamba_n_groups=1,
    ),
    _hybrid(
        "RecurrentGemma",
        "RecurrentGemma",
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=4,
        implementations=("sdpa",),
        inputs=tokens(padding=0),
        extra={"*.temporal_block*": "reports no attention"},
    ),
    _hybrid("LFM2", "Lfm2", layer_types=["conv", "full_attention"], full_attn_idxs=...),
    _hybrid(
        "Qwen3-Next",
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    _hybrid(
        "MiniMax",
        "MiniMax",
        layer_types=["linear_attention", "full_attention"],
        block_size=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        unseen=("linear or additive attention",),
        note="reports a linear attention too",
    ),
    _hybrid(
        "Mamba",
        "Mamba",
        small={"vocab_size": 99, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_mambapy": False},
        inputs=tokens(padding=0),
        note="no attention",
        reported=None,
        **_EAGER,
    ),
    _hybrid(
        "Mamba 2",
        "Mamba2",
        small={
            "vocab_size": 99,
            "hidden_size": 32,
            "state_size": 4,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        inputs=tokens(padding=0),
        note="no attention",
        reported=None,
        **_EAGER,
    ),
    _hybrid(
        "RWKV",
        "Rwkv",
        small={"vocab_size": 99, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
        inputs=tokens(padding=0),
        told=True,
        note="a recurrence, no softmax",
        reported=None,
        **_EAGER,
    ),
)
