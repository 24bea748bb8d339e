"""Table 5: what making one record of several processes costs, and how much of it is the collective."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed as dist

from attn_monitor.catalog import FACTORS, HEADLINE
from attn_monitor.metric import AttentionMetric
from attn_monitor.ranks import RankReduction, Seen
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_sums
from tests.benchmarks.page import halves, paragraph, table
from tests.benchmarks.sizes import SEED, Sizes
from tests.benchmarks.turns import Spread, progress

MODELS = ((12, 12), (80, 64))
QUICK_MODELS = ((2, 3), (3, 2))
RANKS = (2, 4)
QUICK_RANKS = (2,)
WARMUP = 2
_STATISTICS = frozenset(HEADLINE) | frozenset(FACTORS)


def seen(layers: int, heads: int) -> Seen:
    """Return what a rank saw: the sums of every layer, without gradients, which take the same room."""
    call = AttentionCall(query=torch.randn(1, heads, 5, 8), key=torch.randn(1, heads, 5, 8), head_dim=8)
    sums = attention_sums(call, _STATISTICS)
    return Seen(sums={f"model.decoder.layers.{layer}.self_attn": sums for layer in range(layers)})


def timed(rank: int, world: int, folder: str, models: Sequence[tuple[int, int]], rounds: int, to: Connection) -> None:
    """Measure on one rank and send the milliseconds of every round: alone, reduced, and the gather by itself."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined] # torch has no hints for it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    found = []
    for layers, heads in models:
        here, ranks = seen(layers, heads), RankReduction()
        metric = AttentionMetric(_STATISTICS)
        metric.update(here.sums)
        received = [torch.empty_like(metric.packed) for _ in range(world)]
        times = []
        for _ in range(WARMUP + rounds):
            dist.barrier()
            start = time.perf_counter()
            alone = AttentionMetric(_STATISTICS)
            alone.update(here.sums)
            alone.compute()
            dist.barrier()
            between = time.perf_counter()
            ranks.reduce(here, _STATISTICS)
            dist.barrier()
            reduced = time.perf_counter()
            dist.all_gather(received, metric.packed)
            dist.barrier()
            end = time.perf_counter()
            times.append([1e3 * (between - start), 1e3 * (reduced - between), 1e3 * (end - reduced)])
        found.append((times[WARMUP:], metric.packed.numel() * 8 / 2**20))
    to.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int, models: Sequence[tuple[int, int]], rounds: int) -> list[tuple[str, ...]]:
    """Return the rows of the table for a number of ranks, as the first of them saw it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        others, dropped = context.Pipe(duplex=False)
        given = (world, str(Path(folder)), models, rounds)
        workers = [context.Process(target=timed, args=(r, *given, dropped if r else sender)) for r in range(world)]
        for worker in workers:
            worker.start()
        with closing(receiver), closing(others):
            found = receiver.recv()
            for worker in workers:
                worker.join()
    rows = []
    for (layers, heads), (times, mebibytes) in zip(models, found, strict=True):
        alone, reduced, gather = (Spread.of([one[kind] for one in times]) for kind in range(3))
        cells = [cell for spread in (alone, reduced, gather) for cell in (f"{spread.median:.1f}", halves(spread, 1))]
        rows.append((f"{layers} layers x {heads} heads, {world} ranks", *cells, f"{mebibytes:.2f}"))
    return rows


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page."""
    models, worlds = (QUICK_MODELS, QUICK_RANKS) if quick else (MODELS, RANKS)
    rows = []
    for world in worlds:
        progress(f"records of {world} ranks")
        rows += measured(world, models, 2 if quick else 3 * rounds)
    header = (
        "record",
        "of one rank, ms",
        "middle half",
        "of all, ms",
        "middle half",
        "gather alone, ms",
        "middle half",
    )
    return "\n".join(
        [
            "## Several processes\n",
            paragraph(
                f"""What one record costs once the sums of every layer are there: made of the sums of one rank, and of
                those of all ranks by one `all_gather` of one tensor; beside it, that gather alone. All ranks are
                processes of this one machine with one thread each and talk over gloo, so that with more ranks than the
                {torch.get_num_threads()} threads that are measured elsewhere on this page they wait for each other's
                turn on a core. The number of collectives is the same for any number of layers and heads."""
            ),
            table((*header, "MiB a rank sends"), rows),
            "Reproduce with `.venv/bin/python -m tests.benchmarks --only ranks`. Other work on the cores shows.\n",
        ]
    )
