"""A training of two processes of which one is killed in the middle: run as a program, once for each process.

    python -m tests.reliability.killed FOLDER RANK

The process that is left must end with an error, and soon.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy

from attn_monitor import AttentionMonitor
from tests.models import Lit, loader, quiet
from tests.reliability.standing import left, standing

PATIENCE = 20
"""Seconds after which a collective gives up."""


class Killed(Callback):
    """Ends the process of rank 1 in the third step, as the system does when memory runs out."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, rank: int) -> None:
    """Train as one of two processes, and write down how that ended."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    model = Lit("hand", "sdpa")
    before = standing(model)
    monitor = AttentionMonitor(every_n_steps=1)
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=PATIENCE))
    ended = "nothing"
    try:
        quiet(strategy=strategy, devices=2, callbacks=[monitor, Killed()], default_root_dir=folder).fit(
            model, loader(8)
        )
    except BaseException as error:
        ended = type(error).__name__
    if getattr(vars(model).get("forward"), "__func__", None) is type(model).forward:
        del model.forward  # put there by Lightning's DDP, and harmless
    behind = left(before, standing(model))
    (folder / f"rank{rank}.txt").write_text(f"{ended}\n{len(monitor.history)}\n{behind}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
