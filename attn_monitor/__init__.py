"""See attention saturate before the training run does: per-head diagnostics for torch and Lightning.

The names are imported on first use, so that `import attn_monitor` costs nothing and needs neither torch nor Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_monitor.callback import AttentionMonitor as AttentionMonitor
    from attn_monitor.capture.observe import observe_attention as observe_attention
    from attn_monitor.capture.observe import observe_logits as observe_logits
    from attn_monitor.events import AttentionSaturationError as AttentionSaturationError
    from attn_monitor.events import AttentionWarning as AttentionWarning
    from attn_monitor.events import SaturationEvent as SaturationEvent
    from attn_monitor.inspection import InspectedAttention as InspectedAttention
    from attn_monitor.inspection import inspect_attention as inspect_attention
    from attn_monitor.probe import AttentionProbe as AttentionProbe
    from attn_monitor.qk_clip import QKClip as QKClip
    from attn_monitor.ranks import RankError as RankError
    from attn_monitor.ranks import RankReduction as RankReduction
    from attn_monitor.records import AttentionStatistics as AttentionStatistics
    from attn_monitor.saturation import SaturationRule as SaturationRule

__version__ = "0.1.0"

_EXPORTS = {
    "AttentionMonitor": "attn_monitor.callback",
    "AttentionProbe": "attn_monitor.probe",
    "AttentionSaturationError": "attn_monitor.events",
    "AttentionStatistics": "attn_monitor.records",
    "AttentionWarning": "attn_monitor.events",
    "InspectedAttention": "attn_monitor.inspection",
    "QKClip": "attn_monitor.qk_clip",
    "RankError": "attn_monitor.ranks",
    "RankReduction": "attn_monitor.ranks",
    "SaturationEvent": "attn_monitor.events",
    "SaturationRule": "attn_monitor.saturation",
    "inspect_attention": "attn_monitor.inspection",
    "observe_attention": "attn_monitor.capture.observe",
    "observe_logits": "attn_monitor.capture.observe",
}

__all__ = [*_EXPORTS, "__version__"]  # noqa: PLE0604 # the lazy names are the keys of one table


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'attn_monitor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
