"""Threads that compute tiles side by side on a CPU, one tile each.

A tile takes some twenty operations. Split over threads, each of them ends in a barrier, which costs as much as the
arithmetic where tiles are small, and far more where another process has one of the cores. Whole tiles need none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from attn_monitor.unseen import unseen

MOST_WORKERS = 8
"""Beyond this many, threads would wait for the interpreter's lock rather than compute."""
WORTH_THREADS = 2**22
"""Entries from which threads gain more than it costs to wake them."""
Job = Callable[[], None]


def workers(device: torch.device, entries: int) -> int:
    """Return how many tiles of a call are computed at the same time: no more than the user gives torch threads.

    Args:
        device: Where the call is.
        entries: How many entries its logits have.
    """
    if device.type != "cpu" or entries < WORTH_THREADS:
        return 1
    return min(torch.get_num_threads(), MOST_WORKERS)


def run(jobs: Iterator[Job], count: int) -> None:
    """Run jobs that write to different places, each in one thread, and return when all are done.

    Args:
        jobs: Computed without gradients, unseen by modes. They are made one at a time, when a thread is free.
        count: How many threads; with 1 the caller's own does all of it.

    Raises:
        Exception: Whatever a job raised first; jobs that have not begun by then never do.
    """
    if count < 2:
        for job in jobs:
            job()
        return
    queue = _Queue(jobs)
    inference = torch.is_inference_mode_enabled()
    futures = [_crews.of(count).submit(_work, queue, inference) for _ in range(count)]
    try:
        wait(futures)
    finally:  # where the user interrupts it, no thread may go on with memory that is given back
        queue.close()
        wait(futures)
    for future in futures:
        future.result()


class _Queue:
    """Hands out jobs to several threads.

    Args:
        jobs: The jobs.
    """

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._closed = False

    def next(self) -> Job | None:
        """Return the next job; `None` if there is none."""
        with self._lock:
            return None if self._closed else next(self._jobs, None)

    def close(self) -> None:
        """Hand out no more."""
        self._closed = True


def _work(queue: _Queue, inference: bool) -> None:
    try:
        with torch.inference_mode(inference), torch.no_grad(), unseen():
            while (job := queue.next()) is not None:
                job()
    finally:
        queue.close()  # after an error; else there is none left


class _Crews:
    """The threads of this process, by how many there are: made once, for making them touches a setting of torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, ThreadPoolExecutor] = {}

    def of(self, count: int) -> ThreadPoolExecutor:
        """Return so many threads."""
        with self._lock:
            if count not in self._known:
                self._known[count] = _hired(count)
            return self._known[count]


_crews = _Crews()


def _hired(count: int) -> ThreadPoolExecutor:
    """Return threads that compute with one core each.

    torch keeps that number per thread, and a copy of the last one set for threads to come, which is put back from a
    thread of its own: the caller's is never touched.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, thread_name_prefix="attn_monitor")
    all_there = threading.Barrier(count)

    def settle() -> None:
        torch.get_num_threads()  # which a thread would else take from that copy at its first operation
        torch.set_num_threads(1)
        all_there.wait()  # so that no thread settles twice and another never

    futures: list[Future[None]] = [pool.submit(settle) for _ in range(count)]
    wait(futures)
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
    return pool


def _forget() -> None:
    """Start anew in a forked process, which has none of its parent's threads."""
    global _crews  # noqa: PLW0603 # the process has only these
    _crews = _Crews()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
