"""What a run says, in plain text: what came first, which heads are worst, what grew, and the loss beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attn_monitor.diagnosis import FACTORS, explain
from attn_monitor.events import NONFINITE
from attn_monitor.phrases import count
from attn_monitor.reports.broken import broken_lines, broken_since
from attn_monitor.reports.event_records import event_lines, note_lines, place
from attn_monitor.reports.growth import growth_in_words
from attn_monitor.reports.terminal import printable
from attn_monitor.scales import RATIO
from attn_monitor.views import STAGES, RunData, Series

_SHOWN = 5
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
    lines = [
        _heading(run),
        *_events(run),
        *note_lines(run.notes, events=bool(run.events)),
        *broken_lines(run),
        *_worst_table(run, worst),
        *_growth(run, worst),
        *_beside(run),
    ]
    return "\n".join(lines)


def _printable_run(run: RunData) -> RunData:
    events = [
        {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}
        for event in run.events
    ]
    notes = [{**note, "note": printable(str(note.get("note")))} for note in run.notes]
    scalars = {printable(tag): points for tag, points in run.scalars.items() if _LOSS.search(tag) or _NORM.search(tag)}
    layers = [printable(layer) for layer in run.layers]
    return replace(run, name=printable(run.name), layers=layers, events=events, scalars=scalars, notes=notes)


def _heading(run: RunData) -> str:
    steps = run.steps
    heads = next((table.values.shape[2] for table in run.tables.values()), 0)
    when = f", steps {steps[0]} to {steps[-1]}" if len(steps) else ""
    size = f"{count(len(run.layers), 'layer')} of {count(heads, 'head')}"
    return f"{run.name}: {size}, {count(len(steps), 'observation')}{when}"


def _events(run: RunData) -> list[str]:
    if lines := event_lines(run.events):
        return lines
    largest = _largest_ratio(run)
    if run.threshold is None:  # written without events, which does not mean that there were none
        return [f"  no events are stored{'' if largest is None else f'; {largest}'}"]
    limit = "" if largest is None else f"{largest} (limit {run.threshold:g})"
    above = _above(run)
    if any(stage and run.name.endswith((f" ({stage})", f", {stage})")) for stage in STAGES.values()):
        start = "  no events, as only training opens them"
    else:  # a head that a resumed training had flagged before is above the limit without an event of this run
        start = "  no event in this run: no head was newly flagged" if above else "  no event: no head was flagged"
    return [f"{start}{limit and f', {limit}'}", *above]


def _above(run: RunData) -> list[str]:
    """Return how many heads were above the limit though no event says so."""
    if run.threshold is None or RATIO not in run.tables or not run.tables[RATIO].values.size:
        return []
    over = run.tables[RATIO].values > run.threshold
    known = ~np.isnan(run.tables[RATIO].values)
    number = int(over.any(axis=0).sum())
    if not number:
        return []
    return [
        f"  {number} of {count(int(known.any(axis=0).sum()), 'head')} above the limit at some observation, "
        f"{int(over[-1].sum())} at the last"
    ]


def _largest_ratio(run: RunData) -> str | None:
    if RATIO not in run.tables:
        return None
    steps, values = run.tables[RATIO]
    if np.isnan(values).all():
        return None
    at, layer, head = (int(part) for part in np.unravel_index(int(np.argmax(_or_below(values))), values.shape))
    return (
        f"the largest saturation_ratio is {values[at, layer, head]:.3g}, "
        f"head {head} of {run.layers[layer]} at step {steps[at]}"
    )


# -- the worst heads ---------------------------------------------------------------------------------------------------


def _worst_heads(run: RunData) -> list[_Head]:
    """Return the heads with nan or inf logits, then those with the largest ratio ever, of the sick if any are."""
    rows = {layer: index for index, layer in enumerate(run.layers)}
    broken = [event for event in run.events if event.get("statistic") == NONFINITE]
    flagged = [event for event in run.events if event.get("statistic") != NONFINITE]
    order = [place for event in broken if (place := _index(event, rows)) is not None]
    allowed = {place for event in flagged if (place := _index(event, rows)) is not None}
    if RATIO in run.tables and (values := run.tables[RATIO].values).size:
        peaks = _or_below(values).max(axis=0)
        for flat in np.argsort(-peaks, axis=None, kind="stable"):
            layer, head = (int(part) for part in np.unravel_index(int(flat), peaks.shape))
            over = run.threshold is not None and peaks[layer, head] > run.threshold
            if peaks[layer, head] > -math.inf and (over or not run.events or (layer, head) in allowed):
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
    broken = broken_since(run)
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
                *(_at_end(run, statistic, (layer, head), broken) for statistic in beside),
            ]
        )
    return ["", *aligned(rows)]


def _at_end(run: RunData, statistic: str, head: _Head, broken: Mapping[_Head, int]) -> str:
    """Return a value of a head at the last observation, in words; an earlier one would read as if all were well."""
    steps = run.tables[statistic].steps
    value = _at(run, statistic, head, -1) if len(steps) and steps[-1] == run.steps[-1] else math.nan
    return f"nan since {broken[head]}" if math.isnan(value) and head in broken else shown(value)


def _peak(run: RunData, head: _Head) -> tuple[float, int | None]:
    """Return the largest ratio of a head and its step."""
    if RATIO not in run.tables or not _has(run, RATIO, head):
        return math.nan, None
    steps, values = run.tables[RATIO]
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
    lines: list[str] = []
    some_grew = False
    flagged = {place(event) for event in run.events if event.get("statistic") != NONFINITE}
    broken = broken_since(run)
    for head in heads:
        ratio, worst = _peak(run, head)
        first = _first_step(run, head)
        if worst is None or first is None:
            continue
        before, now = _factors(run, head, first), _factors(run, head, worst)
        sick = run.threshold is None or ratio > run.threshold or (run.layers[head[0]], head[1]) in flagged
        cause = explain(now, before, since=first, head_dim=run.head_dims[head[0]]) if sick else ""
        growth, *more = growth_in_words(before, now, sick=sick) or [""]
        some_grew = some_grew or growth != ""
        why = "; ".join(part for part in (*more, cause) if part)
        name = f"head {head[1]} of {run.layers[head[0]]}"
        until = f"until nan or inf at step {broken[head]}: " if head in broken else ""
        if growth or why:
            lines.append(f"    {name}: {until}{growth or why}")
        if growth and why:
            lines.append(f"      {why}")
    heading = "what grew, from the first observation to the largest ratio" if some_grew else "why, at the largest ratio"
    return ["", f"  {heading}:", *lines] if lines else []


def _first_step(run: RunData, head: _Head) -> int | None:
    steps, values = run.tables[RATIO]
    known = np.flatnonzero(~np.isnan(values[:, head[0], head[1]]))
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


# -- beside it ---------------------------------------------------------------------------------------------------------


def _beside(run: RunData) -> list[str]:
    """Return the last loss and gradient norm up to the first observation, the first event and the last observation."""
    steps = run.steps
    if not len(steps):
        return []
    opened = [event.get("step") for event in run.events if event.get("state") == "opened"]
    middle = [step for step in opened[:1] if isinstance(step, int)]
    moments = sorted({int(steps[0]), *middle, int(steps[-1])})
    titles = [f"step {step}{' (first event)' if [step] == middle else ''}" for step in moments]
    rows = [["beside it", *titles]]
    rows += [[tag, *(_last_until(points, step) for step in moments)] for tag, points in losses_and_norms(run.scalars)]
    norms = _all_heads_norm(run)
    if norms is not None:
        rows.append(["grad_logits_norm, all heads", *(_last_until(norms, step) for step in moments)])
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
    norms = {int(step): float(norm) for step, norm in zip(table.steps[known], np.sqrt(squares[known]), strict=True)}
    if broken := list(broken_since(run).values()):  # a gradient that is nan was measured, and is nan
        start = min(broken)
        norms |= {step: math.nan for step in run.steps.tolist() if step >= start and step not in norms}
    steps = sorted(norms)
    return Series(np.array(steps, np.int64), np.array([norms[step] for step in steps]))


def _last_until(points: Series, step: int) -> str:
    """Return the last value up to a step, and its step if it is an earlier one; none that came later."""
    known = int(np.searchsorted(points.steps, step, side="right"))
    if not known:
        return "-"
    of = int(points.steps[known - 1])
    return f"{points.values[known - 1]:.3g}{'' if of == step else f' (step {of})'}"


def shown(value: float) -> str:
    """Return a number in three digits, a dash for nan."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, the first column to the left as all others."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
