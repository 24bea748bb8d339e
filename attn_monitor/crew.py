"""Threads that compute tiles side by side on a CPU, one tile each.

A tile takes some twenty operations. Split over threads, each of them ends in a barrier, which costs as much as the
arithmetic where tiles are small, and far more where another process has one of the cores. Whole tiles need none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from attn_monitor.unseen import unseen

MOST_WORKERS = 8
"""Beyond this many, threads would wait for the interpreter's lock rather than compute."""
WORTH_THREADS = 2**22
"""Entries from which threads gain more than it costs to wake them."""
_PATIENCE = 10.0
"""Seconds to wait for a thread to start."""
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
    futures: list[Future[None]] = []
    try:
        if not _hire(futures, partial(_work, queue, inference), count):
            _work(queue, inference)
        wait(futures)
    finally:  # where the user interrupts it, no thread may go on with memory that is given back
        queue.close()
        wait(futures)
    for future in futures:
        future.result()


def _hire(futures: list[Future[None]], work: Job, count: int) -> bool:
    """Let threads begin to work, and tell whether all of them could; the caller has to know those that did."""
    try:
        for _ in range(count):
            futures.append(_crews.of(count).submit(work))  # noqa: PERF401 # an interrupt must not lose one
    except RuntimeError:  # the interpreter shuts down, or the system has no more threads
        return False
    return True


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
        """Return so many threads, all of them settled.

        Raises:
            RuntimeError: If there are no threads to be had.
        """
        with self._lock:
            if count not in self._known:
                self._known[count] = _settled(count)
            return self._known[count]


_crews = _Crews()
_settling = threading.Lock()


def _settled(count: int) -> ThreadPoolExecutor:
    """Return threads that have all settled: one that came later would do so while the user goes on."""
    pool = ThreadPoolExecutor(count, "attn_monitor", initializer=_settle)
    there, all_there = threading.Semaphore(0), threading.Event()

    def wait_for_the_others() -> None:  # or an idle thread would take the place of one that has not started
        there.release()
        all_there.wait()

    try:
        for _ in range(count):
            pool.submit(wait_for_the_others)
        for _ in range(count):
            there.acquire(timeout=_PATIENCE)
    finally:  # whatever happened here, none may wait for ever
        all_there.set()
    return pool


def _settle() -> None:
    """Let this new thread compute with one core.

    torch keeps that number per thread, and a copy of the last one set for threads to come. A new thread takes the copy
    at its first question or operation, whatever was set before; so ask first. Then the copy is put back from a thread
    of its own, or this one would have it too.
    """
    with _settling:  # or the next one would take the copy while it is changed
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
        try:
            restoring.start()
        except RuntimeError:  # no thread to be had: rather all cores for this one than one core for all to come
            torch.set_num_threads(before)
            return
        restoring.join()


def _forget() -> None:
    """Start anew in a forked process, which has none of its parent's threads."""
    global _crews, _settling  # the process has only these
    _crews, _settling = _Crews(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
