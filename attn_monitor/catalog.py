"""The table of statistics as data: tags, documentation, tooltips and messages derive from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Direction = Literal["up", "down"]
Family = Literal["logits", "probabilities", "gradients", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """One row of the table.

    Attributes:
        name: The public name, a field of `AttentionStatistics`.
        family: What it is computed from.
        definition: One line, over the allowed entries of a head.
        unit: The unit, empty for a pure number.
        low: The smallest possible value, `None` if unbounded.
        high: The largest possible value as text (it may depend on the number of keys), empty if unbounded.
        worse: The direction that is worse, `None` if neither is.

    Example:
        >>> from attn_monitor.catalog import STATISTICS
        >>> STATISTICS["entropy"].unit, STATISTICS["entropy"].high, STATISTICS["entropy"].worse
        ('nats', 'ln K', 'down')
    """

    name: str
    family: Family
    definition: str
    unit: str = ""
    low: float | None = 0.0
    high: str = ""
    worse: Direction | None = None


_TABLE = (
    Statistic(
        name="logit_mean",
        family="logits",
        definition="mean of the logits",
        low=None,
    ),
    Statistic(
        name="logit_std",
        family="logits",
        definition="population standard deviation of all logits",
        worse="up",
    ),
    Statistic(
        name="logit_row_std",
        family="logits",
        definition="root of the mean over rows of the variance within the row",
        worse="up",
    ),
    Statistic(
        name="critical_ratio",
        family="logits",
        definition="root of the mean over rows of variance / (2 ln n): 1 where Gaussian logits condense",
        worse="up",
    ),
    Statistic(
        name="logit_max",
        family="logits",
        definition="largest logit, signed, exact",
        low=None,
        worse="up",
    ),
    Statistic(
        name="logit_min",
        family="logits",
        definition="smallest logit, signed, exact",
        low=None,
    ),
    Statistic(
        name="entropy",
        family="probabilities",
        definition="mean over rows of the entropy -sum p ln p",
        unit="nats",
        high="ln K",
        worse="down",
    ),
    Statistic(
        name="entropy_normalized",
        family="probabilities",
        definition="mean over rows of the entropy divided by ln n",
        high="1",
        worse="down",
    ),
    Statistic(
        name="max_probability",
        family="probabilities",
        definition="mean over rows of the largest probability",
        high="1",
        worse="up",
    ),
    Statistic(
        name="sink_mass",
        family="probabilities",
        definition="mean over rows of the probability on the first visible key and on a learned sink",
        high="1",
    ),
    Statistic(
        name="jacobian_trace",
        family="probabilities",
        definition="mean over rows of (1 - sum p^2) / (1 - 1/n): 1 uniform, 0 one-hot",
        high="1",
        worse="down",
    ),
    Statistic(
        name="jacobian_norm",
        family="probabilities",
        definition="mean over rows of the Frobenius norm of diag(p) - p p^T; not monotone in saturation",
        high="1/2",
    ),
    Statistic(
        name="grad_logits_norm",
        family="gradients",
        definition="norm of dL/dlogits of the optimizer step's loss",
    ),
    Statistic(
        name="grad_probs_norm",
        family="gradients",
        definition="norm of dL/dp of the optimizer step's loss",
    ),
    Statistic(
        name="gradient_gain",
        family="gradients",
        definition="grad_logits_norm / grad_probs_norm; not monotone in saturation",
        high="1/2",
    ),
    Statistic(
        name="q_rms",
        family="factors",
        definition="root mean square of the query entries, scale divided out",
        worse="up",
    ),
    Statistic(
        name="k_rms",
        family="factors",
        definition="root mean square of the key entries, scale divided out",
        worse="up",
    ),
    Statistic(
        name="qk_std",
        family="factors",
        definition="population standard deviation of scale * q.k before bias and softcap",
        worse="up",
    ),
    Statistic(
        name="alignment",
        family="factors",
        definition="qk_std / (scale * sqrt(D) * q_rms * k_rms): 1 for independent isotropic q and k",
        high="sqrt(D)",
        worse="up",
    ),
)

STATISTICS: Mapping[str, Statistic] = MappingProxyType({row.name: row for row in _TABLE})
"""Every statistic by name, in the order of the documentation."""

ALL: frozenset[str] = frozenset(STATISTICS)
HEADLINE: tuple[str, ...] = (
    "logit_std",
    "logit_row_std",
    "logit_max",
    "entropy_normalized",
    "jacobian_trace",
    "grad_logits_norm",
)
"""What the callback logs unless told otherwise."""

FACTORS: tuple[str, ...] = tuple(row.name for row in _TABLE if row.family == "factors")
GRADIENTS: frozenset[str] = frozenset(row.name for row in _TABLE if row.family == "gradients")


def resolve_statistics(names: Iterable[str] | None, default: Iterable[str] = ALL) -> frozenset[str]:
    """Return the chosen names as a set, `default` for `None`.

    Raises:
        ValueError: If a name is not in the table, or none is given.
        TypeError: If `names` is a single string or holds something else than strings.
    """
    if names is None:
        return frozenset(default)
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"`statistics` expects a list of names, got {names!r}. Write statistics=[{names!r}].")
    chosen: list[str] = list(names)
    given: list[object] = list(chosen)
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise TypeError(f"`statistics` expects names as strings, got {wrong[0]!r} of type {type(wrong[0]).__name__}.")
    if unknown := sorted(set(chosen) - ALL):
        raise ValueError(f"Unknown statistics {unknown}. Choose from {list(STATISTICS)}.")
    if not chosen:
        raise ValueError(f"`statistics` is empty. Choose from {list(STATISTICS)}, or pass None for the default.")
    return frozenset(chosen)
