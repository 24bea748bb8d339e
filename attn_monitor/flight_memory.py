"""The last observations of every head: bounded, packed, and in a checkpoint as plain values and tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_monitor.catalog import FACTORS, HEADLINE
from attn_monitor.flight_records import Observation
from attn_monitor.nonfinite import Largest
from attn_monitor.phrases import error_line
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO

KEPT = (RATIO, "nonfinite", *HEADLINE, "logit_min", *FACTORS, "scale_ratio")
"""What is kept of each head, as far as it was measured."""
MOST_BYTES = 32 * 2**20
"""How much the numbers of heads take at most; of larger models fewer observations are kept."""
MOST_LOSSES = 1024
"""Of how many steps the loss is kept."""
_STATE_VERSION = 1


@dataclass(slots=True)
class _Row:
    """One observation and its heads, [KEPT, heads of the layers known by then]."""

    observation: Observation
    values: Tensor


class FlightMemory:
    """The last observations and losses.

    Args:
        size: How many observations are kept.

    Attributes:
        losses: Steps and losses of the last steps, observed or not, oldest first.
        heads: The number of heads of every layer, in the order in which they were first seen.
        head_dims: D of query and key by layer, `None` if unknown.
    """

    def __init__(self, size: int) -> None:
        self.losses: deque[tuple[int, float]] = deque(maxlen=MOST_LOSSES)
        self.heads: dict[str, int] = {}
        self.head_dims: dict[str, int | None] = {}
        self._rows: deque[_Row] = deque(maxlen=size)

    @property
    def observations(self) -> list[Observation]:
        """What stands beside the heads, oldest first."""
        return [row.observation for row in self._rows]

    def add_loss(self, step: int, loss: float) -> None:
        """Take in the loss of a step; a run that was resumed at an earlier one takes back what came later."""
        while self.losses and self.losses[-1][0] >= step:
            self.losses.pop()
        self.losses.append((step, loss))

    def loss_of(self, step: int) -> float | None:
        """Return the loss of one of the last steps, `None` if it is not known."""
        return next((loss for other, loss in reversed(self.losses) if other == step), None)

    def add(
        self, observation: Observation, statistics: Mapping[str, AttentionStatistics], rule: SaturationRule
    ) -> None:
        """Take in an observation, in place of those of the same step and later ones."""
        if any(self.heads.get(layer, stats.heads) != stats.heads for layer, stats in statistics.items()):
            self.forget()  # another model under the same names
        while self._rows and self._rows[-1].observation.step >= observation.step:
            self._rows.pop()
        for layer, stats in statistics.items():
            self.heads[layer] = stats.heads
            self.head_dims[layer] = stats.head_dim
        self._rows.append(_Row(observation, _packed(self.heads, statistics, rule)))
        while len(self._rows) > 1 and sum(row.values.nbytes for row in self._rows) > MOST_BYTES:
            self._rows.popleft()

    def tables(self) -> dict[str, Tensor]:
        """Return the numbers of the heads by statistic, [observations, heads of all layers side by side] float32.

        nan is where there is no number.
        """
        whole = torch.full((len(KEPT), len(self._rows), sum(self.heads.values())), math.nan, device="cpu")
        for index, row in enumerate(self._rows):
            whole[:, index, : row.values.shape[1]] = row.values
        return {name: table for name, table in zip(KEPT, whole, strict=True) if not bool(table.isnan().all())}

    def largest_logit(self) -> Largest | None:
        """Return the largest logit of the last observation in which all logits were finite, `None` if there is none."""
        for row in reversed(self._rows):
            values = dict(zip(KEPT, row.values, strict=True))
            logits = torch.stack([values["logit_max"].abs(), values["logit_min"].abs()]).nan_to_num(nan=-1.0).amax(0)
            if logits.numel() and not bool((values["nonfinite"] > 0).any()) and float(logits.max()) >= 0:
                layer, head = self._place(int(logits.argmax()))
                return Largest(row.observation.step, layer, head, float(logits.max()))
        return None

    def forget(self) -> None:
        """Drop everything."""
        self.losses.clear()
        self.heads.clear()
        self.head_dims.clear()
        self._rows.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values and tensors."""
        return {
            "version": _STATE_VERSION,
            "observations": [asdict(one) for one in self.observations],
            "losses": [list(point) for point in self.losses],
            "heads": dict(self.heads),
            "head_dims": dict(self.head_dims),
            "tables": {name: table.clone() for name, table in self.tables().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was kept.

        Raises:
            ValueError: If the state does not fit; what is kept stays as it was.
        """
        try:
            if state["version"] != _STATE_VERSION:
                raise ValueError(f"expected a flight record of version {_STATE_VERSION}, got {state['version']!r}")
            heads = {str(layer): int(count) for layer, count in state["heads"].items()}
            dims = {layer: state["head_dims"][layer] for layer in heads}
            losses = [(int(step), float(loss)) for step, loss in state["losses"]]
            observations = [Observation(**one) for one in state["observations"]]
            shape = len(observations), sum(heads.values())
            missing = torch.full(shape, math.nan, device="cpu")
            tables = [state["tables"].get(name, missing).to("cpu", torch.float32) for name in KEPT]
            if wrong := [tuple(table.shape) for table in tables if table.shape != shape]:
                raise ValueError(f"expected tables of shape {shape}, got {wrong[0]}")
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"its parts do not fit ({error_line(error)})") from error
        self.forget()
        self.heads, self.head_dims = heads, dims
        self.losses.extend(losses)
        rows = torch.stack(tables, dim=1)
        self._rows.extend(_Row(one, row.clone()) for one, row in zip(observations, rows, strict=True))

    def _place(self, column: int) -> tuple[str, int]:
        for layer, count in self.heads.items():
            if column < count:
                return layer, column
            column -= count
        raise IndexError(f"no head in column {column}")


def _packed(heads: Mapping[str, int], statistics: Mapping[str, AttentionStatistics], rule: SaturationRule) -> Tensor:
    """Return a record as one tensor; copying its many small ones one by one would take longer than all the rest."""
    starts, width = {}, 0
    for layer, count in heads.items():
        starts[layer] = width
        width += count
    tensors, places = [], []
    for layer, stats in statistics.items():
        measured = {**stats.measured(), RATIO: rule.ratio(stats)}
        for row, name in enumerate(KEPT):
            if name in measured:
                tensors.append(measured[name])
                places.append((row * width + starts[layer], stats.heads))
    packed = torch.full((len(KEPT), width), math.nan, device="cpu")
    if tensors:
        packed.view(-1)[_entries(tuple(places))] = torch.cat(tensors).float()
    return packed


@lru_cache(maxsize=4)
def _entries(places: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([torch.arange(start, start + count, device="cpu") for start, count in places])
