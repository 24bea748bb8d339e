"""Table 4: the first observed step, in which the attention of the model has to be found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attn_monitor import AttentionProbe
from tests.benchmarks.looks import FULL_SET
from tests.benchmarks.model import GPT2, plain_step
from tests.benchmarks.page import paragraph, table, with_halves
from tests.benchmarks.sizes import SEED, ModelSize, Sizes
from tests.benchmarks.turns import Clock, Spread, interleaved, progress, ratios

PLAIN, FIRST, LATER, ATTACHING = "plain", "first", "later", "attaching"
KERNELS = ("sdpa", "eager")


@dataclass(frozen=True)
class Line:
    """One model: its modules, the milliseconds of a plain step, the ratios, and what attaching and detaching takes."""

    size: ModelSize
    kernel: str
    modules: int
    plain: float
    first: Spread
    later: Spread
    attaching: float


def measured(size: ModelSize, kernel: str, rounds: int) -> Line:
    """Return the line of GPT-2 of a size, on one thread."""
    torch.manual_seed(SEED)
    model = GPT2(size)
    model.model.set_attn_implementation(kernel)
    model.train()
    step = plain_step(model, size)

    def observed(probe: AttentionProbe) -> None:
        probe.attach(methods=("training_step",))
        step()
        probe.detach()
        probe.compute()
        probe.reset()

    def attaching() -> None:
        probe = AttentionProbe(model, statistics=FULL_SET)
        probe.attach()
        probe.detach()

    known = AttentionProbe(model, statistics=FULL_SET)
    ways = {
        PLAIN: step,
        FIRST: lambda: observed(AttentionProbe(model, statistics=FULL_SET)),
        LATER: lambda: observed(known),
        ATTACHING: attaching,
    }
    [seconds] = interleaved(ways, rounds, meters=[Clock()], warmup=2)
    middle = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    found = ratios(seconds, PLAIN)
    modules = sum(1 for _ in model.modules())
    return Line(size, kernel, modules, middle[PLAIN], found[FIRST], found[LATER], middle[ATTACHING])


def rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    return [
        (
            f"{line.size.width} x {line.size.context} x {line.size.batch}, {line.kernel}",
            f"{line.modules}",
            f"{line.plain:.0f}",
            with_halves(line.first),
            with_halves(line.later),
            f"{line.attaching:.1f}",
        )
        for line in lines
    ]


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page; nothing here is measured in another process."""
    lines: list[Line] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for width, context, batch in sizes.first_steps:
            size = replace(sizes.deep_model, width=width, context=context, batch=batch)
            for kernel in KERNELS:
                progress(f"first step of {size}, {kernel}")
                lines.append(measured(size, kernel, rounds))
    finally:
        torch.set_num_threads(threads)
    header = ("width x tokens x batch", "modules", "plain step, ms", "first step", "later step", "attach + detach, ms")
    parts = [
        "## The first step\n",
        paragraph(
            f"""GPT-2 of transformers with {sizes.deep_model.layers} layers of {sizes.deep_model.heads} heads, small
            enough for what does not depend on the size to show: a plain step with AdamW, the first observed step, in
            which every module is hooked and every tensor followed until all attention is found, and a later observed
            step. Headline statistics, factors and gradients, up to the finished record. One thread."""
        ),
        table(header, rows(lines)),
        paragraph(
            """How to read it: what an observed step adds to a small model is mostly a constant per function of torch
            that the model calls, a few milliseconds a layer; the attention of small layers is looked at together. That
            more than doubles the step of a toy and is lost in that of a model worth watching. Attaching and detaching
            is measured alone, with no step between."""
        ),
        "Reproduce with `.venv/bin/python -m tests.benchmarks --only first`.\n",
    ]
    return "\n".join(parts)
