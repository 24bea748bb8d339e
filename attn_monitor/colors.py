"""Per-head numbers as colours: a fixed scale per statistic, so that pictures of different runs compare."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_VIRIDIS = (
    (68, 1, 84),
    (71, 45, 123),
    (59, 82, 139),
    (44, 114, 142),
    (33, 145, 140),
    (40, 174, 128),
    (94, 201, 98),
    (173, 220, 48),
    (253, 231, 37),
)
_GREY = (128, 128, 128)
_MAX_SIDE = 1024


def _linear(low: float, high: float) -> Callable[[Tensor], Tensor]:
    return lambda values: (values - low) / (high - low)


def _logarithmic(low: float, high: float) -> Callable[[Tensor], Tensor]:
    return lambda values: (values.clamp(min=low).log() - math.log(low)) / math.log(high / low)


def _signed(high: float) -> Callable[[Tensor], Tensor]:
    """Zero in the middle, logarithmic towards both ends."""
    return lambda values: 0.5 + 0.5 * values.asinh() / math.asinh(high)


_SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "saturation_ratio": _logarithmic(0.01, 10),
    "critical_ratio": _logarithmic(0.01, 10),
    "logit_std": _logarithmic(0.1, 100),
    "logit_row_std": _logarithmic(0.1, 100),
    "qk_std": _logarithmic(0.1, 100),
    "logit_mean": _signed(1000),
    "logit_max": _signed(1000),
    "logit_min": _signed(1000),
    "entropy": _linear(0, 10),
    "jacobian_norm": _linear(0, 0.5),
    "gradient_gain": _linear(0, 0.5),
    "grad_logits_norm": _logarithmic(1e-8, 10),
    "grad_probs_norm": _logarithmic(1e-8, 10),
    "q_rms": _logarithmic(0.01, 100),
    "k_rms": _logarithmic(0.01, 100),
    "alignment": _logarithmic(0.1, 10),
}
_DEFAULT_SCALE = _linear(0, 1)


def heat_image(statistic: str, table: Tensor) -> Tensor:
    """Return a [layers, heads] table as an image, one pixel per head.

    Args:
        statistic: Chooses the colour scale; values beyond its ends take the colour of the end.
        table: The values; nan is painted grey.

    Returns:
        [layers, heads, 3], uint8, at most 1024 pixels wide and high.
    """
    values = table.double()[:_MAX_SIDE, :_MAX_SIDE]
    position = _SCALES.get(statistic, _DEFAULT_SCALE)(values).clamp(0, 1) * (len(_VIRIDIS) - 1)
    known = ~values.isnan()
    below = torch.where(known, position, 0.0).floor().long().clamp(max=len(_VIRIDIS) - 2)
    colors = torch.tensor(_VIRIDIS, dtype=torch.float64, device="cpu")
    mixed = torch.lerp(colors[below], colors[below + 1], (torch.where(known, position, 0.0) - below).unsqueeze(-1))
    return (
        torch.where(known.unsqueeze(-1), mixed, torch.tensor(_GREY, dtype=torch.float64, device="cpu"))
        .round()
        .to(torch.uint8)
    )
