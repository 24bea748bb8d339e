"""How things are called in the loggers, and what each tag says about itself."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from attn_monitor.catalog import STATISTICS
from attn_monitor.scales import RATIO, STANDARD_ERROR, scale_of

PLUGIN = "attn_monitor"
"""The plugin name of the per-head tensors, and the first part of the model-wide tags."""
LAYERS_TAG = f"{PLUGIN}/layers"
"""The names of the rows of the per-head tensors, rewritten when a layer joins. Rows never change their place."""
HEAD_DIM_TAG = f"{PLUGIN}/head_dim"
EVENTS_FILE = "attn_monitor_events.jsonl"
"""The file of events in the folder of a run, one JSON object a line."""
NOTES_FILE = "attn_monitor_notes.jsonl"
"""The file of notes beside it, one JSON object a line: what was said of the model as a whole, and forecasts."""
RECORDS_TAG = f"{PLUGIN}/event_records"
NOTES_TAG = f"{PLUGIN}/notes"
NOTE_RECORDS_TAG = f"{PLUGIN}/note_records"
EVENTS_TAG = f"{PLUGIN}/events"
SUMMARY_TAG = f"{PLUGIN}/summary"
LEGEND_TAG = f"{PLUGIN}/legend"
STAGE_PREFIXES = {"validate": "val_", "test": "test_", "predict": "predict_"}
"""What stands before the tags of each evaluation stage."""
OVERVIEW = "attn"
"""The group of model-wide curves, which TensorBoard sorts before all our others."""
PICTURES = "attn_heads"
HISTOGRAMS = "attn_heads_histogram"

BESIDE_THE_CATALOG = {
    RATIO: "what the saturation rule compares with its limit: logit_row_std / sqrt(d_k) unless it says otherwise",
    "scale_ratio": "scale * sqrt(d_k): 1 for textbook attention",
    "nonfinite": "number of unmasked logits that are nan or inf",
}
"""The definitions of the per-head numbers that are no statistics."""
CLIPPED_HEADS = f"{PLUGIN}/clipped_heads"
_MODEL_WIDE = {
    "clipped_heads": "heads whose weights QK-Clip rescaled after this step",
    "saturated_heads": "number of heads with an open event",
    "observed_layers": "number of layers in this record",
    f"{RATIO}_max": f"largest {RATIO} of any head",
    "sampling_error_max": "largest standard error of a chosen statistic of any head, relative to its value",
}


@lru_cache(maxsize=4096)
def layer_tag(layer: str) -> str:
    """Return a layer's name as part of a tag: dots stay, what breaks loggers or grouping becomes "_".

    Two different names never give the same tag: a changed name ends in a digest of the original.

    Example:
        >>> layer_tag("encoder.layers.0.self_attn"), layer_tag("net.a b")
        ('encoder.layers.0.self_attn', 'net.a_b-223632')
    """
    return safe_name(layer, r"[^\w.\-#@]")


def safe_name(name: str, unwanted: str, longest: int | None = None) -> str:
    """Return a name without what matches `unwanted`; different names stay different.

    A name that has to change ends in a digest of the original, and so do an empty one and one that looks as if it had
    been changed.

    Args:
        name: The name.
        unwanted: A regular expression of characters that become "_".
        longest: How long the result may be.
    """
    clean = re.sub(unwanted, "_", name)
    fits = longest is None or len(clean) <= longest
    if name and clean == name and fits and not re.search(r"-[0-9a-f]{6}$", name):
        return name
    kept = clean if longest is None else clean[: longest - 7]
    return f"{kept}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:6]}"


def definition(name: str) -> str:
    """Return what a per-head number is, with its unit, in one line."""
    base = name.removesuffix(STANDARD_ERROR)
    row = STATISTICS.get(base)
    text = row.definition if row is not None else BESIDE_THE_CATALOG.get(base, base)
    unit = f"in {row.unit}" if row is not None and row.unit else "a pure number"
    return f"{'standard error of the ' if name != base else ''}{text}; {unit}"


def direction(name: str) -> str:
    """Return which values are worse, in words."""
    if name == RATIO:
        return "larger is worse"
    row = STATISTICS.get(name)
    worse = None if row is None else row.worse
    return {"up": "larger is worse", "down": "smaller is worse", None: "neither direction is worse"}[worse]


def describe_scalar(tag: str) -> str:
    """Return the description of a scalar, given its tag without the stage."""
    group, _, rest = tag.partition("/")
    if group in (PLUGIN, OVERVIEW) and rest in _MODEL_WIDE:
        return f"{_MODEL_WIDE[rest]}; {'heads' if rest.endswith('_heads') else 'a pure number'}."
    name = rest if group == OVERVIEW else group.removeprefix("attn_")
    which = "mean over the heads"
    for suffix, words in (("_max", "largest head"), ("_min", "smallest head")):
        base = name.removesuffix(suffix)
        if base != name and name not in STATISTICS:  # `logit_max` is a statistic, `logit_max_max` its largest head
            name, which = base, words
            break
    where = "of the whole model" if group == OVERVIEW else f"of {rest}"
    return f"{name}, {which} {where}: {definition(name)}; {direction(name)}."


def describe_picture(name: str, limit: float) -> str:
    """Return the legend of a picture."""
    text = (
        f"{name}: {definition(name)}; {direction(name)}. Rows are layers from the top, columns heads; the names of the "
        f"rows stand in the text {LEGEND_TAG}. Colours run from {scale_of(name).describe()}; values beyond take the "
        f"colour of the end, grey is not measured, blank is no head. Framed: {RATIO} above its limit, or nan "
        f"or inf logits."
    )
    return f"{text} Blue below the limit of {limit:g}, orange above." if name == RATIO else text


def describe_histogram(name: str) -> str:
    """Return the description of a histogram."""
    return f"{name} of every head: {definition(name)}."


def describe_table(name: str) -> str:
    """Return the description of a per-head tensor."""
    return f"{name}: {definition(name)}; axes (layer, head)."
