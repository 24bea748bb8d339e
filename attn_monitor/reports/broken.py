"""Which heads have logits that are nan or inf at the end of a run, and since when: their numbers are older, or none."""

from __future__ import annotations

import numpy as np

from attn_monitor.events import NONFINITE
from attn_monitor.phrases import count
from attn_monitor.views import RunData


def broken_since(run: RunData) -> dict[tuple[int, int], int]:
    """Return the step since which a head has nan or inf logits, by layer and head, of those that have some at the end.

    An observation without the head, as under layer drop, neither begins nor ends that.
    """
    if NONFINITE not in run.tables or not run.tables[NONFINITE].values.size:
        return {}
    steps, values = run.tables[NONFINITE]
    bad = values > 0
    places = np.arange(len(steps))[:, None, None]
    last_good = np.where(values == 0, places, -1).max(axis=0)
    lasting = bad & (places > last_good)
    first = lasting.argmax(axis=0)
    return {(int(layer), int(head)): int(steps[first[layer, head]]) for layer, head in np.argwhere(lasting.any(axis=0))}


def broken_lines(run: RunData) -> list[str]:
    """Return how many heads end with nan or inf logits, and where that was first; nothing if none does."""
    since = broken_since(run)
    if not since:
        return []
    heads = int((~np.isnan(run.tables[NONFINITE].values)).any(axis=0).sum())
    (layer, head), step = min(since.items(), key=lambda item: (item[1], item[0]))
    whose = f"{len(since)} of {count(heads, 'head')} {'has' if len(since) == 1 else 'have'}"
    when = f"{'' if len(since) == 1 else 'the first '}since step {step}: head {head} of {run.layers[layer]}"
    return [f"  {whose} nan or inf logits at the end, {when}"]
