"""An independent reference: float64, everything materialised, row by row, gradients by autograd.

Written from the definitions and sharing no code with the package; slow on purpose. Axes: B batch, H query heads, G key
heads, Q queries, K keys, D head dimension, V value dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_monitor.records import AttentionStatistics

PROBABILITIES = (
    "entropy",
    "entropy_normalized",
    "max_probability",
    "sink_mass",
    "jacobian_trace",
    "jacobian_norm",
)
UNIT_RANGE = frozenset(PROBABILITIES) - {"entropy"}


@dataclass
class Head:
    """What is gathered of one head, row by row."""

    logits: list[Tensor] = field(default_factory=list)
    row_variance: list[Tensor] = field(default_factory=list)
    critical: list[Tensor] = field(default_factory=list)
    probabilities: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in PROBABILITIES})
    rows: int = 0
    masked_rows: int = 0
    nonfinite: int = 0


def dense_logits(
    query: Tensor,
    key: Tensor,
    *,
    masks: Sequence[Tensor] = (),
    is_causal: bool = False,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale * q.k, the logits, and which entries are allowed, each [B, H, Q, K] in float64 or bool."""
    query, key = query.double(), key.double()
    key = torch.stack([key[:, h // (query.shape[1] // key.shape[1])] for h in range(query.shape[1])], dim=1)
    product = torch.einsum("bhqd,bhkd->bhqk", query, key) * _scales(scale, query.shape[1])[:, None, None]
    logits = product if softcap is None else softcap * torch.tanh(product / softcap)
    allowed = torch.ones_like(logits, dtype=torch.bool)
    for mask in masks:
        if mask.dtype == torch.bool:
            allowed = allowed & mask
        else:
            logits = logits + mask.double()
            allowed = allowed & (mask > -9000)
    if is_causal:
        allowed = allowed & torch.ones_like(allowed).tril()
    return product, logits, allowed


def _scales(scale: float | Tensor, heads: int) -> Tensor:
    given = scale.double() if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
    return given.expand(heads)


def softmax_reference(logits: Tensor, allowed: Tensor, sinks: Tensor | None = None) -> dict[str, Tensor]:
    """Return the statistics of [B, H, Q, K] logits, one value per head, nan where no row qualifies."""
    allowed = allowed.expand(logits.shape)
    heads = [
        _head(logits[:, h].double(), allowed, h, None if sinks is None else sinks[h]) for h in range(logits.shape[1])
    ]
    return {name: torch.stack([values[name] for values in heads]) for name in heads[0]}


def _head(logits: Tensor, allowed: Tensor, head: int, sink: Tensor | None) -> dict[str, Tensor]:
    gathered = Head()
    for b in range(logits.shape[0]):
        columns = allowed[b].any(0).any(0).nonzero()
        first = int(columns[0]) if len(columns) else -1
        for q in range(logits.shape[1]):
            _row(gathered, logits[b, q], allowed[b, head, q], first, sink)
    return _reduce(gathered)


def _row(head: Head, row: Tensor, allowed: Tensor, first: int, sink: Tensor | None) -> None:
    keys = allowed.nonzero()[:, 0].tolist()
    if not keys:
        head.masked_rows += 1
        return
    head.rows += 1
    values = row[keys]
    finite = values[values.isfinite()]
    head.nonfinite += len(values) - len(finite)
    head.logits.append(finite)
    if len(finite) >= 2:
        variance = finite.var(correction=0)
        head.row_variance.append(variance)
        head.critical.append(variance / (2 * math.log(len(finite))))
    outcomes = values if sink is None else torch.cat([values, sink.double()[None]])
    n = len(outcomes)
    if len(finite) != len(values) or n < 2:
        return
    p = outcomes.softmax(0)
    jacobian = torch.diag(p) - torch.outer(p, p)
    entropy = -torch.special.xlogy(p, p).sum()
    mass = p[keys.index(first)] if first in keys else torch.zeros((), dtype=torch.float64)
    if sink is not None:
        mass = mass + p[-1]
    found = {
        "entropy": entropy,
        "entropy_normalized": entropy / math.log(n),
        "max_probability": p[: len(keys)].max(),
        "sink_mass": mass,
        "jacobian_trace": jacobian.trace() / (1 - 1 / n),
        "jacobian_norm": jacobian.norm(),
    }
    for name, value in found.items():
        head.probabilities[name].append(value)


def _reduce(head: Head) -> dict[str, Tensor]:
    pooled = torch.cat(head.logits) if head.logits else torch.empty(0, dtype=torch.float64)
    nan = torch.tensor(math.nan, dtype=torch.float64)

    def mean(values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean() if values else nan

    return {
        "logit_mean": pooled.mean() if len(pooled) else nan,
        "logit_std": pooled.std(correction=0) if len(pooled) else nan,
        "logit_max": pooled.max() if len(pooled) else nan,
        "logit_min": pooled.min() if len(pooled) else nan,
        "logit_row_std": mean(head.row_variance).sqrt(),
        "critical_ratio": mean(head.critical).sqrt(),
        **{name: mean(values) for name, values in head.probabilities.items()},
        "rows": torch.tensor(float(head.rows), dtype=torch.float64),
        "masked_rows": torch.tensor(float(head.masked_rows), dtype=torch.float64),
        "nonfinite": torch.tensor(float(head.nonfinite), dtype=torch.float64),
    }


def factor_reference(
    query: Tensor, key: Tensor, product: Tensor, allowed: Tensor, scale: float | Tensor = 1.0
) -> dict[str, Tensor]:
    """Return q_rms, k_rms, qk_std and alignment, one value per head; vectors with a nan or inf do not count."""
    heads, groups, dim = query.shape[1], key.shape[1], query.shape[3]
    rows: dict[str, list[Tensor]] = {"q_rms": [], "k_rms": [], "qk_std": []}
    for h in range(heads):
        seen = query[:, h].double()[allowed[:, h].any(2)]
        met = key[:, h // (heads // groups)].double()[allowed[:, h].any(1)]
        products = product[:, h][allowed[:, h]]
        products = products[products.isfinite()]
        rows["q_rms"].append(seen[seen.isfinite().all(-1)].square().mean().sqrt())
        rows["k_rms"].append(met[met.isfinite().all(-1)].square().mean().sqrt())
        rows["qk_std"].append(products.std(correction=0) if len(products) else products.new_tensor(math.nan))
    found = {name: torch.stack(values) for name, values in rows.items()}
    found["alignment"] = found["qk_std"] / (
        _scales(scale, heads).abs() * math.sqrt(dim) * found["q_rms"] * found["k_rms"]
    )
    return found


def attention_reference(
    query: Tensor,
    key: Tensor,
    *,
    masks: Sequence[Tensor] = (),
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return every forward statistic of an attention, one value per head."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    product, logits, allowed = dense_logits(query, key, masks=masks, is_causal=is_causal, scale=scale, softcap=softcap)
    return {**softmax_reference(logits, allowed, sinks), **factor_reference(query, key, product, allowed, scale)}


def gradient_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    masks: Sequence[Tensor] = (),
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the norms of the gradients at the logits and at the probabilities, by autograd, and the raw gradients."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _, logits, allowed = dense_logits(query, key, masks=masks, is_causal=is_causal, scale=scale, softcap=softcap)
    logits = logits.masked_fill(~allowed, -math.inf).detach().requires_grad_()
    outcomes = logits
    if sinks is not None:
        outcomes = torch.cat([logits, sinks.double()[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    probs = outcomes.softmax(-1)[..., : logits.shape[-1]]
    probs.retain_grad()
    values = value.double().repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    output = torch.einsum("bhqk,bhkv->bhqv", probs, values)
    output.backward(grad_output.double())
    assert logits.grad is not None, "the output depends on the logits"
    assert probs.grad is not None, "the output depends on the probabilities"
    kept = allowed & (allowed.sum(-1, keepdim=True) >= 2)
    logits_norm, probs_norm = (
        torch.where(kept, grad, 0).square().sum((0, 2, 3)).sqrt() for grad in (logits.grad, probs.grad)
    )
    return {
        "grad_logits_norm": logits_norm,
        "grad_probs_norm": probs_norm,
        "gradient_gain": logits_norm / probs_norm,
        "grad_logits": logits.grad,
        "grad_probs": probs.grad,
    }


def assert_matches(
    stats: AttentionStatistics,
    expected: Mapping[str, Tensor],
    *,
    relative: float = 1e-5,
    absolute: float = 1e-6,
    names: Sequence[str] | None = None,
) -> None:
    """Compare statistics with the reference: relative, or absolute for what lies in 0..1 and for means near 0."""
    for name in names or expected:
        value, wanted = getattr(stats, name), expected[name]
        if bool(wanted.isnan().all()):
            assert value is None, f"{name}: expected None for want of rows, got {value}"
            continue
        assert value is not None, f"{name} was not measured, expected {wanted}"
        floor = absolute if name in UNIT_RANGE else 0.0
        if name == "logit_mean":
            floor = relative * float(expected["logit_std"].nan_to_num().max())
        if name == "entropy":
            floor = absolute
        close = torch.isclose(value.double(), wanted, rtol=relative, atol=floor, equal_nan=True)
        assert bool(close.all()), f"{name}: expected {wanted.tolist()}, got {value.tolist()}"


def assert_same(found: AttentionStatistics, wanted: AttentionStatistics, *, relative: float = 1e-5) -> None:
    """Compare two records that must hold the same statistics with the same values."""
    names = wanted.measured().keys()
    assert found.measured().keys() == names
    for name in names:
        value, expected = found.measured()[name], wanted.measured()[name]
        close = torch.isclose(value, expected, rtol=relative, atol=1e-7, equal_nan=True)
        assert bool(close.all()), f"{name}: expected {expected.tolist()}, got {value.tolist()}"
