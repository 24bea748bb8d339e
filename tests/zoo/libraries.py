"""Models of other libraries: x-transformers, vit-pytorch, LitGPT."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import BATCH, VOCABULARY, Entry, Shape, images
from tests.zoo.truth import all_softmaxes


def installed(name: str) -> bool:
    """Tell whether a library is there, without importing it."""
    return importlib.util.find_spec(name) is not None


def submodule(library: str, name: str) -> Any:
    """Import one module of a library, not what the library imports on the way (here: torchvision)."""
    if library not in sys.modules:
        spec = importlib.util.find_spec(library)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(library)
        bare = ModuleType(library)
        bare.__spec__ = spec
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules[library] = bare
    return importlib.import_module(f"{library}.{name}")


def _ids(name: str) -> Any:
    return lambda: {name: torch.randint(VOCABULARY, (BATCH, 9), generator=torch.Generator().manual_seed(2))}


def _x_transformer(
    name: str, shape: Shape = (8, None), *, flash: bool = True, encoder: bool = False, **options: Any
) -> Entry:
    own = {key: options.pop(key) for key in ("unseen", "repeatable", "unfactored", "note") if key in options}

    def build(implementation: str) -> nn.Module:
        library: Any = importlib.import_module("x_transformers")
        kind = library.Encoder if encoder else library.Decoder
        layers = kind(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=implementation == "sdpa", **options)
        model: nn.Module = library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
        return model

    return Entry(
        f"x-transformers, {name}",
        build,
        _ids("x"),
        ("eager", "sdpa") if flash else ("eager",),
        shapes={"*": shape},
        truth=all_softmaxes,
        library="x_transformers",
        **own,
    )


def _vit(name: str, module: str, shape: Shape = (8, None), **settings: Any) -> Entry:
    own = {key: settings.pop(key) for key in ("unfactored",) if key in settings}

    def build(implementation: str) -> nn.Module:
        model: nn.Module = getattr(submodule("vit_pytorch", module), name.split()[0])(**settings)
        return model

    return Entry(
        f"vit-pytorch, {name}",
        build,
        lambda: {"img": images(32)()["pixel_values"]},
        ("eager",),
        shapes={"*": shape},
        truth=all_softmaxes,
        library="vit_pytorch",
        **own,
    )


def _litgpt(name: str, shape: Shape = (8, None), **settings: Any) -> Entry:
    def build(implementation: str) -> nn.Module:
        library: Any = importlib.import_module("litgpt.model")
        small = {
            "n_layer": 2,
            "n_head": 4,
            "n_embd": 32,
            "vocab_size": VOCABULARY,
            "padded_vocab_size": VOCABULARY,
            "block_size": 16,
        }
        model: nn.Module = library.GPT(library.Config(**{**small, **settings}))
        return model

    return Entry(
        f"LitGPT, {name}", build, _ids("idx"), ("sdpa",), shapes={"*": shape}, truth=all_softmaxes, library="litgpt"
    )


_IMAGE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 40,
}
_WIDE: dict[str, Any] = {**_IMAGE, "dim_head": 8}
_LEARNED: Shape = (8, math.nan)

LIBRARIES = (
    _x_transformer("plain"),
    _x_transformer("rotary", rotary_pos_emb=True),
    _x_transformer("QK-norm", (8, 10.0), attn_qk_norm=True),
    _x_transformer("ALiBi", alibi_pos_bias=True, alibi_num_heads=2),
    _x_transformer("relative position bias", flash=False, rel_pos_bias=True, encoder=True),
    _x_transformer("memory keys", attn_num_mem_kv=3),
    _x_transformer("zero key", attn_add_zero_kv=True),
    _x_transformer(
        "talking heads", flash=False, attn_pre_talking_heads=True, attn_post_talking_heads=True, unfactored=["*"]
    ),
    _x_transformer("grouped queries", attn_kv_heads=2),
    _x_transformer("sparse top-k", flash=False, attn_sparse_topk=3),
    _x_transformer(
        "softcap",
        flash=False,
        attn_softclamp_logits=True,
        attn_logit_softclamp_value=2.0,
        unseen=("compiled by torch.jit",) * 2,
        repeatable=False,
        note="without a probe, too, no two runs are the same to the bit: its softcap is compiled by torch.jit",
    ),
    _vit("ViT", "vit", **_WIDE),
    _vit("SimpleViT", "simple_vit", **_WIDE),
    _vit("DeepViT", "deepvit", **_WIDE),
    _vit("CaiT", "cait", cls_depth=1, unfactored=["*"], **_WIDE),
    _vit("PiT", "pit", **{**_WIDE, "depth": (1, 1), "heads": (4, 4)}),
    _vit("ViT for small data sets", "vit_for_small_dataset", _LEARNED, **_WIDE),
    _vit("SimpleViT with QK-norm", "simple_vit_with_qk_norm", (8, 8.0), **_WIDE),
    _litgpt("multi-head"),
    _litgpt("grouped queries", n_query_groups=2),
    _litgpt(
        "multi-query, RMSNorm, SwiGLU",
        n_query_groups=1,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=40,
    ),
    _litgpt("softcap", attention_logit_softcapping=2.0),
    _litgpt(
        "experts",
        mlp_class_name="LLaMAMoE",
        intermediate_size=40,
        moe_intermediate_size=16,
        n_expert=4,
        n_expert_per_token=2,
    ),
)
