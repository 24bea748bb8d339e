"""What comes from a file or a model's names cannot run, and cannot lead out of a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

import attn_monitor
from attn_monitor import AttentionMonitor
from attn_monitor.reports.report import render_report
from attn_monitor.reports.runs import find_runs, read_runs
from attn_monitor.reports.summary import summarize
from tests.models import DIM, LIGHTNING_ADVICE, HandWritten, Lit, loader, quiet

pytestmark = LIGHTNING_ADVICE
PACKAGE = Path(attn_monitor.__file__).parent
HOSTILE = ("</script><script>alert(1)</script>", "..\\..\\etc", '"><img src=x onerror=alert(1)>', "a/../../b")


def test_no_code_of_ours_unpickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bpickle\.loads?\(|\bUnpickler\b|\bmarshal\.|\beval\(|\byaml\.load\(", text), path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, f"{path}: {call}"


def test_a_state_with_events_and_a_flight_record_loads_with_weights_only(tmp_path: Path) -> None:
    monitor = AttentionMonitor(every_n_steps=1)
    trainer = quiet(callbacks=[monitor])
    with pytest.warns(attn_monitor.AttentionWarning):
        trainer.fit(Lit("hand", "sdpa", gain=40.0), loader(3))
    assert monitor.events
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved: dict[str, Any] = torch.load(tmp_path / "run.ckpt", weights_only=True)
    heir = AttentionMonitor(every_n_steps=1)
    heir.load_state_dict(saved["callbacks"][heir.state_key])
    assert heir.events == monitor.events


class Hostile(nn.Module):
    """Attentions in modules with names that were chosen to do harm."""

    def __init__(self) -> None:
        super().__init__()
        for name in HOSTILE:
            self._modules[name] = HandWritten()  # `add_module` takes no dots
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for name in HOSTILE:
            x = x + self._modules[name](x)  # type: ignore[misc] # none of them is None
        return self.head(x)


def test_hostile_names_of_layers_neither_run_nor_leave_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    model = Lit("hand")
    model.net = Hostile()
    board = TensorBoardLogger(inside)
    quiet(callbacks=[AttentionMonitor(every_n_steps=1)], logger=board).fit(model, loader(2))
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in inside.iterdir()] == ["lightning_logs"]
    (run,) = read_runs(find_runs(Path(board.log_dir))).runs
    page, _ = render_report([run], summarize(run))
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "alert(1)" in page  # the layer is there, as text
