"""The text pages of TensorBoard, in Markdown: what happened, which heads are worst, how to read the pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from attn_monitor.dashboards.first_factors import FirstFactors, most_grown
from attn_monitor.dashboards.tables import Snapshot
from attn_monitor.events import SaturationEvent, by_topic, heading, worst_first
from attn_monitor.growth import PRODUCT
from attn_monitor.phrases import count
from attn_monitor.scales import RATIO, scale_of
from attn_monitor.tags import definition, direction
from attn_monitor.tracking import Changes

_LISTED = 20
"""How many events a page lists at most."""
_WORST = 10
"""How many heads the summary lists."""
_SHOWN = (RATIO, "entropy_normalized", "jacobian_trace", *PRODUCT)
_ROW_NAMES = 400
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def escape(text: str) -> str:
    r"""Return text as Markdown that shows it as it is, also within a table.

    Example:
        >>> escape("net.self_attn"), escape("a|b <i> _x_")
        ('net.self_attn', 'a\\|b &lt;i&gt; \\_x\\_')
    """
    text = re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split())).translate(_ENTITIES)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)


def event_page(step: int, changes: Changes) -> str:
    """Return what an observation changed, the worst heads first; empty if nothing.

    All of a step stand on one page, since TensorBoard keeps one text for a tag and step.
    """
    parts: list[str] = []
    for topic, events in by_topic([*changes.opened, *changes.escalated]).items():
        parts += [f"#### step {step}: {heading(topic, len(events))}", *_event_sections(events)]
    if changes.ended:
        names = [f"head {event.head} of {escape(event.layer)}" for event in changes.ended[:_LISTED]]
        names += _more(changes.ended)
        parts += [
            f"#### step {step}: {count(len(changes.ended), 'head')} recovered",
            "\n".join(f"- {name}" for name in names),
        ]
    return "\n\n".join(parts)


def note_page(step: int, notes: Sequence[str]) -> str:
    """Return what was said of the model as a whole and forecast; empty if nothing."""
    if not notes:
        return ""
    listed = [*map(escape, notes[:_LISTED]), *_more(notes)]
    return f"#### step {step}\n\n" + "\n".join(f"- {note}" for note in listed)


def _event_sections(events: Sequence[SaturationEvent]) -> list[str]:
    worst = worst_first(events)[:_LISTED]
    sections = [f"**{event.severity}**: {escape(event.line)}" for event in worst]
    known = [name for name in (*PRODUCT, "logit_max") if any(getattr(event, name) is not None for event in worst)]
    rows = [
        [escape(event.layer), str(event.head), _ratio(event), f"{event.threshold:g}"]
        + [_number(getattr(event, name)) for name in known]
        for event in worst
    ]
    table = _table(["layer", "head", RATIO, "limit", *known], rows)
    return [*sections, *_more(events), table]


def summary_page(snapshot: Snapshot, growth: FirstFactors, saturated_heads: int) -> str:
    """Return the state of the model: how many heads are saturated, the worst of them, and what grew since when."""
    ratios = snapshot.tables.get(RATIO)
    observed = sum(heads for heads, limit in zip(snapshot.heads, snapshot.limits, strict=True) if not np.isnan(limit))
    layers = count(len(snapshot.layers), "layer")
    start = f"**step {snapshot.step}: {saturated_heads} of {count(observed, 'head')} saturated**, in {layers}"
    if broken := int(snapshot.broken.sum()):
        told = f"{saturated_heads} of {count(observed, 'head')} with an event, {broken} of them with nan or inf logits"
        start = f"**step {snapshot.step}: {told}**, in {layers}"
    if ratios is None or not (np.isfinite(ratios).any() or snapshot.broken.any()):
        return f"{start}; no saturation ratio was measured."
    severity = np.nan_to_num(ratios / snapshot.limits[:, None], nan=-1.0, posinf=np.inf)
    severity[snapshot.broken] = np.inf
    order = np.argsort(-severity, axis=None, kind="stable")[:_WORST]
    places = [(int(row), int(head)) for row, head in zip(*np.unravel_index(order, severity.shape), strict=True)]
    shown = [name for name in _SHOWN if name in snapshot.tables]
    first = growth.since == snapshot.step  # nothing has grown
    titles = ["layer", "head", "limit", *shown, "what" if first else "grew most"]
    rows = []
    for row, head in places:
        if severity[row, head] < 0:
            continue
        grown = {} if first else growth.of(snapshot, row, head)
        numbers = [
            _number(float(snapshot.tables[name][row, head])) + (f" (x{grown[name]:.3g})" if name in grown else "")
            for name in shown
        ]
        grew = "nan or inf logits" if snapshot.broken[row, head] else "" if first else most_grown(grown)
        rows.append([escape(snapshot.layers[row]), str(head), f"{snapshot.limits[row]:g}", *numbers, grew])
    if not any(row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    brackets = "" if first else f", and in brackets how far each factor has come since step {growth.since}"
    return f"{start}. The worst heads{brackets}:\n\n{_table(titles, rows)}"


def legend_page(snapshot: Snapshot, names: Iterable[str], curves: int) -> str:
    """Return how to read the pictures: every number with its colour scale, and which row is which layer."""
    rows = [[f"`{name}`", escape(definition(name)), direction(name), scale_of(name).describe()] for name in names]
    layers = [
        [str(row), escape(layer), str(heads)]
        for row, (layer, heads) in enumerate(zip(snapshot.layers, snapshot.heads, strict=True))
    ]
    return "\n\n".join(
        [
            "Pictures show layers from the top and heads from the left. Values beyond a scale take the colour of its "
            f"end; grey is not measured, blank is no head; a frame marks a head whose {RATIO} is above its limit, "
            f"or that has nan or inf logits. The picture of {RATIO} is blue below the limit and orange above it.",
            _table(["number", "what", "direction", "colours"], rows),
            f"{curves} curves are logged for {len(layers)} layers, whatever the number of heads; the monitor's "
            "`statistics=[...]` chooses fewer.",
            _table(["row", "layer", "heads"], layers[:_ROW_NAMES]),
            *([f"and {count(len(layers) - _ROW_NAMES, 'more layer')}"] if len(layers) > _ROW_NAMES else []),
        ]
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _more(things: Sequence[object]) -> list[str]:
    return [f"and {len(things) - _LISTED} more"] if len(things) > _LISTED else []


def _ratio(event: SaturationEvent) -> str:
    """Return the ratio as the curve has it; the event's own is inf for nan logits, to be the worst of all."""
    return "nan" if event.kind == "nonfinite" else f"{event.ratio:.3g}"


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3g}"
