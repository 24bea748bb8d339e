"""Where a number stands on the colour scale of its statistic: fixed, so that pictures of different runs compare.

Needs nothing, not even numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["linear", "log", "signed"]

RATIO = "saturation_ratio"
"""The name of the number that the rule compares with its limit, in tables, tags and pictures."""
STANDARD_ERROR = "_standard_error"
"""What follows the name of a statistic where its standard error is meant."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A colour scale: values outside of `low` to `high` take the colour of the nearer end.

    Attributes:
        kind: `"linear"`; `"log"` with equal steps for equal ratios; or `"signed"`, zero in the middle and growing like
            the logarithm towards both ends.
        low: The value of the first colour.
        high: The value of the last colour.
    """

    kind: Kind
    low: float
    high: float

    def position(self, value: float) -> float:
        """Return where a value stands, 0 at `low` and 1 at `high`; nan for nan.

        Example:
            >>> Scale("log", 1.0, 16.0).position(4.0), Scale("linear", 0.0, 0.5).position(2.0)
            (0.5, 1.0)
        """
        if math.isnan(value):
            return math.nan
        value = min(max(value, self.low), self.high)
        return (self._stretched(value) - self._stretched(self.low)) / (
            self._stretched(self.high) - self._stretched(self.low)
        )

    def value(self, position: float) -> float:
        """Return the value at a position, the inverse of `position` between 0 and 1.

        Example:
            >>> round(Scale("log", 0.01, 100.0).value(0.75), 9)
            10.0
        """
        low, high = self._stretched(self.low), self._stretched(self.high)
        stretched = low + position * (high - low)
        if self.kind == "log":
            return math.exp(stretched)
        return math.sinh(stretched) if self.kind == "signed" else stretched

    def describe(self) -> str:
        """Return the scale in words.

        Example:
            >>> Scale("log", 0.01, 10.0).describe()
            '0.01 to 10, logarithmic'
        """
        words = {"linear": "linear", "log": "logarithmic", "signed": "zero in the middle, logarithmic to both ends"}
        return f"{self.low:g} to {self.high:g}, {words[self.kind]}"

    def _stretched(self, value: float) -> float:
        if self.kind == "log":
            return math.log(value)
        return math.asinh(value) if self.kind == "signed" else value


_UNIT = Scale("linear", 0.0, 1.0)
_SPREAD = Scale("log", 0.1, 100.0)
_RATIO = Scale("log", 0.01, 10.0)
_LOGIT = Scale("signed", -1000.0, 1000.0)
_GRADIENT = Scale("log", 1e-8, 10.0)
_SIZE = Scale("log", 0.01, 100.0)
_HALF = Scale("linear", 0.0, 0.5)

SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        RATIO: _RATIO,
        "critical_ratio": _RATIO,
        "logit_std": _SPREAD,
        "logit_row_std": _SPREAD,
        "qk_std": _SPREAD,
        "logit_mean": _LOGIT,
        "logit_max": _LOGIT,
        "logit_min": _LOGIT,
        "entropy": Scale("linear", 0.0, 10.0),
        "entropy_normalized": _UNIT,
        "max_probability": _UNIT,
        "sink_mass": _UNIT,
        "jacobian_trace": _UNIT,
        "jacobian_norm": _HALF,
        "gradient_gain": _HALF,
        "grad_logits_norm": _GRADIENT,
        "grad_probs_norm": _GRADIENT,
        "q_rms": _SIZE,
        "k_rms": _SIZE,
        "scale_ratio": Scale("log", 0.1, 100.0),
        "alignment": Scale("log", 0.1, 10.0),
        "nonfinite": Scale("log", 1.0, 1e6),
    }
)
"""The scale of every number that has one value per head."""


def scale_of(statistic: str) -> Scale:
    """Return the colour scale of a per-head number; a standard error has that of its statistic, others 0 to 1."""
    return SCALES.get(statistic.removesuffix(STANDARD_ERROR), _UNIT)
