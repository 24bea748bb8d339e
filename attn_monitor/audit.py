"""What is wrong with attention as a whole, said once: a scale that is off, and attention that attends to nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from attn_monitor.diagnosis import SAFE_SCALE, scale_slip
from attn_monitor.phrases import some
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule, matches

_EXACT = 0.03
"""How far a size may be off that a normalisation has set."""
_APART = 1.5
"""By what the sizes of queries and keys differ where one of them has the scale in it."""
_MADE_UP = 2.0
"""The largest spread of the products, were queries and keys independent, at which the scale is in one of them."""
_UNKNOWN = f"outside of {SAFE_SCALE[0]} to {SAFE_SCALE[1]}, where it is known to be harmless"
UNIFORM = 0.995
"""Heads whose `entropy_normalized` is above this attend to everything alike, as all do at first."""
_OBSERVATIONS = 20
_STEPS = 500
_LISTED = 4
_LISTED_NAMES = 20


def scale_findings(statistics: Mapping[str, AttentionStatistics], rule: SaturationRule) -> list[str]:
    """Return what is to be said of the scales in the first record of a run, one text for each kind of scale.

    A `scale_ratio` outside 0.8 to 1.2 is told with what it most likely is. Of designs that leave the scale out on
    purpose (cosine attention, QK-norm, T5) nothing is said while their logits are healthy.
    """
    found: dict[tuple[int, str], list[tuple[float, str]]] = {}
    for layer, stats in statistics.items():
        ratio = _common(stats.scale_ratio)
        if ratio is None or stats.head_dim is None or SAFE_SCALE[0] <= round(abs(ratio), 4) <= SAFE_SCALE[1]:
            continue
        if _meant(stats, rule.of(layer)):
            continue
        meaning = scale_slip(ratio, stats.head_dim, stats.heads) or _UNKNOWN
        found.setdefault((stats.head_dim, meaning), []).append((abs(ratio), layer))
    return [
        f"scale audit: scale * sqrt(d_k={head_dim}) is {_span([ratio for ratio, _ in places])}, {meaning}, "
        f"in {some([layer for _, layer in places], _LISTED, 'layer')}"
        for (head_dim, meaning), places in found.items()
    ]


def override_findings(layers: Sequence[str], rule: SaturationRule) -> list[str]:
    """Return what is to be said of the rule's overrides for the layers of the first record: which fit none."""
    idle = [pattern for pattern in rule.overrides if not any(matches(pattern, layer) for layer in layers)]
    if not idle:
        return []
    return [
        f"saturation overrides without effect: {', '.join(map(repr, idle))} {'fits' if len(idle) == 1 else 'fit'} no "
        f"layer; the layers are {some(layers, _LISTED_NAMES)}"
    ]


class UniformWatch:
    """Tells once when every head of a model has attended to everything alike for a long time."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def update(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> list[str]:
        """Take in one observation and return what is to be said."""
        memory = self._memory
        heads = [entropy for stats in statistics.values() for entropy in _finite(stats.entropy_normalized)]
        if not heads:
            return []
        if min(heads) <= UNIFORM:
            memory.count, memory.since = 0, step
            return []
        if memory.count == 0:
            memory.since = step
        memory.count += 1
        if memory.told or memory.count < _OBSERVATIONS or step - memory.since < _STEPS:
            return []
        memory.told = True
        return [
            f"step {step}: attention is uniform, all {len(heads)} heads have attended to every key alike since step "
            f"{memory.since} (entropy_normalized {min(heads):.4f} or more); what helps: a larger scale, larger initial "
            "W_q and W_k, or a higher learning rate"
        ]

    def forget(self) -> None:
        """Start afresh."""
        self._memory = _Memory()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain Python values."""
        return asdict(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory."""
        self._memory = _Memory(**state)


@dataclass(slots=True)
class _Memory:
    """Since when attention has been uniform."""

    count: int = 0
    since: int = 0
    told: bool = False


def _meant(stats: AttentionStatistics, rule: SaturationRule) -> bool:
    """Tell whether the scale of a layer with healthy logits is what its design wants.

    Cosine attention and QK-norm leave vectors of one known length, to a few per cent. T5 has the scale in the initial
    W_q, so that queries are much smaller than keys, and stay so. A scale that was forgotten leaves both alike.
    """
    ratios, query, key = _finite(rule.ratio(stats)), _common(stats.q_rms), _common(stats.k_rms)
    if stats.head_dim is None or not ratios or max(ratios) > rule.limit(stats):
        return False
    if query is None or key is None:
        return False
    unit, shared = stats.head_dim**-0.5, stats.head_dim**-0.25
    normalised = _is(query, unit) or _is(key, unit) or (_is(query, shared) and _is(key, shared))
    product = query * key / unit  # what the missing factor is made up for by
    apart = max(query, key) >= _APART * min(query, key)
    return normalised or (_common(stats.scale) == 1 and apart and product <= _MADE_UP)


def _is(size: float, wanted: float) -> bool:
    return abs(size / wanted - 1) < _EXACT


def _span(ratios: Sequence[float]) -> str:
    """Return the ratios of layers that share a text, which a learned scale makes differ."""
    lowest, highest = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _common(values: Tensor | None) -> float | None:
    """Return the median over heads, `None` where nothing was measured."""
    found = sorted(_finite(values))
    return found[len(found) // 2] if found else None


def _finite(values: Tensor | None) -> list[float]:
    numbers: list[float] = [] if values is None else values.tolist()
    return [number for number in numbers if math.isfinite(number)]
