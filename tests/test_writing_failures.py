"""What fails on the way to TensorBoard is told once, whichever way the scalars took, and costs no scalar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import TensorBoardLogger

from attn_monitor import AttentionMonitor
from tests.models import LIGHTNING_ADVICE, Lit, fit, read_events

pytestmark = LIGHTNING_ADVICE


def fails(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("not there")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("tensorboard.is_torch_writer", "TensorBoard gets no more but scalars (LookupError: not there); scalars go on"),
        ("summaries.Summaries.proto", "TensorBoard gets no more but scalars (LookupError: not there); scalars go on"),
        (
            "tensorboard.describe_scalar",
            "TensorBoard gets no more overview (LookupError: not there); scalars go on",
        ),
        (
            "tensorboard.Dashboard.write_scalars",
            "writing to TensorBoardLogger in one piece failed: LookupError: not there; it gets value by value, which "
            "is slower",
        ),
    ],
)
def test_it_is_told_once_and_every_scalar_is_there(
    broken: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, monitor = TensorBoardLogger(tmp_path), AttentionMonitor()
    with monkeypatch.context() as patched:
        patched.setattr(f"attn_monitor.dashboards.{broken}", fails)
        trainer, said = fit(Lit("hand", "sdpa"), monitor, 3, logger=logger)
    assert trainer.global_step == 3
    assert [text for text in said if "not there" in text] == [told]
    points = read_events(logger.log_dir).Scalars("attn_logit_std/net.blocks.1")
    history = [float(record["net.blocks.1"].measured()["logit_std"].mean()) for _, record in monitor.history]
    assert [point.step for point in points] == [0, 1, 2]
    assert [point.value for point in points] == pytest.approx(history)
