"""A small model of transformers, the same for everybody."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=29,
    hidden_size=24,
    intermediate_size=17,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=32,
)
LAYERS = [f"model.layers.{number}.self_attn" for number in range(2)]


def language_model(gain: float = 1.0) -> LlamaForCausalLM:
    """Return a new model, whose queries are that much larger than they would be."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(copy.deepcopy(CONFIG))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= gain
    return model
