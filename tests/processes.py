"""Real processes that talk over gloo, for tests of what runs on several ranks."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch has no hints for it

SECONDS = 60
START_METHOD: Final = "forkserver"
"""How ranks start, also those of Lightning: what is below holds for them too."""

# Ranks fork from a server that has imported once what they need: that saves seconds a rank, and unlike in a fork of the
# test's own process no thread, hook or group is inherited.
_PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._dynamo", "torch.utils.tensorboard",
              "pytest", "attn_monitor.probe", "attn_monitor.callback"]  # fmt: skip
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(_PRELOADED)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on every rank of a gloo group and return what each rank returned, in order of ranks.

    `function` is defined at the top of a module, since ranks import it. The first error of a rank is raised here, with
    the rank's traceback as a note; whoever has not answered after 60 s is ended.
    """
    work = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        waiting: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, args=(rank, world_size, str(Path(folder) / "store"), work, sender))
            process.start()
            sender.close()
            processes.append(process)
            waiting[receiver] = rank
        try:
            answers = _answers(waiting)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()
    return [answers[rank] for rank in range(world_size)]


def _answers(waiting: dict[Connection, int]) -> dict[int, Any]:
    answers = {}
    deadline = time.monotonic() + SECONDS
    while waiting:
        ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(
                f"expected every rank to answer within {SECONDS} s, ranks {sorted(waiting.values())} did not"
            )
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            answers[rank] = _answer(connection, rank)
            connection.close()
    return answers


def _answer(connection: Connection, rank: int) -> Any:
    try:
        ok, payload, text = connection.recv()
    except EOFError:
        raise ChildProcessError(f"rank {rank} ended without an answer") from None
    if ok:
        return pickle.loads(payload)
    try:
        error = pickle.loads(payload)
    except Exception:
        error = None
    if not isinstance(error, Exception):
        error = RuntimeError(f"rank {rank} failed")
    # Python 3.10 has no `add_note`.
    raise error from RuntimeError(f"on rank {rank}:\n{text}")


def _rank(rank: int, world_size: int, store: str, work: bytes, sender: Connection) -> None:
    torch.set_num_threads(1)  # ranks share the machine
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=SECONDS),
        )
        function, args = pickle.loads(work)
        # Pickled here: a tensor sent by torch's own reducers lives in memory that ends with this process.
        answer = (True, pickle.dumps(function(rank, *args)), "")
    except Exception as error:
        answer = (False, _pickled(error), traceback.format_exc())
    sender.send(answer)
    sender.close()
    if answer[0] and dist.is_initialized():
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return b""
