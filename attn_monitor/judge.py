"""All that is made of a record: events, forecasts, and what is said once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attn_monitor.audit import UniformWatch, override_findings, scale_findings
from attn_monitor.catalog import FACTORS
from attn_monitor.forecast import Forecast, Forecaster
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import Changes, SaturationTracker

EVIDENCE = frozenset(
    {"logit_std", "logit_row_std", "logit_max", "entropy_normalized", "jacobian_trace", "sink_mass", *FACTORS}
)
"""What a judge looks at beside what its rule requires."""
NEAR = 0.8
"""A head above this fraction of its limit is near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one record means.

    Attributes:
        changes: The events that opened, became critical or ended.
        findings: What is to be said about the model as a whole.
        forecasts: Heads on their way to their limits, the soonest first; each head once.
        near: Whether a head is near its limit or above it.
        broken: Whether a head has logits that are nan or inf.
    """

    changes: Changes = field(default_factory=Changes)
    findings: list[str] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    near: bool = False
    broken: bool = False


class Judge:
    """Judges record after record of one training.

    Args:
        rule: When a head is saturated.

    Attributes:
        tracker: The events, and the memory of each head.
    """

    def __init__(self, rule: SaturationRule) -> None:
        self.rule = rule
        self.tracker = SaturationTracker(rule)
        self._forecaster = Forecaster(rule)
        self._uniform = UniformWatch()
        self._audited: set[str] = set()

    def take(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> Judgement:
        """Take in one record."""
        new = {layer: stats for layer, stats in statistics.items() if layer not in self._audited}
        overrides = [] if self._audited else override_findings(list(new), self.rule) if new else []
        self._audited.update(new)
        changes = self.tracker.update(step, statistics)
        foretold = self._forecaster.update(step, statistics)
        return Judgement(
            changes=changes,
            findings=[*overrides, *scale_findings(new, self.rule), *self._uniform.update(step, statistics)],
            forecasts=[self._advised(forecast, statistics[forecast.layer]) for forecast in foretold],
            near=self.is_near(statistics),
            broken=any(bool(stats.nonfinite.any()) for stats in statistics.values()),
        )

    def is_near(self, statistics: Mapping[str, AttentionStatistics]) -> bool:
        """Tell whether a head is near its limit or above it."""
        rules = {layer: self.rule.of(layer) for layer in statistics}
        return any(
            bool((rules[layer].ratio(stats) > NEAR * rules[layer].limit(stats)).any())
            for layer, stats in statistics.items()
        )

    def _advised(self, forecast: Forecast, stats: AttentionStatistics) -> Forecast:
        """Return a forecast with the remedy for its head, which is the scale only where the audit finds it wrong."""
        meant = not scale_findings({forecast.layer: stats}, self.rule)
        remedy = self.tracker.remedy(forecast.layer, forecast.head, stats, scale_meant=meant)
        return replace(forecast, remedy=remedy) if remedy else forecast

    def forget(self, layers: Iterable[str] | None = None) -> None:
        """Drop the memory of some layers, of all for `None`; the list of events stays."""
        gone = None if layers is None else list(layers)
        self.tracker.forget(gone)
        self._forecaster.forget(gone)
        if gone is None:
            self._uniform.forget()
            self._audited.clear()
        else:
            self._audited.difference_update(gone)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain Python values."""
        return {
            **self.tracker.state_dict(),
            "forecast": self._forecaster.state_dict(),
            "uniform": self._uniform.state_dict(),
            "audited": sorted(self._audited),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory.

        Raises:
            ValueError: If the state is of another version; the memory is left as it was.
        """
        fresh = Judge(self.rule)
        fresh.tracker.load_state_dict(state)
        fresh._forecaster.load_state_dict(state["forecast"])
        fresh._uniform.load_state_dict(state["uniform"])
        fresh._audited = set(state["audited"])
        vars(self).update(vars(fresh))
