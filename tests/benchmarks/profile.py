"""Where the time of an observed step goes, part by part, and how much of it is the floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from attn_monitor import AttentionMonitor, AttentionProbe
from attn_monitor import looks as engine
from attn_monitor.pooling import pooled
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_rows
from attn_monitor.workspace import Workspaces
from tests.benchmarks.looks import FORWARD_SET, FULL_SET, Case, floor
from tests.benchmarks.model import GPT, plain_step
from tests.benchmarks.page import NONE, paragraph, table
from tests.benchmarks.sizes import SEED, ModelSize, Sizes
from tests.benchmarks.training import train
from tests.benchmarks.turns import Clock, excess, interleaved, progress

T = TypeVar("T")
THREADS = (1, 2)
PLAIN, SEEN, FORWARD, WATCHED = "plain", "seen", "forward", "watched"
FLOOR, BOTH_FLOOR = "floor", "floor of both"
CALLBACK = "callback"

STEP = "unwatched step"
SEEING = "seeing and following, nothing computed"
STATISTICS = "forward statistics"
OF_FORWARD = "- floor: product and exponential"
OTHER_FORWARD = "- other passes"
GRADIENTS = "gradients, in the same look"
OF_GRADIENTS = "- floor: the product of gradient and values"
OTHER_GRADIENTS = "- other passes of the gradients"
RECORD = "making the record"
REST = "what no part accounts for"
PUBLISHING = "the callback: deciding, judging, logging"
TOTAL = "all that watching adds"
PARTS = (SEEING, STATISTICS, GRADIENTS, RECORD, REST, PUBLISHING)
ROWS = (
    *(STEP, SEEING, STATISTICS, OF_FORWARD, OTHER_FORWARD, GRADIENTS, OF_GRADIENTS, OTHER_GRADIENTS),
    *(RECORD, REST, PUBLISHING, TOTAL),
)


class Stopwatch:
    """Measures the seconds spent inside some functions."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def start(self) -> None:
        """Begin at 0."""
        self._seconds = 0.0

    def stop(self) -> float:
        """Return the seconds since the start."""
        return self._seconds

    def timed(self, function: Callable[..., T], sign: int = 1) -> Callable[..., T]:
        """Return a function whose time counts; with sign -1, inside another, it does not."""

        def run(*args: Any, **kwargs: Any) -> T:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += sign * (time.perf_counter() - started)

        return run


class TimedMonitor(AttentionMonitor):
    """The callback, whose hooks are timed.

    Args:
        watch: Measures them.
    """

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__(every_n_steps=1)
        self._watch = watch

    def on_train_batch_start(self, *args: Any) -> None:
        self._watch.timed(super().on_train_batch_start)(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        self._watch.timed(super().on_train_batch_end)(*args)


@dataclass(frozen=True)
class Profile:
    """Milliseconds of each row of the table, at some number of threads."""

    threads: int
    milliseconds: Mapping[str, float]

    def share(self, *names: str) -> float:
        """Return the share of some parts in all that watching adds."""
        return sum(self.milliseconds[name] for name in names) / self.milliseconds[TOTAL]


def measured(size: ModelSize, rounds: int, threads: int) -> Profile:
    """Return the profile of the observed step of a model."""
    torch.manual_seed(SEED)
    looking, recording = Stopwatch(), Stopwatch()
    ways = _ways(size, looking, recording)
    seconds, looks, records = interleaved(ways, rounds, meters=[Clock(), looking, recording])
    found = {
        STEP: statistics.median(seconds[PLAIN]),
        SEEING: excess(seconds, PLAIN)[SEEN],
        STATISTICS: statistics.median(looks[FORWARD]),
        OF_FORWARD: statistics.median(seconds[FLOOR]),
        GRADIENTS: excess(looks, FORWARD)[WATCHED],
        OF_GRADIENTS: excess(seconds, FLOOR)[BOTH_FLOOR],
        RECORD: statistics.median(records[WATCHED]),
        PUBLISHING: _publishing(size, rounds),
    }
    found[OTHER_FORWARD] = found[STATISTICS] - found[OF_FORWARD]
    found[OTHER_GRADIENTS] = found[GRADIENTS] - found[OF_GRADIENTS]
    added = excess(seconds, PLAIN)[WATCHED]
    found[REST] = added - sum(found[part] for part in (SEEING, STATISTICS, GRADIENTS, RECORD))
    found[TOTAL] = added + found[PUBLISHING]
    return Profile(threads, {name: found[name] * 1e3 for name in ROWS})


def _publishing(size: ModelSize, rounds: int) -> float:
    """Return the seconds a step spends in the callback's hooks, without what the probe does in them."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for name in ("attach", "detach", "compute", "reset"):
            stack.enter_context(patch.object(AttentionProbe, name, _inside(getattr(AttentionProbe, name), watch)))
        return statistics.median(train(GPT, size, {CALLBACK: TimedMonitor(watch)}, rounds, watch)[CALLBACK])


def _inside(method: Callable[..., Any], watch: Stopwatch) -> Callable[..., Any]:
    """Return a method whose time does not count, as a function that still becomes a method."""

    def run(probe: AttentionProbe, *args: Any, **kwargs: Any) -> Any:
        return watch.timed(method, -1)(probe, *args, **kwargs)

    return run


def _ways(size: ModelSize, looking: Stopwatch, recording: Stopwatch) -> dict[str, Callable[[], object]]:
    """Return the steps of a plain loop that take turns, and what their statistics cannot do without."""
    model = GPT(size).train()
    step = plain_step(model, size)

    def watched(probe: AttentionProbe) -> None:
        with patch.object(engine, "attention_rows", looking.timed(attention_rows)):
            probe.attach(methods=("training_step",))
            step()
            probe.detach()
        recording.timed(probe.compute)()
        probe.reset()

    def seen(probe: AttentionProbe) -> None:
        with _nothing_computed():
            watched(probe)

    with patch.object(engine, "pooled", recording.timed(pooled)):
        blind, full = (AttentionProbe(model, statistics=FULL_SET) for _ in range(2))
        forward = AttentionProbe(model, statistics=FORWARD_SET)
    calls = _calls(size)
    spaces = Workspaces()
    return {
        PLAIN: step,
        SEEN: partial(seen, blind),
        FORWARD: partial(watched, forward),
        WATCHED: partial(watched, full),
        FLOOR: lambda: [floor(call, spaces) for call, _ in calls],
        BOTH_FLOOR: lambda: [floor(call, spaces, grad) for call, grad in calls],
    }


def _calls(size: ModelSize) -> list[tuple[AttentionCall, torch.Tensor]]:
    """Return the attention of each layer, with a gradient of its output."""
    case = Case(size.batch, size.heads, size.context, size.width // size.heads, causal=True)
    query, key, value, grad_output = case.tensors()
    call = AttentionCall(query=query, key=key, value=value, scale=case.dim**-0.5, is_causal=True)
    return [(call, grad_output)] * size.layers


@contextmanager
def _nothing_computed() -> Iterator[None]:
    """Let everything be seen, followed and hooked, and nothing be looked at."""
    with patch.object(engine.Looks, "look", lambda *_: None):
        yield


def rows(profiles: Sequence[Profile]) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    return [(row, *(cell for profile in profiles for cell in _cells(profile, row))) for row in ROWS]


def _cells(profile: Profile, row: str) -> tuple[str, str]:
    share = NONE if row == STEP else f"{100 * profile.share(row):.0f} %"
    return f"{profile.milliseconds[row]:.1f}", share


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page; nothing here is measured in another process."""
    before = torch.get_num_threads()
    profiles: list[Profile] = []
    rounds = max(2, rounds // 2)
    try:
        for threads in THREADS:
            progress(f"profile of the step, threads: {threads}")
            torch.set_num_threads(threads)
            profiles.append(measured(sizes.model, rounds, threads))
    finally:
        torch.set_num_threads(before)
    names = {1: "one thread", 2: "two threads"}
    header = ["part", *(cell for threads in THREADS for cell in (f"{names[threads]}, ms", "share of what is added"))]
    parts = [
        "## Where an observed step spends its time\n",
        setting(sizes, rounds),
        table(header, rows(profiles)),
        reading(profiles),
        "Reproduce with `.venv/bin/python -m tests.benchmarks --only profile`.\n",
    ]
    return "\n".join(parts)


def setting(sizes: Sizes, rounds: int) -> str:
    """Say what was measured."""
    return paragraph(
        f"""The model of the table above ({sizes.model}) in a plain loop without Lightning: unwatched, with everything
        seen and followed and nothing computed, with the forward statistics, and with all that is measured by default.
        The steps take turns. Statistics and record are timed inside the watched steps, seeing is the difference of two
        steps, and the callback is what its hooks do in a `Trainer` besides. {rounds} rounds."""
    )


def reading(profiles: Sequence[Profile]) -> str:
    """Say how to read the table, with its numbers."""
    shares = " and ".join(f"{100 * profile.share(OF_FORWARD, OF_GRADIENTS):.0f} %" for profile in profiles)
    passes = " and ".join(f"{100 * profile.share(OTHER_FORWARD, OTHER_GRADIENTS):.0f} %" for profile in profiles)
    least = " and ".join(
        f"{1 + profile.milliseconds[TOTAL] * profile.share(OF_FORWARD, OF_GRADIENTS) / profile.milliseconds[STEP]:.2f}"
        for profile in profiles
    )
    return paragraph(
        f"""How to read it: *floor* is what exact numbers cannot do without where a fused kernel hands out no logits,
        computed on the same tiles by the same operations of torch: one product of query and key and one exponential for
        every allowed entry, and for the gradients the product of the output's gradient and the values. It is {shares}
        of what watching adds; a monitor that did nothing else would make the step {least} times as long. The other
        passes over the tiles (row sums, extrema, moments, norms, the way back through the softmax) are {passes}. What
        no part accounts for is what the model's own operations take longer beside ours, hooks in the backward pass, and
        the noise of two steps, which is all of seeing as well where it comes out below 0."""
    )
