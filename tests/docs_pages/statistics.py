"""The pages of docs/statistics: what the catalog knows of each, and how it looked in two trainings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from attn_monitor.catalog import GRADIENTS, HEADLINE, STATISTICS, Statistic
from attn_monitor.scales import scale_of
from tests.docs_pages.blocks import DOCS, filled, row_of, table_of
from tests.docs_pages.metrics import tags_of
from tests.docs_pages.runs import COMMANDS, Run

OVERVIEW = DOCS / "statistics.md"
FOLDER = DOCS / "statistics"
PICTURES = DOCS / "images" / "statistics"
SICK, HEALTHY = "1_unscaled", "3_qk_norm"
SHOWN = (0, 9, 19, 99, 299)
"""The steps whose values a page lists."""


def catalog_table() -> str:
    """Return the catalog as the table of the overview."""
    rows = [
        row_of(
            f"[`{row.name}`](statistics/{row.name}.md)",
            row.definition,
            row.unit or "-",
            value_range(row),
            row.worse or "-",
        )
        for row in STATISTICS.values()
    ]
    return table_of(("name", "over allowed entries", "unit", "range", "worse is"), rows)


def value_range(row: Statistic) -> str:
    """Return the range of a statistic in words."""
    if row.low is None:
        return "any"
    return f"{row.low:g} to {row.high}" if row.high else f"at least {row.low:g}"


def facts(name: str) -> str:
    """Return what the catalog knows of a statistic."""
    row = STATISTICS[name]
    worse = {"up": "larger", "down": "smaller", None: "neither direction"}[row.worse]
    logged = "by default" if name in HEADLINE else f'with `statistics=["{name}", ...]`'
    rows = [
        row_of("over allowed entries", row.definition),
        row_of("shape", "`[H]`, one number per query head"),
        row_of("unit", row.unit or "a pure number"),
        row_of("range", value_range(row)),
        row_of("worse is", worse),
        row_of("needs", "the backward pass" if name in GRADIENTS else "the forward pass"),
        row_of("logged", f"{logged}, as {', '.join(f'`{tag}` ({which})' for tag, which in tags_of(name).items())}"),
        row_of("colours", f"in pictures and the Attention tab {scale_of(name).describe()}"),
    ]
    return table_of((f"`{name}`", ""), rows)


def seen(name: str, runs: Mapping[str, Run]) -> str:
    """Return how a statistic looked in the collapsing and in the healthy training."""
    rows = []
    for run in (HEALTHY, SICK):
        for label, choose in (("median head", _median), ("lowest", min), ("highest", max)):
            values = [choose([v for v in runs[run].at(step, name) if math.isfinite(v)]) for step in SHOWN]
            rows.append(row_of(f"{'healthy' if run == HEALTHY else 'sick'}, {label}", *map(number, values)))
    return (
        f"![{name} of every head in a healthy and in a collapsing training](../images/statistics/{name}.png)\n\n"
        + table_of((f"`{name}` at step", *map(str, SHOWN)), rows)
        + f"\nAll 16 heads of two trainings of one small GPT. Healthy: `{COMMANDS[HEALTHY]}`. Sick:\n"
        f"`{COMMANDS[SICK]}`, followed in [Debugging an unstable run](../debugging.md).\n"
    )


def number(value: float) -> str:
    """Return a number in three digits."""
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.1e}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def draw(name: str, runs: Mapping[str, Run], folder: Path = PICTURES) -> None:
    """Draw every head of both trainings."""
    from matplotlib.figure import Figure
    from PIL import Image

    kind = scale_of(name).kind
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, run, colour, title in zip(
        axes, (HEALTHY, SICK), ("#2166ac", "#d95f02"), ("healthy", "collapsing"), strict=True
    ):
        axis.plot(runs[run].steps, runs[run].heads[name], color=colour, linewidth=0.8, alpha=0.7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(name, fontsize=9)
    if kind == "log":
        axes[0].set_yscale("log")
    elif kind == "signed":
        axes[0].set_yscale("symlog", linthresh=1)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=100, metadata={"Software": None})
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(64).save(path, optimize=True)


def written(name: str, runs: Mapping[str, Run] | None = None) -> str:
    """Return the page of a statistic with its parts as they are to be; without trainings only what is known anyway."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return filled(text, {"facts": facts(name)} | ({} if runs is None else {"seen": seen(name, runs)}))


def overview() -> str:
    """Return the overview with its table as the catalog has it."""
    return filled(OVERVIEW.read_text(encoding="utf-8"), {"catalog": catalog_table()})
