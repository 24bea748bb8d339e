"""docs/metrics.md: every tag that is logged, from the catalog and what each tag says about itself."""

from __future__ import annotations

from dataclasses import dataclass

from attn_monitor.catalog import HEADLINE, STATISTICS
from attn_monitor.scales import RATIO
from attn_monitor.tags import CLIPPED_HEADS, OVERVIEW, PICTURES, PLUGIN, describe_scalar
from tests.docs_pages.blocks import DOCS, row_of, table_of

PAGE = DOCS / "metrics.md"
ALWAYS, DEFAULT, CHOSEN = "always", "by default", "if chosen"
SAMPLED, CLIPPED = "with `max_queries`", "with `mitigation=QKClip(...)`"
LAYER = "<layer>"

OPENING = """# Logged metrics

Written by `python -m tests.docs_pages`. Every scalar of the monitor, for each logger and `trainer.callback_metrics`,
at the same x as `self.log`. `<layer>` is the name of the attention module, as in `model.named_modules()`; a character
that loggers do not take becomes `_`, and the name then ends in six digits or letters. *By default* is what is logged
unless `statistics=` says otherwise, *if chosen* what it may name too. What was not measured is not logged, and what was
measured before and is lost to nan or inf logits is nan.

Before the tags of evaluation stands `val_`, `test_` or `predict_`, and before those of a second monitor on one trainer
`monitor2_`.

## Of each layer

"""
MODEL = """
## Of the model

"""
ON_TOP = """
## In TensorBoard only

The worst head of the whole model, in a group that sorts first:

"""
HEADS = f"""
For each statistic that is logged, and for `{RATIO}`, there are also `{PICTURES}/<name>` (a picture, a cell a head) and
`{PICTURES}_histogram/<name>`, and for everything that was measured the tensor `{PLUGIN}/<name>`, layers x heads.
[Dashboards](dashboards.md) says how to read them.

## Events

What is warned of is no scalar: see [Events](events.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row.

    Attributes:
        tag: Its tag, with `<layer>` where the name of a layer stands.
        when: When it is logged.
        meaning: What it is.
        unit: In which unit, "1" for a pure number.
        worse: Which direction is worse, "-" if neither is.
    """

    tag: str
    when: str
    meaning: str
    unit: str
    worse: str


def of_layers() -> list[Metric]:
    """Return the scalars of a layer: for each statistic the mean over its heads, and the worst one."""
    found = []
    for name, row in STATISTICS.items():
        when = DEFAULT if name in HEADLINE else CHOSEN
        for tag, which in tags_of(name).items():
            meaning = f"[`{name}`](statistics/{name}.md), {which}"
            found.append(Metric(tag=tag, when=when, meaning=meaning, unit=row.unit or "1", worse=row.worse or "-"))
    return found


def tags_of(name: str) -> dict[str, str]:
    """Return the tags of a statistic, each with the head it is of."""
    end, which = {"up": ("_max", "largest head"), "down": ("_min", "smallest head"), None: ("", "")}[
        STATISTICS[name].worse
    ]
    worst = {f"attn_{name}{end}/{LAYER}": which} if end else {}
    return {f"attn_{name}/{LAYER}": "mean over the heads", **worst}


def of_model() -> list[Metric]:
    """Return the scalars of the model."""
    return [
        _of_model(f"{PLUGIN}/saturated_heads", ALWAYS, "up"),
        _of_model(f"{PLUGIN}/observed_layers", ALWAYS, "-"),
        _of_model(f"{PLUGIN}/{RATIO}_max", ALWAYS, "up"),
        _of_model(f"{PLUGIN}/sampling_error_max", SAMPLED, "up"),
        _of_model(CLIPPED_HEADS, CLIPPED, "-"),
    ]


def on_top() -> list[Metric]:
    """Return the scalars of the group that only TensorBoard gets."""
    return [
        _of_model(f"{OVERVIEW}/saturated_heads", ALWAYS, "up"),
        _of_model(f"{OVERVIEW}/{RATIO}_max", ALWAYS, "up"),
        _of_model(f"{OVERVIEW}/entropy_normalized_min", DEFAULT, "down"),
        _of_model(f"{OVERVIEW}/jacobian_trace_min", DEFAULT, "down"),
        _of_model(f"{OVERVIEW}/logit_row_std_max", DEFAULT, "up"),
        _of_model(f"{OVERVIEW}/logit_max_max", DEFAULT, "up"),
    ]


def _of_model(tag: str, when: str, worse: str) -> Metric:
    """Return a row with the words that the tag has in TensorBoard."""
    meaning = describe_scalar(tag).partition(";")[0].partition(":")[0]
    unit = "heads" if tag.endswith("_heads") else "layers" if tag.endswith("_layers") else "1"
    return Metric(tag=tag, when=when, meaning=meaning, unit=unit, worse=worse)


def page() -> str:
    """Return the page."""
    return OPENING + _table(of_layers()) + MODEL + _table(of_model()) + ON_TOP + _table(on_top()) + HEADS


def _table(metrics: list[Metric]) -> str:
    rows = [row_of(f"`{each.tag}`", each.when, each.meaning, each.unit, each.worse) for each in metrics]
    return table_of(("tag", "when", "what", "unit", "worse is"), rows)
