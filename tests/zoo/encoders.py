"""Models that encode text."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from tests.zoo.entry import Entry, Shape, noise, tokens, transformers
from tests.zoo.truth import softmaxed

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


def _encoder(name: str, family: str, shape: Shape = (8, None), *, head: str = "Model", **more: Any) -> Entry:
    own = {key: more.pop(key) for key in tuple(more) if key in Entry.__dataclass_fields__}
    small = more.pop("small", _SMALL)
    settings = {key: value for key, value in {**small, **more}.items() if value is not ...}
    return Entry(
        name,
        transformers(f"{family}Config", f"{family}{head}", settings=settings),
        own.pop("inputs", tokens()),
        shapes=own.pop("shapes", {"*": shape}),
        **own,
    )


_EAGER: dict[str, Any] = {"implementations": ("eager",)}


def _reformer(implementation: str) -> nn.Module:
    build = transformers(
        "ReformerConfig",
        "ReformerModel",
        settings={
            "vocab_size": 99,
            "hidden_size": 32,
            "attention_head_size": 8,
            "num_attention_heads": 4,
            "feed_forward_size": 40,
            "attn_layers": ["lsh", "local"],
            "num_buckets": 2,
            "lsh_attn_chunk_length": 4,
            "local_attn_chunk_length": 4,
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [16, 16],
            "max_position_embeddings": 16,
            "is_decoder": False,
            "hash_seed": 0,
        },
    )
    model: Any = build(implementation)
    for layer in model.encoder.layers:  # seeds itself from the system otherwise
        layer._init_attention_seed = partial(setattr, layer, "attention_seed", 0)
        layer._init_feed_forward_seed = partial(setattr, layer, "feed_forward_seed", 0)
    return cast(nn.Module, model)


ENCODERS = (
    _encoder("BERT", "Bert"),
    _encoder("RoBERTa", "Roberta"),
    _encoder(
        "DistilBERT", "DistilBert", small={"vocab_size": 99, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}
    ),
    _encoder("ELECTRA", "Electra", embedding_size=16),
    _encoder("ALBERT", "Albert", embedding_size=16),
    _encoder("ALBERT, two groups", "Albert", embedding_size=16, num_hidden_groups=2),
    _encoder("MobileBERT", "MobileBert", gain=0.7, embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32),
    _encoder("ModernBERT", "ModernBert", inputs=tokens(padding=2), local_attention=4, global_attn_every_n_layers=2),
    _encoder("DeBERTa", "Deberta", (8, 24**-0.5), relative_attention=True, pos_att_type=["c2p", "p2c"], **_EAGER),
    _encoder("DeBERTa-v2", "DebertaV2", (8, 24**-0.5), relative_attention=True, pos_att_type=["c2p", "p2c"], **_EAGER),
    _encoder(
        "XLNet", "XLNet", small={"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40}, **_EAGER
    ),
    _encoder("XLM", "XLM", small={"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4}, **_EAGER),
    _encoder(
        "Funnel",
        "Funnel",
        small={
            "vocab_size": 99,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 40,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
        **_EAGER,
    ),
    _encoder(
        "Longformer",
        "Longformer",
        unfactored=["*"],
        pieces=2,
        attention_window=4,
        inputs=tokens(12, padding=0),
        **_EAGER,
    ),
    _encoder("BigBird, full", "BigBird", attention_type="original_full", **_EAGER),
    _encoder(
        "BigBird, block-sparse",
        "BigBird",
        unfactored=["*#*"],
        pieces=2,
        attention_type="block_sparse",
        block_size=2,
        num_random_blocks=1,
        inputs=tokens(24, padding=0),
        **_EAGER,
    ),
    _encoder("ConvBERT", "ConvBert", embedding_size=32, **_EAGER),
    _encoder("SqueezeBERT", "SqueezeBert", embedding_size=32, reported=softmaxed, **_EAGER),
    _encoder("MPNet", "MPNet", **_EAGER),
    _encoder("Nystromformer", "Nystromformer", num_landmarks=8, segment_means_seq_len=8, inputs=tokens(8), **_EAGER),
    _encoder("YOSO", "Yoso", reported=None, told=True, note="powers of angles, no softmax", **_EAGER),
    Entry("Reformer", _reformer, tokens(16), **_EAGER, unseen=("exp and sum by hand",) * 2),
    _encoder("FNet", "FNet", note="no attention", inputs=lambda: {"input_ids": tokens()()["input_ids"]}, **_EAGER),
    _encoder("CANINE", "Canine", num_hash_buckets=32, local_transformer_stride=4, inputs=tokens(16), **_EAGER),
    _encoder("RoFormer", "RoFormer", **_EAGER),
    _encoder("ESM", "Esm", emb_layer_norm_before=True, token_dropout=False, mask_token_id=3),
    _encoder("Megatron-BERT", "MegatronBert", **_EAGER),
    _encoder("RemBERT", "RemBert", input_embedding_size=16, output_embedding_size=16, **_EAGER),
    _encoder("I-BERT", "IBert", **_EAGER),
    _encoder("LayoutLM", "LayoutLM"),
    _encoder("Splinter", "Splinter", **_EAGER),
    _encoder("ERNIE", "Ernie"),
    _encoder("Data2Vec text", "Data2VecText"),
    _encoder(
        "LUKE",
        "Luke",
        unfactored=["*"],
        entity_vocab_size=10,
        entity_emb_size=16,
        use_entity_aware_attention=True,
        inputs=tokens(
            entity_ids=lambda: torch.tensor([[1, 2], [3, 4]]),
            entity_position_ids=lambda: torch.tensor([[[1, 2], [3, -1]], [[1, -1], [2, 3]]]),
            entity_attention_mask=lambda: torch.ones(2, 2, dtype=torch.long),
        ),
        **_EAGER,
    ),
    _encoder("TAPAS", "Tapas", **_EAGER),
    _encoder("MRA", "Mra", told=True, note="an approximation without a softmax", **_EAGER),
    _encoder(
        "Perceiver",
        "Perceiver",
        small={
            "d_latents": 16,
            "d_model": 24,
            "num_latents": 5,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 2,
            "qk_channels": None,
        },
        shapes={"*cross_attention*": (12, None), "*self_attends*": (4, None)},
        inputs=noise("inputs", (2, 9, 24)),
        **_EAGER,
    ),
)
