"""What the cases about numbers share: logits that are shown, rules that judge, functions that are spied on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, SaturationEvent, SaturationRule
from attn_monitor.events import AttentionWarning
from tests.cases.support import (
    Trained,
    fit,
    serve,
)
from tests.models import quiet

RULE = SaturationRule()


def saturated(stats: Any) -> list[bool]:
    """Return which heads the rule flags."""
    return (RULE.ratio(stats) > RULE.limit(stats)).tolist()


class Shown(nn.Module):
    """Runs a core on what it is given as the only input: query, key and value, stacked."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, qkv: Tensor) -> Tensor:
        return self.core(*(qkv * self.weight).unbind(1))


def events_of(core: nn.Module, qkv: Tensor) -> list[SaturationEvent]:
    """Train one step on query, key and value [3, H, T, D] and return the events."""
    monitor = AttentionMonitor()
    fit(Trained(Shown(core)), monitor, serve(qkv[None]))
    return monitor.events


def audit_of(net: nn.Module, data: Tensor) -> list[str]:
    """Train one step on the data as the only batch and return what the audit of the scales warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AttentionWarning)
        quiet(callbacks=[AttentionMonitor()]).fit(Trained(net, lr=0.0), serve(data, len(data)))
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]
    return [text[text.index("scale audit") :] for text in texts if "scale audit" in text]


def spy_on(patch: pytest.MonkeyPatch, modeling: Any) -> list[dict[str, Any]]:
    """Record the arguments of each eager attention of a transformers model."""
    original = modeling.eager_attention_forward
    seen: list[dict[str, Any]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        seen.append({"query": query.detach(), "key": key.detach(), "mask": attention_mask, **kwargs})
        return original(module, query, key, value, attention_mask, **kwargs)

    patch.setattr(modeling, "eager_attention_forward", spy)
    return seen
