"""One mask in every dialect: however it is written down, every statistic is that of the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, attention_reference, gradient_reference
from tests.spellings import SCALE, Attention, B, D, E, H, T

Dialect: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From query, key and value [B, H, T, D] and what is allowed to the output [B, H, T, D]."""

pytestmark = pytest.mark.slow  # many and quick; tests/spellings.py has a few of them for every run

# -- what may be seen: True is allowed ------------------------------------------------------------------------------

QUERY, KEY = torch.arange(T)[:, None], torch.arange(T)
LENGTHS = torch.tensor([T, T - 3, T, 1, T - 1])[:, None, None, None]
MASKS = {
    "causal, 2-D": QUERY >= KEY,
    "per head, 3-D": (QUERY + KEY + torch.arange(H)[:, None, None]) % 3 > 0,
    "key padding, 4-D": KEY < LENGTHS,
    "left padding": KEY >= T - LENGTHS,
    "per item and query, 4-D": (QUERY >= KEY) & (KEY < LENGTHS),
    "per item, head and query": (QUERY + KEY + torch.arange(B * H).view(B, H, 1, 1)) % 4 > 0,
    "sliding window": (QUERY >= KEY) & (QUERY - KEY < 3),
    "two-sided window": (QUERY - KEY).abs() <= 1,
    "rows without a key": (QUERY >= KEY) & (QUERY % 3 != 1),
    "an item without a key": (KEY < LENGTHS) & (torch.arange(B)[:, None, None, None] != 2),
    "rows with one key": (QUERY == KEY) | (QUERY > 3),
}

# -- ways to write it -----------------------------------------------------------------------------------------------


def finfo_min(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).min


FILLS: dict[str, Callable[[Tensor], float]] = {
    "-inf": lambda _: -math.inf,
    "finfo.min": finfo_min,
    "-1e9": lambda _: -1e9,
    "-1e4": lambda _: -1e4,
}


def additive(like: Tensor, allowed: Tensor, fill: float) -> Tensor:
    return torch.zeros(allowed.shape, dtype=like.dtype).masked_fill(~allowed, fill)


def sdpa_keeps(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def sdpa_adds(fill: Callable[[Tensor], float], q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=additive(q, allowed, fill(q)))


def sdpa_adds_integers(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    keep = allowed.long()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(1.0 - keep.to(q.dtype)) * finfo_min(q))


def sdpa_adds_two(fill: Callable[[Tensor], float], q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    one = additive(q, allowed, fill(q))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=one + one)


def attend(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1).nan_to_num() @ v  # a row of -inf alone is nan, and people replace it


def filled(fill: Callable[[Tensor], float], q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return attend((q @ k.mT * SCALE).masked_fill(~allowed, fill(q)), v)


def filled_where_0(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    keep = allowed.int()
    return attend((q @ k.mT * SCALE).masked_fill(keep == 0, -1e9), v)


def filled_twice(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    odd = torch.arange(T) % 2 == 1
    scores = (q @ k.mT * SCALE).masked_fill(~allowed & odd, finfo_min(q))
    return attend(scores.masked_fill(~allowed & ~odd, -1e4), v)


def added(fill: Callable[[Tensor], float], q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return attend(q @ k.mT * SCALE + additive(q, allowed, fill(q)), v)


def added_two(fill: Callable[[Tensor], float], q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    one = additive(q, allowed, fill(q))
    return attend(q @ k.mT * SCALE + one + one, v)


def added_integers(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return attend(q @ k.mT / math.sqrt(D) + (1 - allowed.to(q.dtype)) * -10000.0, v)


def chosen(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return attend(torch.where(allowed, q @ k.mT * SCALE, finfo_min(q)), v)


def chosen_by_integers(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return attend(torch.where(allowed.int() > 0, q @ k.mT * SCALE, torch.tensor(-math.inf)), v)


def folded(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    mask = additive(q, allowed.expand(B, H, T, T).flatten(0, 1), -1e9)
    return attend(torch.baddbmm(mask, q, k.mT, alpha=SCALE), v).unflatten(0, (B, H))


DIALECTS: dict[str, Dialect] = {
    "SDPA, True keeps": sdpa_keeps,
    **{f"SDPA, {name} added": partial(sdpa_adds, fill) for name, fill in FILLS.items()},
    **{f"SDPA, two of {name}": partial(sdpa_adds_two, fill) for name, fill in FILLS.items()},
    "SDPA, from 0 and 1": sdpa_adds_integers,
    **{f"True blocks, filled with {name}": partial(filled, fill) for name, fill in FILLS.items()},
    "filled where 0": filled_where_0,
    "filled twice": filled_twice,
    **{f"{name} added": partial(added, fill) for name, fill in FILLS.items()},
    **{f"two of {name} added": partial(added_two, fill) for name, fill in FILLS.items()},
    "from 0 and 1 by -10000": added_integers,
    "where": chosen,
    "where of 0 and 1": chosen_by_integers,
    "baddbmm": folded,
}

# -- what it must give ----------------------------------------------------------------------------------------------


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, T, E)


def measure(model: nn.Module, direction: Tensor, *inputs: Any, **options: Any) -> AttentionStatistics:
    """Watch a model whose loss is linear, so that masked rows without a value do no harm to the gradients of others."""
    with AttentionProbe(model) as probe:
        out = model(*inputs, **options)
        (out[0] if isinstance(out, tuple) else out).backward(direction)
    assert probe.skipped == {}
    assert probe.notes == {}
    (stats,) = probe.compute().values()
    return stats


_KNOWN: dict[tuple[bytes, ...], dict[str, Tensor]] = {}


def reference(q: Tensor, k: Tensor, allowed: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return `attention_reference`, which goes from row to row: once for the same numbers in all dialects."""
    key = tuple(part.double().numpy().tobytes() for part in (q, k, allowed, *options.values()))
    if key not in _KNOWN:
        _KNOWN[key] = attention_reference(q, k, masks=[allowed], **options)
    return _KNOWN[key]


def expected(
    attention: Attention, x: Tensor, direction: Tensor, allowed: Tensor, **options: Any
) -> dict[str, dict[str, Tensor]]:
    """Return the reference's statistics and those of the gradients."""
    q, k, v = (part.detach() for part in attention.heads(x))
    gradient = (direction @ attention.out.weight.detach()).unflatten(-1, (H, D)).transpose(1, 2)
    gradients = gradient_reference(q, k, v, gradient, masks=[allowed], **options)
    names = ("grad_logits_norm", "grad_probs_norm", "gradient_gain")
    return {
        "forward": reference(q, k, allowed, **options),
        "backward": {name: gradients[name] for name in names},
    }


def assert_all(stats: AttentionStatistics, wanted: dict[str, dict[str, Tensor]]) -> None:
    assert_matches(stats, wanted["forward"])
    assert_matches(stats, wanted["backward"], relative=2e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_gives_the_numbers_of_the_reference(dialect: str, mask: str, x: Tensor) -> None:
    allowed, direction = MASKS[mask], torch.randn(B, T, E)
    attention = Attention(lambda q, k, v: DIALECTS[dialect](q, k, v, allowed))
    assert_all(measure(attention, direction, x), expected(attention, x, direction, allowed))


def multi_head(attention: Attention, **options: Any) -> nn.MultiheadAttention:
    """Return torch's module with the weights of the hand-written one."""
    module = nn.MultiheadAttention(E, H, batch_first=True, **options)
    own = {"in_proj_weight": attention.qkv.weight, "in_proj_bias": attention.qkv.bias}
    out = {f"out_proj.{name}": parameter for name, parameter in attention.out.named_parameters()}
    module.load_state_dict({**own, **out}, strict=False)
    return module


PADDING = LENGTHS[:, 0, 0] > KEY  # [B, K]
BLOCKING: dict[str, Callable[[Tensor], Tensor]] = {
    "True blocks": lambda allowed: ~allowed,
    **{
        name: partial(lambda fill, allowed: additive(torch.zeros(()), allowed, fill(torch.zeros(()))), fill)
        for name, fill in FILLS.items()
    },
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("blocking", BLOCKING)
@pytest.mark.parametrize("given", ["causal", "padding", "causal and padding", "3-D", "hint"])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
def test_multi_head_attention_blocks_where_sdpa_keeps(given: str, blocking: str, need_weights: bool, x: Tensor) -> None:
    write, direction = BLOCKING[blocking], torch.randn(B, T, E)
    per_head = MASKS["per item, head and query"]
    masks: dict[str, tuple[dict[str, Any], Tensor]] = {
        "causal": ({"attn_mask": write(QUERY >= KEY)}, QUERY >= KEY),
        "padding": ({"key_padding_mask": write(PADDING)}, PADDING[:, None, None]),
        "causal and padding": (
            {"attn_mask": write(QUERY >= KEY), "key_padding_mask": write(PADDING)},
            (QUERY >= KEY) & PADDING[:, None, None],
        ),
        "3-D": ({"attn_mask": write(per_head.flatten(0, 1))}, per_head),
        "hint": ({"attn_mask": write(QUERY >= KEY), "is_causal": True}, QUERY >= KEY),
    }
    arguments, allowed = masks[given]
    attention = Attention(lambda q, k, v: q)
    stats = measure(multi_head(attention), direction, x, x, x, need_weights=need_weights, **arguments)
    assert_all(stats, expected(attention, x, direction, allowed))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_extra_keys_of_multi_head_attention_are_allowed(padded: bool, need_weights: bool, x: Tensor) -> None:
    attention, direction = Attention(lambda q, k, v: q), torch.randn(B, T, E)
    module = multi_head(attention, add_bias_kv=True, add_zero_attn=True)
    mask = {"key_padding_mask": ~PADDING} if padded else {}
    stats = measure(module, direction, x, x, x, need_weights=need_weights, **mask)
    q, k, v = (part.detach() for part in attention.heads(x))
    assert module.bias_k is not None
    assert module.bias_v is not None
    extra = [bias.detach().view(1, H, 1, D).expand(B, -1, -1, -1) for bias in (module.bias_k, module.bias_v)]
    zero = torch.zeros(B, H, 1, D)
    k, v = torch.cat([k, extra[0], zero], 2), torch.cat([v, extra[1], zero], 2)
    allowed = F.pad(PADDING if padded else torch.ones_like(PADDING), (0, 2), value=True)[:, None, None]
    gradient = (direction @ attention.out.weight.detach()).unflatten(-1, (H, D)).transpose(1, 2)
    assert_matches(stats, attention_reference(q, k, masks=[allowed]))
    wanted = gradient_reference(q, k, v, gradient, masks=[allowed])
    assert_matches(stats, wanted, names=("grad_logits_norm", "grad_probs_norm"), relative=2e-5)
    assert stats.keys == T + 2


@pytest.mark.parametrize("mask", ["causal, 2-D", "key padding, 4-D", "sliding window", "rows without a key"])
@pytest.mark.parametrize("fill", FILLS)
def test_a_learned_sink_stands_beside_every_mask(mask: str, fill: str, x: Tensor) -> None:
    allowed, direction, sinks = MASKS[mask], torch.randn(B, T, E), torch.tensor([0.5, -1.0, 2.0])

    def attend_with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * SCALE).masked_fill(~allowed, FILLS[fill](q))
        scores = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, -1, T, -1)], dim=-1)
        return scores.softmax(-1)[..., :-1] @ v

    attention = Attention(attend_with_sink)
    stats = measure(attention, direction, x)
    assert_all(stats, expected(attention, x, direction, allowed, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["causal, 2-D", "per item and query, 4-D", "rows without a key"])
@pytest.mark.parametrize(
    "dialect", [name for name in DIALECTS if "-1e9" not in name and name not in ("filled where 0", "baddbmm")]
)
def test_the_masks_of_every_dtype_block(dialect: str, mask: str, dtype: torch.dtype, x: Tensor) -> None:
    allowed = MASKS[mask]
    attention = Attention(lambda q, k, v: DIALECTS[dialect](q, k, v, allowed).to(dtype)).to(dtype)
    stats = measure(attention, torch.randn(B, T, E, dtype=dtype), x.to(dtype))
    q, k, _ = (part.detach() for part in attention.heads(x.to(dtype)))
    wanted = reference(q, k, allowed)
    for name in ("rows", "masked_rows", "nonfinite"):
        assert torch.equal(getattr(stats, name).double(), wanted[name]), name
    eps = torch.finfo(dtype).eps  # what the softmax receives is rounded to the dtype
    assert_matches(stats, wanted, relative=max(1e-5, 4 * eps), absolute=max(1e-6, 2 * eps))
