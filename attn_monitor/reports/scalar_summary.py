"""The summary of a run that stored no single heads: the means and the worst heads of its layers."""

from __future__ import annotations

import math
import re

import numpy as np

from attn_monitor.catalog import STATISTICS
from attn_monitor.phrases import count
from attn_monitor.reports.event_records import event_lines, note_lines, place
from attn_monitor.reports.runs import ScalarRun
from attn_monitor.reports.summary import aligned, losses_and_norms, shown
from attn_monitor.reports.terminal import printable
from attn_monitor.scales import RATIO
from attn_monitor.stored_events import number, worst_first
from attn_monitor.tags import EVENTS_FILE, PLUGIN
from attn_monitor.views import Series

_LAYER_TAG = re.compile(r"attn_(?!monitor/)\w+/(?P<layer>.+)")
_SHOWN = 5


def summarize_scalars(run: ScalarRun) -> str:
    """Return the summary of a run that stored no single heads: means and worst heads of layers are all it has."""
    layers = dict.fromkeys(match["layer"] for tag in run.scalars if (match := _LAYER_TAG.fullmatch(tag)))
    steps = sorted({step for points in run.scalars.values() for step in points.steps.tolist()})
    lines = [
        f"{run.name}: {count(len(layers), 'layer')}, {count(len(steps), 'observation')}, "
        f"steps {steps[0]} to {steps[-1]}",
        f"  {run.source} with means and worst heads of layers only: {_more(run)}",
    ]
    lines += event_lines(run.events)
    lines += note_lines(run.notes, events=bool(run.events))
    lines += _model_wide(run)
    lines += _flagged_heads(run)
    lines += _worst_layers(run)
    rows = [["beside it", "first", "last"]]
    rows += [[tag, _read(points, 0), _read(points, -1)] for tag, points in losses_and_norms(run.others)]
    if len(rows) > 1:
        lines += ["", *aligned(rows)]
    return "\n".join(map(printable, lines))


def _more(run: ScalarRun) -> str:
    if run.events:
        return f"which heads were flagged is from {EVENTS_FILE}, all other numbers of heads need a TensorBoardLogger"
    return "which head it is, only per-head tensors can say, and those need a TensorBoardLogger"


def _flagged_heads(run: ScalarRun) -> list[str]:
    """Return the heads in the order they were flagged, of one step the worst first."""
    first = {place(event): event for event in reversed(worst_first(run.events)) if event.get("state") == "opened"}
    last = {place(event): event for event in run.events}
    heads = list(reversed(first))
    if not heads:
        return []
    rows = [["flagged heads", "flagged at", "ratio then", "at the end", "likely cause then"]]
    for head in heads[:_SHOWN]:
        event, end = first[head], last[head]
        rows.append(
            [
                f"head {head[1]} of {head[0]}",
                str(event.get("step")),
                "nan or inf" if event.get("kind") == "nonfinite" else shown(number(event, "ratio")),
                f"ended at {end.get('step')}" if end.get("state") == "ended" else str(end.get("severity")),
                str(event.get("cause") or "-").removeprefix("likely cause: "),
            ]
        )
    more = len(heads) - _SHOWN
    return ["", *aligned(rows), *([f"  and {more} more, all in {EVENTS_FILE}"] if more > 0 else [])]


def _model_wide(run: ScalarRun) -> list[str]:
    saturated = run.scalars.get(f"{PLUGIN}/saturated_heads")
    lines = []
    if saturated is not None:
        above = np.flatnonzero(saturated.values > 0)
        if len(above):
            lines.append(
                f"  saturated heads: first at step {saturated.steps[above[0]]}, most {saturated.values.max():.0f}, "
                f"{saturated.values[-1]:.0f} at the end"
            )
        else:
            lines.append("  saturated heads: none at any step")
    ratio = run.scalars.get(f"{PLUGIN}/{RATIO}_max")
    if ratio is not None and not np.isnan(ratio.values).all():
        at = int(np.nanargmax(ratio.values))
        lines.append(
            f"  largest saturation_ratio: {ratio.values[at]:.3g} at step {ratio.steps[at]}, "
            f"{_read(ratio, -1)} at the end"
        )
    return lines


def _worst_layers(run: ScalarRun) -> list[str]:
    """Return the layers whose worst head is worst, by the first statistic that has a direction; nan is worse still."""
    for name in ("logit_row_std", *STATISTICS):
        worse = STATISTICS[name].worse
        root = f"attn_{name}_{'min' if worse == 'down' else 'max'}/"
        found = {tag.removeprefix(root): points for tag, points in run.scalars.items() if tag.startswith(root)}
        if worse is not None and found:
            sign = -1 if worse == "down" else 1
            bad = {layer: np.nan_to_num(sign * points.values, nan=-np.inf) for layer, points in found.items()}
            order = sorted(found, key=lambda layer: (not math.isnan(found[layer].values[-1]), -bad[layer].max()))
            rows = [["worst layers", f"{name} of the worst head", "at step", "first", "last"]]
            for layer in order[:_SHOWN]:
                steps, values = found[layer]
                at = int(bad[layer].argmax())
                known = not math.isnan(values[at])
                peak = [shown(values[at]), str(steps[at])] if known else ["-", "-"]
                rows.append([layer, *peak, _read(found[layer], 0), _read(found[layer], -1)])
            return ["", *aligned(rows)]
    return []


def _read(points: Series, index: int) -> str:
    """Return a value as it was logged; what is nan at the end says since when."""
    if index == -1 and math.isnan(points.values[-1]):
        known = np.flatnonzero(~np.isnan(points.values))
        return f"nan since {points.steps[known[-1] + 1 if len(known) else 0]}"
    return f"{points.values[index]:.3g}"
