"""Table 2: what the statistics of one attention cost, compared with the fused kernel on the same tensors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from attn_monitor.catalog import ALL, FACTORS, GRADIENTS, HEADLINE
from attn_monitor.sums import AttentionSums
from attn_monitor.workspace import Workspaces
from tests.benchmarks.exact import exact_statistics
from tests.benchmarks.looks import (
    BACKWARD,
    EVERYTHING,
    FLOOR,
    FORWARD_SET,
    FULL_SET,
    HEAD,
    KERNEL,
    SAMPLED,
    Case,
    cases,
    is_long,
    ways,
)
from tests.benchmarks.memory import Peak, in_fresh_process
from tests.benchmarks.page import NONE, mebibytes, paragraph, table, with_halves
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.turns import Clock, Meter, interleaved, progress, ratios


@dataclass(frozen=True)
class Line:
    """What was measured of one case: the seconds of each way, the largest relative error, and the peaks in MiB."""

    case: Case
    seconds: Mapping[str, list[float]]
    error: float
    memory: Mapping[str, float] | None = None


def measured(case: Case, sizes: Sizes, rounds: int, spaces: Workspaces | None, meters: Sequence[Meter]) -> Line:
    """Return the times of a case, how exact it is, and the peaks if the second meter measures them."""
    progress(f"{case}, {case.rounds(rounds)} rounds")
    long = is_long(case, sizes)
    compared = {
        name: way for name, way in ways(case, sizes.max_queries, spaces).items() if name != EVERYTHING or not long
    }
    kept: dict[str, AttentionSums | Tensor] = {}

    def keeping(name: str) -> None:
        kept[name] = compared[name]()

    turns = {name: partial(keeping, name) for name in compared}
    seconds, *peaks = interleaved(turns, case.rounds(rounds), meters=meters, warmup=int(not long))
    sums = kept[BACKWARD]
    assert isinstance(sums, AttentionSums), "that way returns sums"
    off = error(sums, case, case.heads if case.length <= sizes.exact_length else 1)
    memory = {name: statistics.median(peaks[0][name]) for name in (HEAD, BACKWARD)} if peaks else None
    return Line(case, seconds, off, memory)


def error(sums: AttentionSums, case: Case, heads: int) -> float:
    """Return the largest relative error of any headline statistic or factor of the first heads."""
    found = sums.finalize(FULL_SET).measured()
    exact = exact_statistics(*(tensor[:, :heads] for tensor in case.tensors()), causal=case.causal)
    return max(float(((found[name][:heads] - wanted) / wanted).abs().max()) for name, wanted in exact.items())


# -- in a process of its own ------------------------------------------------------------------------------------------


def in_this_process(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Return, as plain values by case, the peaks of short cases and all of long ones; run in a process made for it."""
    for way in ways(cases(sizes)[0], sizes.max_queries).values():
        way()  # threads, and what libraries keep
    found: dict[str, Any] = {}
    for case in cases(sizes):
        if is_long(case, sizes):
            line = measured(case, sizes, rounds, None, [Clock(), Peak(above=True)])
            found[case.name] = {"seconds": line.seconds, "error": line.error, "memory": line.memory}
        else:
            found[case.name] = {"memory": peaks(case, sizes)}
    return found


def peaks(case: Case, sizes: Sizes) -> dict[str, float]:
    """Return by how many MiB the peak of each look lies above what was there before, if it finds no memory there."""
    compared = ways(case, sizes.max_queries)
    looks = {name: compared[name] for name in (HEAD, BACKWARD)}
    [found] = interleaved(looks, sizes.memory_rounds, meters=[Peak(above=True)], warmup=0)
    return {name: statistics.median(values) for name, values in found.items()}


def lines(sizes: Sizes, rounds: int, *, quick: bool) -> list[Line]:
    """Return the lines of the table."""
    spaces = Workspaces()
    short = {
        case.name: measured(case, sizes, rounds, spaces, [Clock()]) for case in cases(sizes) if not is_long(case, sizes)
    }
    apart: Mapping[str, dict[str, Any]] | None = in_fresh_process("alone", rounds, quick=quick)
    found: list[Line] = []
    for case in cases(sizes):
        if case.name in short:
            found.append(short[case.name] if apart is None else replace(short[case.name], **apart[case.name]))
        elif apart is not None:
            found.append(Line(case, **apart[case.name]))
        else:
            found.append(measured(case, sizes, rounds, None, [Clock()]))
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def rows(found: list[Line]) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    cells: list[tuple[str, ...]] = []
    for line in found:
        case, compared = line.case, ratios(line.seconds, KERNEL)
        shape = f"{case.batch} x {case.heads} x {case.length}{', causal' if case.causal else ''}"
        kernel = f"{statistics.median(line.seconds[KERNEL]) * 1e3:.1f}"
        looks = [
            with_halves(compared[name]) if name in compared else NONE
            for name in (FLOOR, HEAD, EVERYTHING, BACKWARD, SAMPLED)
        ]
        memory = [mebibytes(None if line.memory is None else line.memory[name]) for name in (HEAD, BACKWARD)]
        cells.append((shape, kernel, *looks, *memory, f"{line.error:.0e}"))
    return cells


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page."""
    found = lines(sizes, rounds, quick=quick)
    header = (
        *(
            "B x heads x T",
            "SDPA, ms",
            FLOOR,
            HEAD,
            EVERYTHING,
            BACKWARD,
            f"the same, `max_queries={sizes.max_queries}`",
        ),
        *("MiB, headline", "MiB, with gradients", "relative error"),
    )
    parts = [
        "## The statistics alone\n",
        setting(sizes, rounds, found),
        table(header, rows(found)),
        reading(sizes),
        "Reproduce with `.venv/bin/python -m tests.benchmarks --only alone`.\n",
    ]
    return "\n".join(parts)


def setting(sizes: Sizes, rounds: int, found: list[Line]) -> str:
    """Say what was measured."""
    times = [line.case.rounds(rounds) for line in found]
    return paragraph(
        f"""One look at an attention, D {sizes.dim}, as a ratio to one forward pass of `F.scaled_dot_product_attention`
        with the same tensors. The first shape is that of the training step above. {times[0]} rounds there, then from
        {max(times[2:])} at the shortest length down to {times[-1]} at the longest."""
    )


def reading(sizes: Sizes) -> str:
    """Say how to read the table."""
    names = ", ".join(f"`{name}`" for name in (*HEADLINE, *FACTORS) if name in FORWARD_SET)
    return paragraph(
        f"""How to read it: *headline* is what the monitor logs of a forward pass by default, with the factors
        ({names}); *all statistics* are the {len(ALL - GRADIENTS)} of a forward pass; *with gradients* is one look
        that serves both passes. The kernel computes a product, a softmax and a second product. *floor* is the first
        two alone, on the same tiles and by the same operations of torch: what an exact look in plain torch cannot do
        without. The statistics need some passes over the result as well, the gradients one more product. Memory is
        the peak of the process above what it held before the look, with no memory of an earlier look at hand; one
        matrix of T x T takes 1 MiB per head at T 512 and 4096 MiB at T 32768. Beyond T {sizes.short_length} time and
        memory are of the same runs, and *all statistics* are left out, which keeps the whole benchmark short. The
        error is the largest of any headline statistic or factor, gradients included, of any head (of the first head
        beyond T {sizes.exact_length}), against a float64 computation that shares no code with the package; inputs are
        standard normal."""
    )
