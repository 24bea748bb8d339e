"""The limits of docs/thresholds.md, from the code that has them."""

from __future__ import annotations

import math

from attn_monitor.audit import UNIFORM
from attn_monitor.diagnosis import SAFE_SCALE, SINK
from attn_monitor.judge import NEAR
from attn_monitor.records import FLOAT16_MAX
from attn_monitor.saturation import SaturationRule
from attn_monitor.severity import CAPPED, COLLAPSED
from attn_monitor.tracking import OVERFLOW_AHEAD
from tests.docs_pages.blocks import DOCS, filled, row_of, table_of

PAGE = DOCS / "thresholds.md"
KEYS, DIMS = (128, 1024, 4096), (32, 64, 128)


def limits() -> str:
    """Return the table of limits."""
    rule, critical = SaturationRule(), SaturationRule(relative_to="critical")
    low, high = SAFE_SCALE
    half_range = f"{OVERFLOW_AHEAD:g} x {FLOAT16_MAX:g}"
    rows = [
        (
            "a head is saturated",
            f"`logit_row_std` > {rule.default_limit:g} sqrt(d_k)",
            "`SaturationRule(threshold=)`",
            "[near the point of condensation](#half-of-sqrtd_k)",
        ),
        (
            'the same, `d_k` unknown or `relative_to="critical"`',
            f"`critical_ratio` > {critical.default_limit:g}",
            "`SaturationRule(threshold=)`",
            "[condensation](#half-of-sqrtd_k) itself, by row length",
        ),
        (
            "an event ends",
            f"below {rule.release:g} of its limit",
            "`SaturationRule(release=)`",
            "so that a head at the limit does not come and go",
        ),
        (
            "every step is observed",
            f"a head above {NEAR:g} of its limit",
            "`adaptive_steps=0` turns it off",
            "as for the end of an event; [bounded](events.md#what-can-be-done-automatically)",
        ),
        (
            "critical",
            f"mean `jacobian_trace` over the model's heads < {COLLAPSED:g}",
            "fixed",
            "[measured](#a-mean-trace-of-045)",
        ),
        (
            "critical, softcap",
            f"`qk_std` > {CAPPED:g} `logit_std` for the median head",
            "fixed",
            "[measured](alarms.md)",
        ),
        ("a head rests on a sink", f"`sink_mass` > {SINK:g}", "fixed", "[events](events.md)"),
        ("float16 overflow ahead", f"largest logit > {half_range}", "fixed", "[range of float16](#65504)"),
        (
            "scale audit",
            f"`scale_ratio` outside {low:g} to {high:g}",
            "fixed",
            "the trainings with 0.8 and 1.2 of the scale in [Why sqrt(d_k)](why_sqrt_dk.md) differ by nothing clear",
        ),
        (
            "uniform attention",
            f"`entropy_normalized` > {UNIFORM:g} in every head, for long",
            "fixed",
            "[events](events.md)",
        ),
    ]
    return table_of(("what", "when", "to change", "where from"), [row_of(*row) for row in rows])


def condensation() -> str:
    """Return where softmax condenses, as a share of sqrt(d_k)."""
    rows = [
        row_of(str(keys), f"{spread:.2f}", *(f"{spread / math.sqrt(dim):.2f}" for dim in DIMS))
        for keys in KEYS
        for spread in [math.sqrt(2 * math.log(keys))]
    ]
    return table_of(("keys n", "sqrt(2 ln n)", *(f"of sqrt({dim})" for dim in DIMS)), rows)


def written() -> str:
    """Return the page with its numbers as the code has them."""
    return filled(PAGE.read_text(encoding="utf-8"), {"limits": limits(), "condensation": condensation()})
