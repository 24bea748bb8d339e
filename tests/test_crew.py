"""Tiles computed side by side: the same numbers, and nothing of it left on the user's threads."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from attn_monitor import crew, passes, tiles
from attn_monitor.catalog import ALL, GRADIENTS
from attn_monitor.records import AttentionCall
from attn_monitor.rows import RowValues
from attn_monitor.softmax_gradients import qualifying_entries, softmax_gradient_sums
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from attn_monitor.workspace import Workspaces
from tests.gradient_sums import attention_gradient_sums
from tests.reference import assert_same

B, H, G, Q, K, D, V = 3, 4, 2, 37, 41, 7, 5
CPU = torch.device("cpu")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return what chooses how many threads compute, with tiles so small that each has several."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 4096)
    monkeypatch.setattr(tiles, "MAX_ROWS", 11)
    monkeypatch.setattr(tiles, "MIN_ROWS", 5)
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_call() -> AttentionCall:
    query, key, value = torch.randn(B, H, Q, D), torch.randn(B, G, K, D), torch.randn(B, G, K, V)
    return AttentionCall(query=query, key=key, value=value, scale=0.3)


def calls() -> dict[str, AttentionCall]:
    call = random_call()
    some = torch.rand(B, 1, Q, K) < 0.7
    return {
        "plain": call,
        "causal": replace(call, is_causal=True),
        "masked": replace(call, masks=(some,), sinks=torch.randn(H)),
        "biased": replace(call, masks=(torch.randn(1, H, Q, K).masked_fill(~some, -1e9),)),
        "logits": AttentionCall(logits=torch.randn(B, H, Q, K), masks=(some,), scale=None),
        "overflowing": replace(call, query=torch.full((B, H, Q, D), 1e38), is_causal=True),
    }


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", calls())
def test_every_number_is_the_one_of_a_single_thread(name: str, workers: int, threads: Callable[[int], None]) -> None:
    call, grad_output = calls()[name], torch.randn(B, H, Q, V)

    def look() -> list[AttentionSums]:
        found = [attention_sums(call, ALL), attention_sums(call, ALL, 13)]
        if call.query is not None:
            found += [
                attention_sums(call, ALL, grad_output=grad_output),
                attention_gradient_sums(call, grad_output),
                attention_gradient_sums(call, grad_output, 13),
            ]
        grad = torch.linspace(-1, 2, B * H * Q * K).view(B, H, Q, K)
        entries = qualifying_entries(call)
        return [*found, softmax_gradient_sums(entries, grad_logits=grad, grad_probs=grad * 3)]

    threads(1)
    alone = look()
    threads(workers)
    for one, other in zip(alone, look(), strict=True):
        assert_same(one.finalize(ALL | GRADIENTS), other.finalize(ALL | GRADIENTS))


def test_small_calls_are_not_worth_a_thread() -> None:
    seen: list[str] = []
    call = random_call()

    def note(*_: object) -> None:
        seen.append(threading.current_thread().name)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tiled = tiles.TiledCall.of(call)
        wanted = passes.Wanted.by(call, frozenset({"entropy"}), sampled=False, gradients=False)
        rows = RowValues(wanted.names(), call.shape, CPU, torch.float32)
        passes.fill_rows(rows, tiled, wanted, Workspaces(), notes=[note])
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {threading.current_thread().name}


@pytest.mark.slow
def test_the_threads_of_torch_stay_as_the_user_set_them() -> None:
    code = """
import threading, torch
from attn_monitor import crew
torch.set_num_threads(3)
seen = []
crew.run(iter([lambda: seen.append(torch.get_num_threads()) for _ in range(9)]), 2)
later = threading.Thread(target=lambda: seen.append(torch.get_num_threads() * 10))
(torch.ones(2**20) + 1).sum()
later.start(); later.join()
print(*sorted(set(seen)), torch.get_num_threads())
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert found == ["1", "30", "3"]  # inside, in a thread that is made later, in the user's own


@pytest.mark.slow
def test_the_copy_for_new_threads_is_that_of_the_process_not_of_the_caller() -> None:
    code = """
import threading, torch
from attn_monitor import crew
torch.set_num_threads(2)
seen = []
changed = threading.Event()
def caller():
    torch.get_num_threads()
    changed.wait()
    crew.run(iter([lambda: None] * 9), 2)
thread = threading.Thread(target=caller)
thread.start()
torch.set_num_threads(4)
changed.set()
thread.join()
later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
later.start(); later.join()
print(torch.get_num_threads(), *seen)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["4", "4"]


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_one_computes_by_itself() -> None:
    code = """
import threading, time
from attn_monitor import crew
done = []
def late():
    threading.main_thread().join()
    time.sleep(0.2)
    crew.run(iter([lambda: done.append(threading.current_thread().name)] * 7), 2)
    print(len(done), *sorted(set(done)), flush=True)
threading.Thread(target=late, name="late").start()
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["7", "late"]


@pytest.mark.slow
def test_a_system_without_threads_to_spare_hangs_nothing() -> None:
    code = """
import threading, torch
from attn_monitor import crew
torch.set_num_threads(3)
start, started = threading.Thread.start, []
def refused(thread):
    started.append(thread)
    if len(started) > 1:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refused
done = []
crew.run(iter([lambda: done.append(1)] * 7), 2)
threading.Thread.start = start
later = threading.Thread(target=lambda: done.append(torch.get_num_threads() * 10))
later.start(); later.join()
print(*done)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["1"] * 7 + ["30"]


def test_jobs_are_made_when_a_thread_is_free_and_all_of_them_run() -> None:
    done: list[int] = []
    made: list[int] = []
    lock = threading.Lock()

    def job(number: int) -> None:
        with lock:
            done.append(number)

    def jobs() -> Iterator[crew.Job]:
        for number in range(101):
            made.append(number)
            assert len(made) - len(done) <= 4  # one in the making, one in each thread, one being noted
            yield partial(job, number)

    crew.run(jobs(), 2)
    assert sorted(done) == list(range(101))


def test_the_first_error_ends_it_and_is_raised() -> None:
    begun: list[int] = []

    def job(number: int) -> None:
        begun.append(number)
        if number == 5:
            raise ArithmeticError("in a thread")
        time.sleep(0.001)

    with pytest.raises(ArithmeticError, match="in a thread"):
        crew.run((partial(job, number) for number in range(1000)), 2)
    assert len(begun) < 50
    after: list[int] = []
    crew.run((partial(after.append, number) for number in range(7)), 2)  # the threads are fit for the next
    assert sorted(after) == list(range(7))


def test_an_error_in_making_a_job_is_raised() -> None:
    def jobs() -> Iterator[crew.Job]:
        yield lambda: None
        raise LookupError("no more of these")

    with pytest.raises(LookupError, match="no more of these"):
        crew.run(jobs(), 2)


def test_inference_mode_and_gradients_are_off_and_on_as_outside() -> None:
    def look(outside: Tensor, into: list[tuple[bool, bool]]) -> None:
        into.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        outside.add_(1)

    with torch.inference_mode():
        tensor, seen = torch.zeros(3), list[tuple[bool, bool]]()
        crew.run(iter([partial(look, tensor, seen)] * 2), 2)
        assert tensor.tolist() == [2, 2, 2]
    assert seen == [(True, False)] * 2
    seen.clear()
    crew.run(iter([partial(look, torch.zeros(3, requires_grad=True).detach(), seen)]), 2)
    assert seen == [(False, False)]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    code = """
import os, torch
from attn_monitor import crew
crew.run(iter([lambda: None] * 3), 2)
child = os.fork()
if not child:
    seen = []
    crew.run(iter([lambda: seen.append(1)] * 5), 2)
    os._exit(len(seen))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "5"


def test_an_interrupted_look_leaves_no_thread_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = concurrent.futures.wait
    begun: list[int] = []

    def interrupted(futures: object) -> object:
        monkeypatch.setattr(crew, "wait", wait)
        raise KeyboardInterrupt

    def job(number: int) -> None:
        begun.append(number)
        time.sleep(0.001)

    monkeypatch.setattr(crew, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        crew.run((partial(job, number) for number in range(1000)), 2)
    count = len(begun)
    assert count < 100
    time.sleep(0.02)
    assert len(begun) == count


def test_more_threads_take_smaller_tiles_and_small_calls_take_none() -> None:
    shape = random_call().shape._replace(batch=1, queries=8192, keys=8192)
    entries = [
        cut.rows[0].stop * cut.heads[0].stop * shape.keys
        for cut in (tiles.blocks(shape, G, workers=count) for count in (1, 2, 4, 8))
    ]
    assert entries == [2**20, 2**19, 2**18, 2**18]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        least = crew.WORTH_THREADS
        assert [crew.workers(CPU, least), crew.workers(CPU, least - 1)] == [3, 1]
        assert crew.workers(torch.device("cuda"), least) == 1
    finally:
        torch.set_num_threads(before)
