"""Table 3: how the cost grows with heads, length and layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attn_monitor import AttentionProbe
from attn_monitor.workspace import Workspaces
from tests.benchmarks.looks import FULL_SET, HEAD, KERNEL, Case, ways
from tests.benchmarks.model import Attention
from tests.benchmarks.page import paragraph, table, with_halves
from tests.benchmarks.sizes import SEED, Sizes
from tests.benchmarks.turns import Clock, Spread, interleaved, progress, ratios

HEADS = 4
PLAIN, WATCHED = "plain", "watched"


@dataclass(frozen=True)
class Line:
    """One size of what grows: milliseconds without and of the statistics, and their ratio."""

    size: int
    plain: float
    cost: float
    ratio: Spread


def of_statistics(case: Case, size: int, rounds: int, spaces: Workspaces) -> Line:
    """Return the cost of the headline statistics beside that of the kernel."""
    compared = ways(case, 1, spaces)
    return _line(size, {name: compared[name] for name in (KERNEL, HEAD)}, case.rounds(rounds))


def of_layers(layers: int, sizes: Sizes, rounds: int) -> Line:
    """Return the cost of a step through a stack of attention layers, watched, beside the plain step."""
    torch.manual_seed(SEED)
    model = nn.Sequential(*(Attention(HEADS * sizes.dim, HEADS) for _ in range(layers)))
    tokens = torch.randn(1, sizes.lengths[0], HEADS * sizes.dim)
    probe = AttentionProbe(model, statistics=FULL_SET)

    def step() -> None:
        model(tokens).square().mean().backward()
        model.zero_grad()

    def watched_step() -> None:
        with probe:
            step()
        probe.compute()
        probe.reset()

    return _line(layers, {PLAIN: step, WATCHED: watched_step}, 2 * rounds)


def _line(size: int, compared: Mapping[str, Callable[[], object]], rounds: int) -> Line:
    [seconds] = interleaved(compared, rounds, meters=[Clock()], warmup=2)
    plain, other = compared
    middle = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    return Line(size, middle[plain], middle[other], ratios(seconds, plain)[other])


def measured(sizes: Sizes, rounds: int) -> dict[str, list[Line]]:
    """Return the lines by what grows."""
    spaces = Workspaces()
    progress("growth with heads")
    by_heads = [
        of_statistics(Case(1, heads, sizes.lengths[0], sizes.dim, causal=True), heads, rounds, spaces)
        for heads in sizes.growing_heads
    ]
    progress("growth with length")
    by_length = [
        of_statistics(Case(1, HEADS, length, sizes.dim, causal=True), length, rounds, spaces)
        for length in sizes.growing_lengths
    ]
    progress("growth with layers")
    by_layers = [of_layers(layers, sizes, rounds) for layers in sizes.growing_layers]
    return {"heads": by_heads, "length": by_length, "layers": by_layers}


def rows(found: Mapping[str, Sequence[Line]]) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    return [
        (f"{what} {line.size}", f"{line.plain:.2f}", f"{line.cost:.2f}", with_halves(line.ratio))
        for what, lines in found.items()
        for line in lines
    ]


def growth(what: str, lines: Sequence[Line], cost: Callable[[Line], float]) -> str:
    """Say by what factor the cost grew from the first size to the last."""
    first, last = lines[0], lines[-1]
    return f"{last.size / first.size:g} times the {what} cost {cost(last) / cost(first):.1f} times as much"


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page; nothing here is measured in another process."""
    found = measured(sizes, rounds)
    header = ("what grows", "SDPA or plain step, ms", "statistics or watched step, ms", "ratio")
    parts = [
        "## Growth\n",
        setting(sizes),
        table(header, rows(found)),
        reading(sizes, found),
        "Reproduce with `.venv/bin/python -m tests.benchmarks --only growth`.\n",
    ]
    return "\n".join(parts)


def setting(sizes: Sizes) -> str:
    """Say what was measured."""
    length, width = sizes.lengths[0], HEADS * sizes.dim
    return paragraph(
        f"""The headline statistics of a causal attention beside `F.scaled_dot_product_attention`, D {sizes.dim}: with
        heads at T {length}, with length at {HEADS} heads. With layers: a step, forward and backward, through a stack of
        attention layers (width {width}, {HEADS} heads, T {length}) in an `AttentionProbe` that measures the headline
        statistics, gradients included, beside the plain step."""
    )


def reading(sizes: Sizes, found: Mapping[str, Sequence[Line]]) -> str:
    """Say how to read the table."""
    square = (sizes.growing_lengths[-1] / sizes.growing_lengths[0]) ** 2
    return paragraph(
        f"""How to read it: {growth("heads", found["heads"], lambda line: line.cost)}, and
        {growth("length", found["length"], lambda line: line.cost)}, where attention itself grows {square:g} times.
        {growth("layers", found["layers"], lambda line: line.cost - line.plain)}, counting what watching adds to the
        step. A ratio that stays where it is means that the statistics grow as attention itself does."""
    )
