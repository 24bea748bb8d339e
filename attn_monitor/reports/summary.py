"""What a run says, in plain text: what came first, which heads are worst, what grew, and the loss beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attn_monitor.diagnosis import FACTORS, explain
from attn_monitor.reports.terminal import printable
from attn_monitor.views import RunData, Series

_RATIO = "saturation_ratio"
_SHOWN = 5
_GROWN = 1.25
_PRODUCT = ("scale_ratio", "q_rms", "k_rms", "alignment")
_BESIDE = ("entropy_normalized", "jacobian_trace", "grad_logits_norm")
_LOSS = re.compile(r"(?<![a-z])loss(?![a-z])", re.IGNORECASE)
_NORM = re.compile(r"grad.*norm|norm.*grad", re.IGNORECASE)

_Head = tuple[int, int]


def summarize(run: RunData) -> str:
    """Return the summary of a run, several lines.

    Args:
        run: The run, whatever its statistics are.
    """
    run = _printable_run(run)
    worst = _worst_heads(run)
    lines = [_heading(run), *_events(run), *_worst_table(run, worst), *_growth(run, worst), *_beside(run)]
    return "\n".join(lines)


def _printable_run(run: RunData) -> RunData:
    events = [
        {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}
        for event in run.events
    ]
    scalars = {printable(tag): points for tag, points in run.scalars.items() if _LOSS.search(tag) or _NORM.search(tag)}
    layers = [printable(layer) for layer in run.layers]
    return replace(run, name=printable(run.name), layers=layers, events=events, scalars=scalars)


def _heading(run: RunData) -> str:
    steps = run.steps
    heads = next((table.values.shape[2] for table in run.tables.values()), 0)
    seen = f"{len(steps)} observation{'' if len(steps) == 1 else 's'}"
    when = f", steps {steps[0]} to {steps[-1]}" if len(steps) else ""
    layers = f"{len(run.layers)} layer{'' if len(run.layers) == 1 else 's'}"
    return f"{run.name}: {layers} of {heads} head{'' if heads == 1 else 's'}, {seen}{when}"


def _events(run: RunData) -> list[str]:
    opened = [event for event in run.events if event.get("state") == "opened"]
    if not opened:
        largest = _largest_ratio(run)
        if run.threshold is None:  # written without events, which does not mean that there were none
            return [f"  no events are stored{'' if largest is None else f'; {largest}'}"]
        return [f"  no event: no head was flagged{'' if largest is None else f', {largest} (limit {run.threshold:g})'}"]
    flagged = {_place(event) for event in opened}
    critical = {_place(event) for event in run.events if event.get("severity") == "critical"}
    first = opened[0]
    return [
        f"  first event: {first.get('message') or _plain(first)}",
        f"  {count(flagged, 'head')} flagged, {len(critical)} of them critical, {len(_open_heads(run))} still open "
        "at the end",
    ]


def _largest_ratio(run: RunData) -> str | None:
    if _RATIO not in run.tables:
        return None
    steps, values = run.tables[_RATIO]
    if not np.isfinite(values).any():
        return None
    at, layer, head = (int(part) for part in np.unravel_index(int(np.argmax(_or_below(values))), values.shape))
    return (
        f"the largest saturation_ratio is {values[at, layer, head]:.3g}, "
        f"head {head} of {run.layers[layer]} at step {steps[at]}"
    )


def _plain(event: Mapping[str, object]) -> str:
    return f"step {event.get('step')}: head {event.get('head')} of {event.get('layer')}"


def _place(event: Mapping[str, object]) -> tuple[object, object]:
    return event.get("layer"), event.get("head")


def _open_heads(run: RunData) -> set[tuple[object, object]]:
    heads: set[tuple[object, object]] = set()
    for event in run.events:
        if event.get("state") == "ended":
            heads.discard(_place(event))
        else:
            heads.add(_place(event))
    return heads


def count(things: Iterable[object], noun: str) -> str:
    """Return how many there are, with the noun in its number."""
    number = len(list(things))
    return f"{number} {noun}{'' if number == 1 else 's'}"


# -- the worst heads ---------------------------------------------------------------------------------------------------


def _worst_heads(run: RunData) -> list[_Head]:
    """Return the heads with nan or inf logits, then those with the largest ratio ever, of the sick if any are."""
    rows = {layer: index for index, layer in enumerate(run.layers)}
    broken = [event for event in run.events if event.get("statistic") == "nonfinite"]
    flagged = [event for event in run.events if event.get("statistic") != "nonfinite"]
    order = [place for event in broken if (place := _index(event, rows)) is not None]
    allowed = {place for event in flagged if (place := _index(event, rows)) is not None}
    if _RATIO in run.tables and (values := run.tables[_RATIO].values).size:
        peaks = _or_below(values).max(axis=0)
        for flat in np.argsort(-peaks, axis=None, kind="stable"):
            layer, head = (int(part) for part in np.unravel_index(int(flat), peaks.shape))
            over = run.threshold is not None and peaks[layer, head] > run.threshold
            if math.isfinite(peaks[layer, head]) and (over or not run.events or (layer, head) in allowed):
                order.append((layer, head))
    return list(dict.fromkeys(order))[:_SHOWN]


def _index(event: Mapping[str, object], rows: Mapping[str, int]) -> _Head | None:
    layer, head = rows.get(str(event.get("layer"))), event.get("head")
    return (layer, head) if layer is not None and isinstance(head, int) else None


def _or_below(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Put nan below every number, for a maximum that passes over it."""
    return np.where(np.isnan(values), np.float32(-np.inf), values)


def _worst_table(run: RunData, heads: Sequence[_Head]) -> list[str]:
    if not heads:
        return []
    beside = [name for name in _BESIDE if name in run.tables]
    since = {(event.get("layer"), event.get("head")): event.get("step") for event in reversed(run.events)}
    rows = [["worst heads", "largest ratio", "at step", "flagged at", *(f"{name} at end" for name in beside)]]
    for layer, head in heads:
        name = run.layers[layer]
        flagged = since.get((name, head))
        ratio, step = _peak(run, (layer, head))
        rows.append(
            [
                f"head {head} of {name}",
                shown(ratio),
                "-" if step is None else str(step),
                "-" if flagged is None else str(flagged),
                *(shown(_at(run, statistic, (layer, head), -1)) for statistic in beside),
            ]
        )
    return ["", *aligned(rows)]


def _peak(run: RunData, head: _Head) -> tuple[float, int | None]:
    """Return the largest ratio of a head and its step."""
    if _RATIO not in run.tables or not _has(run, _RATIO, head):
        return math.nan, None
    steps, values = run.tables[_RATIO]
    column = _or_below(values[:, head[0], head[1]])
    at = int(column.argmax())
    return (float(column[at]), int(steps[at])) if column[at] > -np.inf else (math.nan, None)


def _has(run: RunData, statistic: str, head: _Head) -> bool:
    _, layers, heads = run.tables[statistic].values.shape
    return bool(head[0] < layers and head[1] < heads)


def _at(run: RunData, statistic: str, head: _Head, index: int) -> float:
    """Return a value of a head by the index of its step in that table."""
    values = run.tables[statistic].values
    return float(values[index, head[0], head[1]]) if len(values) and _has(run, statistic, head) else math.nan


# -- what grew ---------------------------------------------------------------------------------------------------------


def _growth(run: RunData, heads: Sequence[_Head]) -> list[str]:
    lines = []
    flagged = {_place(event) for event in run.events}
    for head in heads:
        ratio, worst = _peak(run, head)
        first = _first_step(run, head)
        if worst is None or first is None:
            continue
        before, now = _factors(run, head, first), _factors(run, head, worst)
        sick = run.threshold is None or ratio > run.threshold or (run.layers[head[0]], head[1]) in flagged
        cause = explain(now, before, since=first, head_dim=run.head_dims[head[0]]) if sick else ""
        if parts := [part for part in (_shares(before, now), cause) if part]:
            lines.append(f"    head {head[1]} of {run.layers[head[0]]}: {'; '.join(parts)}")
    return ["", "  what grew, from the first observation to the largest ratio:", *lines] if lines else []


def _first_step(run: RunData, head: _Head) -> int | None:
    steps, values = run.tables[_RATIO]
    known = np.flatnonzero(np.isfinite(values[:, head[0], head[1]]))
    return int(steps[known[0]]) if len(known) else None


def _factors(run: RunData, head: _Head, step: int) -> dict[str, float]:
    found = {}
    for name in FACTORS:
        if name in run.tables and _has(run, name, head):
            steps = run.tables[name].steps
            at = int(np.searchsorted(steps, step))
            if at < len(steps) and steps[at] == step and math.isfinite(value := _at(run, name, head, at)):
                found[name] = value
    return found


def _shares(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Return by what logit_row_std grew, and the factors that grew with it with their shares of its log growth."""
    grown = _ratio(now, before, "logit_row_std")
    if grown is None or grown < _GROWN:
        return ""
    factors = {name: ratio for name in _PRODUCT if (ratio := _ratio(now, before, name)) is not None}
    rest = _ratio(now, before, "qk_std")
    if rest is not None:
        factors["bias, softcap and row offsets"] = grown / rest
    parts = [
        f"{name} {ratio:.3g}x ({100 * math.log(ratio) / math.log(grown):.0f} %)"
        for name, ratio in sorted(factors.items(), key=lambda item: -item[1])
        if ratio >= _GROWN
    ]
    return f"logit_row_std {grown:.3g}x{' = ' if parts else ''}{', '.join(parts)}"


def _ratio(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float | None:
    ratio = now[name] / before[name] if name in now and before.get(name) else math.nan
    return ratio if math.isfinite(ratio) and ratio > 0 else None


# -- beside it ---------------------------------------------------------------------------------------------------------


def _beside(run: RunData) -> list[str]:
    """Return loss and gradient norm at the first observation, the first event and the last observation."""
    steps = run.steps
    if not len(steps):
        return []
    opened = [event.get("step") for event in run.events if event.get("state") == "opened"]
    middle = [step for step in opened[:1] if isinstance(step, int)]
    moments = sorted({int(steps[0]), *middle, int(steps[-1])})
    titles = [f"step {step}{' (first event)' if [step] == middle else ''}" for step in moments]
    rows = [["beside it", *titles]]
    rows += [[tag, *(shown(_near(points, step)) for step in moments)] for tag, points in losses_and_norms(run.scalars)]
    norms = _all_heads_norm(run)
    if norms is not None:
        rows.append(["grad_logits_norm, all heads", *(shown(_near(norms, step)) for step in moments)])
    lines = ["", *aligned(rows)] if len(rows) > 1 else []
    if not any(_LOSS.search(tag) for tag in run.scalars):
        lines.append("  no loss was logged: no scalar of this run has `loss` in its name")
    return lines


def losses_and_norms(scalars: Mapping[str, Series]) -> list[tuple[str, Series]]:
    """Return up to three losses, that of training first, and up to two gradient norms."""
    losses = sorted((tag for tag in scalars if _LOSS.search(tag)), key=lambda tag: ("val" in tag, len(tag), tag))
    norms = sorted((tag for tag in scalars if _NORM.search(tag)), key=lambda tag: ("total" not in tag, len(tag)))
    return [(tag, scalars[tag]) for tag in dict.fromkeys([*losses[:3], *norms[:2]])]


def _all_heads_norm(run: RunData) -> Series | None:
    table = run.tables.get("grad_logits_norm")
    if table is None or not np.isfinite(table.values).any():
        return None
    squares = np.nansum(table.values.astype(np.float64) ** 2, axis=(1, 2))
    known = np.isfinite(table.values).any(axis=(1, 2))
    return Series(table.steps[known], np.sqrt(squares[known]))


def _near(points: Series, step: int) -> float:
    """Return the last value up to a step, or the first of all."""
    if not len(points.steps):
        return math.nan
    at = max(int(np.searchsorted(points.steps, step, side="right")) - 1, 0)
    return float(points.values[at])


def shown(value: float) -> str:
    """Return a number in three digits, a dash for nan."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, the first column to the left as all others."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
