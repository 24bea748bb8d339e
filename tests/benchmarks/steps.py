"""Table 1: what watching costs a training step, in time and in memory, beside what a user would do instead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import pytorch_lightning as pl

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import STATISTICS
from tests.benchmarks.memory import Peak, in_fresh_process
from tests.benchmarks.model import GPT, GPT2, Decoder
from tests.benchmarks.page import NONE, halves, mebibytes, paragraph, table
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.training import train
from tests.benchmarks.turns import Clock, Meter, Spread, excess, progress, ratios
from tests.benchmarks.watchers import ActivationMonitor, GradientNorms, NaiveHook, OutputAttentions

NEVER = 10**9
CADENCE = 50  # Lightning's default `log_every_n_steps`

BASE = "unwatched"
CONTROL = "unwatched, a second time"
IDLE = "monitor, step not observed"
COMPUTED = f"monitor, 1 step of {CADENCE}, the default (computed)"
FORWARD = "monitor, `gradients=False`"
OBSERVED = "monitor, as it is by default"
EVERYTHING = "monitor, all statistics"
SAMPLED = "monitor, `max_queries={}`"
BY_HAND = "hook that materialises logits and softmax"
ACTIVATIONS = "`DebugUnderflowOverflow` of transformers"
GRADIENTS = "`grad_norm` of Lightning"
GPT2_BASE = "GPT-2: unwatched, `sdpa`"
GPT2_OUTPUT = "GPT-2: eager, `output_attentions=True`, entropy"
GPT2_OBSERVED = "GPT-2: monitor, as it is by default, `sdpa`"


@dataclass(frozen=True)
class Line:
    """What is known of one way: its ratio to the unwatched step, its time, its peak memory above the unwatched step."""

    name: str
    ratio: Spread
    milliseconds: float
    memory: float | None


def trainings(sizes: Sizes) -> dict[type[Decoder], dict[str, pl.Callback | None]]:
    """Return the ways to watch each model; the first one is what the others are compared with."""
    ours: dict[str, pl.Callback | None] = {
        BASE: None,
        CONTROL: None,
        IDLE: AttentionMonitor(every_n_steps=NEVER),
        FORWARD: AttentionMonitor(every_n_steps=1, gradients=False),
        OBSERVED: AttentionMonitor(every_n_steps=1),
        EVERYTHING: AttentionMonitor(every_n_steps=1, statistics=list(STATISTICS)),
        SAMPLED.format(sizes.max_queries): AttentionMonitor(every_n_steps=1, max_queries=sizes.max_queries),
        BY_HAND: NaiveHook(),
        ACTIVATIONS: ActivationMonitor(),
        GRADIENTS: GradientNorms(),
    }
    theirs: dict[str, pl.Callback | None] = {
        GPT2_BASE: None,
        GPT2_OUTPUT: OutputAttentions(),
        GPT2_OBSERVED: AttentionMonitor(every_n_steps=1),
    }
    return {GPT: ours, GPT2: theirs}


def measured(sizes: Sizes, rounds: int, meter: Meter) -> list[dict[str, list[float]]]:
    """Return what was measured of each way, for each training."""
    return [train(kind, sizes.model, ways, rounds, meter) for kind, ways in trainings(sizes).items()]


def peaks(sizes: Sizes) -> dict[str, float]:
    """Return by how many MiB each way's peak lies above that of the unwatched step; run in a process made for it."""
    return {
        name: size
        for found in measured(sizes, sizes.memory_rounds, Peak())
        for name, size in excess(found, next(iter(found))).items()
    }


def lines(seconds: list[dict[str, list[float]]], memory: Mapping[str, float] | None) -> list[Line]:
    """Return the lines of the table."""
    return [
        Line(name, ratio, statistics.median(found[name]) * 1e3, None if memory is None else memory[name])
        for found in seconds
        for name, ratio in ratios(found, next(iter(found))).items()
    ]


def rows(found: list[Line]) -> list[tuple[str, ...]]:
    """Return the rows of the table; what follows from two others stands below the idle step."""
    cells: list[tuple[str, ...]] = []
    ratio = {line.name: line.ratio.median for line in found}
    for line in found:
        base = line.name in (BASE, GPT2_BASE)
        spread, memory = (NONE, NONE) if base else (halves(line.ratio), mebibytes(line.memory))
        cells.append((line.name, f"{line.ratio.median:.3f}", spread, f"{line.milliseconds:.0f}", memory))
        if line.name == IDLE:
            amortised = ratio[IDLE] + (ratio[OBSERVED] - ratio[IDLE]) / CADENCE
            cells.append((COMPUTED, f"{amortised:.3f}", NONE, NONE, NONE))
    return cells


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page."""
    seconds = measured(sizes, rounds, Clock())
    progress("peak memory of the steps")
    memory: Mapping[str, float] | None = in_fresh_process("steps", rounds, quick=quick)
    header = ("step", "ratio", "middle half", "median, ms", "peak memory above it, MiB")
    parts = [
        "## The training step\n",
        setting(sizes, rounds),
        table(header, rows(lines(seconds, memory))),
        reading(sizes),
        "Reproduce with `.venv/bin/python -m tests.benchmarks --only steps`.\n",
    ]
    return "\n".join(parts)


def setting(sizes: Sizes, rounds: int) -> str:
    """Say what was measured."""
    return paragraph(
        f"""Forward pass, loss, backward pass, AdamW, and what each way writes to TensorBoard, in a Lightning `Trainer`:
        a GPT with {sizes.model}, and in a second training GPT-2 of the same shape from transformers, which is compared
        with its own unwatched step. {rounds} rounds. But for the idle and the computed one, each row watches every
        step."""
    )


def reading(sizes: Sizes) -> str:
    """Say how to read the table."""
    return paragraph(
        f"""How to read it: a ratio of 1.10 means that a watched step takes 10 % longer. What the second unwatched row
        is off by is noise, and as much of the others is. The computed row is the idle ratio and 1/{CADENCE} of what an
        observed step adds to it. By default the monitor measures the headline statistics of every head exactly,
        gradients included. The others measure less: the hook the standard deviation, the largest logit and the entropy;
        GPT-2 the entropy, for which it gives up the fused kernel; `DebugUnderflowOverflow` the extrema of every
        module's weights, inputs and outputs; `grad_norm` the norm of each parameter's gradient. The last two see no
        logit. Peak memory is the highest resident size within a step minus that of the unwatched step of the same
        round, in a process of its own whose freed buffers go back to the system at once ({sizes.memory_rounds}
        rounds)."""
    )
