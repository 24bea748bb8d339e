"""`attn-monitor demo`: a small training whose attention collapses, with nothing needed but the installed package.

`examples/char_gpt.py` is the fuller one, to be read and changed.
"""

from __future__ import annotations

import logging
import signal
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]  # ships no hints

from attn_monitor.callback import AttentionMonitor
from attn_monitor.commands.errors import FAILED, OK, CommandError
from attn_monitor.events import AttentionWarning, SaturationEvent
from attn_monitor.phrases import error_line
from attn_monitor.reports.terminal import say

if TYPE_CHECKING or find_spec("pytorch_lightning") is not None:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import TensorBoardLogger
else:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger

VOCABULARY = 128  # ASCII
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 128, 4, 64, 16
WARMUP, EVERY, LISTED = 20, 10, 10


class _Block(nn.Module):
    """Attention and MLP; with `healthy`, the logits are kept in bounds by QK-norm and the usual scale."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attn_norm(x))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.healthy:
            query, key = F.rms_norm(query, query.shape[-1:]), F.rms_norm(key, key.shape[-1:])
        scale = None if self.healthy else 1.0  # None is 1/sqrt(d_k)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _Model(pl.LightningModule):
    """A character-level decoder; nothing in it knows that it is watched."""

    def __init__(self, text: Tensor, seed: int, healthy: bool) -> None:
        super().__init__()
        self.lr = 3e-3 if healthy else 1e-2
        self.text, self.batches = text, torch.Generator().manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(_Block(healthy) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def training_step(self, batch: int) -> Tensor:
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=self.batches)
        pieces = self.text[starts + torch.arange(CONTEXT + 1)]
        x = self.tokens(pieces[:, :-1]) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), pieces[:, 1:].flatten())
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class _Bar(pl.Callback):
    """A progress bar on a terminal, and nothing elsewhere."""

    def __init__(self, steps: int) -> None:
        self._bar = tqdm(total=steps, desc="training", unit="step", leave=False, disable=None)

    def on_train_batch_end(self, *_: object) -> None:
        self._bar.update()

    def say(self, text: str) -> None:
        with self._bar.external_write_mode():
            say(text)

    def close(self) -> None:
        self._bar.close()


def run_demo(logdir: Path, *, steps: int, seed: int, healthy: bool) -> int:
    """Train, let the monitor speak, list the flagged heads and say what to do next.

    Args:
        logdir: Where the run is written.
        steps: How many steps to train.
        seed: Of weights and batches.
        healthy: Train the model whose heads stay healthy instead.

    Returns:
        The exit status: 0 if heads were flagged, or none in the healthy model.

    Raises:
        CommandError: If the run cannot be written, or there is no text to learn.
        KeyboardInterrupt: After Ctrl-C; what was written until then is a run.
    """
    logger = TensorBoardLogger(logdir, name="healthy" if healthy else "collapsing")
    try:
        Path(logger.log_dir).mkdir(parents=True)
    except OSError as error:
        raise CommandError(
            f"nothing can be written to {logger.log_dir} ({error_line(error)}); choose another with --logdir", FAILED
        ) from error
    how = "with the scale 1/sqrt(d_k) and QK-norm" if healthy else "without the scale 1/sqrt(d_k), and fast"
    say(f"training {LAYERS} layers of {HEADS} heads for {steps} steps, {how}")
    monitor = _train(logger, steps, seed, healthy)
    say("\n".join(_outcome(monitor.events, healthy=healthy)))
    say(
        "\nnext:\n"
        f"  tensorboard --logdir {logdir}    # the tab Attention has every head at every step\n"
        f"  attn-monitor report {logger.log_dir}    # the same in one HTML file"
    )
    return OK if bool(monitor.events) != healthy else FAILED


def _train(logger: TensorBoardLogger, steps: int, seed: int, healthy: bool) -> AttentionMonitor:
    monitor, bar = AttentionMonitor(every_n_steps=EVERY), _Bar(steps)
    with _quiet(bar), _one_thread():
        torch.manual_seed(seed)
        model = _Model(_text(), seed, healthy)
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            callbacks=[monitor, bar],
            logger=logger,
            log_every_n_steps=EVERY,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        try:
            trainer.fit(model, range(steps))
        except SystemExit as stop:  # so Lightning ends after Ctrl-C, in some versions with Ctrl-C switched off
            if not trainer.interrupted:
                raise
            raise KeyboardInterrupt from stop
    return monitor


@contextmanager
def _quiet(bar: _Bar) -> Iterator[None]:
    """Let only the monitor speak, in lines of its own above the bar; put Ctrl-C back as it was."""
    loggers = [logging.getLogger(package) for package in ("pytorch_lightning", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, AttentionWarning):
            bar.say(str(message))

    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = show
            yield
    finally:
        bar.close()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if before is not None:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in one thread: the matrices are small, and threads would wait for each other most of the time.

    On a busy machine that takes several times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _outcome(events: list[SaturationEvent], *, healthy: bool) -> list[str]:
    if not events:
        return ["\nno head was flagged" + ("" if healthy else "; the first are within 50 steps (--steps)")]
    first: dict[tuple[str, int], SaturationEvent] = {}
    for event in events:
        first.setdefault((event.layer, event.head), event)
    flagged = sorted(first.values(), key=lambda event: (event.step, event.layer, event.head))
    rows = [f"  {event.layer:10}  {event.head:>4}  {event.step:>6}  {event.severity}" for event in flagged[:LISTED]]
    return [
        f"\n{len(flagged)} of {LAYERS * HEADS} heads were flagged:",
        f"  {'layer':10}  {'head':>4}  {'step':>6}  now",
        *rows,
    ]


def _text(size: int = 1_000_000) -> Tensor:
    """Return sources of the standard library as ASCII codes."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    if len(text) <= CONTEXT:
        raise CommandError(
            "the demo reads the source code of Python's standard library, and there is none here", FAILED
        )
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
