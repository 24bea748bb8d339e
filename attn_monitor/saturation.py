"""The rule: when a head counts as saturated.

Everything here is plain Python over records; it knows neither modules nor Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor

from attn_monitor.records import AttentionStatistics

RuleStatistic = Literal["logit_row_std", "logit_std"]
Reference = Literal["sqrt_dk", "critical"]

_DEFAULT_THRESHOLD: Mapping[Reference, float] = {"sqrt_dk": 0.5, "critical": 1.0}


@dataclass(frozen=True, kw_only=True, repr=False)  # no slots: LightningCLI reads vars() of a default
class SaturationRule:
    """When a head counts as saturated: its logits spread too far for its softmax to pass gradients.

    A head is saturated when `ratio > limit`. With `relative_to="sqrt_dk"` the ratio is `statistic / sqrt(d_k)` of the
    logits as softmax sees them: 1 is where attention without its scale starts, `1 / sqrt(d_k)` is textbook attention
    at initialisation. With `relative_to="critical"` it is `critical_ratio`, 1 where independent Gaussian logits
    condense onto a few keys; that needs no head dimension, so it also serves, with limit 1, where none is known.

    Args:
        threshold: The limit of the ratio; `None` means 0.5 for `"sqrt_dk"` and 1 for `"critical"`.
        statistic: The spread measured against sqrt(d_k). `relative_to="critical"` does not use it.
        relative_to: What the spread is measured against.
        patience: How many consecutive observations above the limit open an event, and how many of collapsed attention
            make it critical.
        release: An event ends below this fraction of the limit.
        overrides: Other thresholds for some layers, `{pattern: threshold}`: a pattern is the name of a layer or a glob
            over the names, and the first one that matches counts.

    Source: Vaswani et al. 2017, arXiv 1706.03762, for sqrt(d_k); for `critical_ratio` Derrida 1981, Phys. Rev. B 24,
    2613. Where the limits come from is in docs/thresholds.md.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If an argument has the wrong type.

    Example:
        >>> SaturationRule(threshold=0.4, patience=3)
        SaturationRule(threshold=0.4, statistic='logit_row_std', relative_to='sqrt_dk', patience=3, release=0.8)
        >>> SaturationRule(overrides={"decoder.*": 0.8}).of("decoder.layers.0").default_limit
        0.8
    """

    threshold: float | None = None
    statistic: RuleStatistic = "logit_row_std"
    relative_to: Reference = "sqrt_dk"
    patience: int = 1
    release: float = 0.8
    overrides: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.threshold is not None:
            _check_positive("threshold", self.threshold, "a positive finite number or None")
        _check_choice("statistic", self.statistic, get_args(RuleStatistic))
        _check_choice("relative_to", self.relative_to, get_args(Reference))
        if isinstance(self.patience, bool) or not isinstance(self.patience, int):
            raise TypeError(f"`patience` expects a whole number of observations, got {self.patience!r}.")
        if self.patience < 1:
            raise ValueError(f"`patience` expects at least 1 observation, got {self.patience}.")
        _check_number("release", self.release, "a fraction of the threshold")
        if not 0 < self.release <= 1:
            raise ValueError(f"`release` expects a fraction of the threshold in (0, 1], got {self.release!r}.")
        _check_overrides(self.overrides)

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "overrides" or value}
        return f"SaturationRule({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def of(self, layer: str) -> SaturationRule:
        """Return the rule for a layer: this one, or one with the threshold of the first pattern that fits.

        Args:
            layer: The name of the layer.
        """
        for pattern, threshold in self.overrides.items():
            if matches(pattern, layer):
                return _OverriddenRule(**{**vars(self), "threshold": threshold, "overrides": {}})
        return self

    @property
    def requires(self) -> frozenset[str]:
        """The statistics that must be measured for the rule to decide."""
        return frozenset({"critical_ratio" if self.relative_to == "critical" else self.statistic, "critical_ratio"})

    def measure(self, stats: AttentionStatistics) -> str:
        """Return the name of the statistic that decides for this layer.

        Args:
            stats: The record of the layer.
        """
        return "critical_ratio" if self._by_critical(stats) else self.statistic

    def limit(self, stats: AttentionStatistics) -> float:
        """Return the limit of the ratio that applies to this layer.

        Args:
            stats: The record of the layer.
        """
        if self.relative_to == "sqrt_dk" and self._by_critical(stats):
            return _DEFAULT_THRESHOLD["critical"]  # `threshold` was meant for the other ratio
        return self.default_limit

    @property
    def default_limit(self) -> float:
        """The limit of the ratio of every layer whose head dimension is known."""
        return _DEFAULT_THRESHOLD[self.relative_to] if self.threshold is None else float(self.threshold)

    def ratio(self, stats: AttentionStatistics) -> Tensor:
        """Return the saturation ratio of every head, [H], nan where it was not measured.

        Args:
            stats: The record of the layer.
        """
        spread: Tensor | None = getattr(stats, self.measure(stats))
        if spread is None:
            return torch.full((stats.heads,), math.nan, device="cpu")
        if self._by_critical(stats):
            return spread.clone()
        assert stats.head_dim is not None, "a layer without head dimension is judged by critical_ratio"
        return spread / math.sqrt(stats.head_dim)

    def _by_critical(self, stats: AttentionStatistics) -> bool:
        return self.relative_to == "critical" or stats.head_dim is None


class _OverriddenRule(SaturationRule):
    """A rule whose threshold was given for the layer itself, whatever decides for it."""

    def limit(self, stats: AttentionStatistics) -> float:
        return self.default_limit


def matches(pattern: str, layer: str) -> bool:
    """Tell whether a name or glob fits the name of a layer."""
    return layer == pattern or fnmatchcase(layer, pattern)


def _check_number(name: str, value: object, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` expects {expected}, got {value!r}.")


def _check_positive(name: str, value: float, expected: str) -> None:
    _check_number(name, value, expected)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` expects {expected}, got {value!r}.")


def _check_overrides(overrides: object) -> None:
    if not isinstance(overrides, Mapping):
        raise TypeError(f"`overrides` expects a mapping {{pattern: threshold}}, got {overrides!r}.")
    for pattern, threshold in overrides.items():
        if not isinstance(pattern, str):
            raise TypeError(f"`overrides` expects names or globs of layers as keys, got {pattern!r}.")
        if not pattern:
            raise ValueError("`overrides` expects names or globs of layers as keys, got an empty text.")
        _check_positive(f"overrides[{pattern!r}]", threshold, "a positive finite number")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` expects one of {list(choices)}, got {value!r} of type {type(value).__name__}.")
    if value not in choices:
        raise ValueError(f"`{name}` expects one of {list(choices)}, got {value!r}.")
