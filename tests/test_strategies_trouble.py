"""What goes wrong on one rank of a Lightning training holds up no other, and is told by the first."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pytorch_lightning.strategies import DDPStrategy

from attn_monitor import AttentionMonitor, AttentionProbe, QKClip
from attn_monitor.statistics import attention_rows
from tests.models import LIGHTNING_ADVICE
from tests.processes import run_ranks
from tests.strategies import BLOCKS, STEPS, WORLD, Uneven, outcome

pytestmark = [pytest.mark.slow, *LIGHTNING_ADVICE]


def trouble(rank: int) -> dict[str, Any]:
    """Things that go wrong on rank 1 only."""
    found = {}
    real = attention_rows

    def failing(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise MemoryError("no tile")
        return real(*args, **kwargs)

    with patch("attn_monitor.looks.attention_rows", failing):
        found["statistic"] = outcome(rank, DDPStrategy(), Uneven(), AttentionMonitor())
    monitor = AttentionMonitor()
    attach = AttentionProbe.attach

    def refusing(probe: AttentionProbe, *args: Any, **kwargs: Any) -> None:
        if rank == 1 and not monitor.history and not failed:
            failed.append(1)
            raise OSError("not now")
        attach(probe, *args, **kwargs)

    failed: list[int] = []
    with patch.object(AttentionProbe, "attach", refusing):
        found["attach"] = outcome(rank, DDPStrategy(), Uneven(), monitor)
    judged = AttentionMonitor(every_n_steps=10)
    if rank == 1:
        judged._judge.take = lambda *_: 1 / 0  # type: ignore[assignment,method-assign] # an error of ours
    found["judge"] = outcome(rank, DDPStrategy(), Uneven(hot=1), judged, steps=12)
    return found


@pytest.fixture(scope="module")
def troubled() -> list[dict[str, Any]]:
    return run_ranks(trouble, WORLD)


def test_a_statistic_that_fails_on_one_rank_is_missing_on_all(troubled: list[Any]) -> None:
    first, second = (rank["statistic"] for rank in troubled)
    assert first["history"] == second["history"]
    assert len(first["history"]) == STEPS == first["steps"]
    assert not any(BLOCKS[1] in record for _, record in first["history"])
    assert any("rank 1: MemoryError: no tile" in text for text in first["said"])


def test_a_rank_that_fails_to_attach_costs_one_record_on_all(troubled: list[Any]) -> None:
    first, second = (rank["attach"] for rank in troubled)
    assert first["history"] == second["history"]
    assert [step for step, _ in first["history"]] == [1, 2]
    assert any("rank 1: attaching to the model failed: OSError: not now" in text for text in first["said"])


def test_ranks_go_on_observing_the_same_steps_if_one_can_not_judge(troubled: list[Any]) -> None:
    first, second = (rank["judge"] for rank in troubled)
    assert [step for step, _ in first["history"]] == [step for step, _ in second["history"]]
    assert first["steps"] == second["steps"] == 12


def unwritable(rank: int, folder: str) -> dict[str, Any]:
    """A checkpoint is wanted at the first flagged head, and a file stands where its folder should."""
    monitor = AttentionMonitor(every_n_steps=1, save_checkpoint=True)
    return outcome(rank, DDPStrategy(), Uneven(hot=1, lr=1e-5), monitor, steps=4, default_root_dir=folder)


def test_a_checkpoint_that_can_not_be_written_holds_up_no_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("no folder")
    first, second = run_ranks(unwritable, WORLD, str(tmp_path))
    assert first["steps"] == second["steps"] == 4
    assert any("saving a checkpoint at step" in text for text in first["said"])


def hooks_that_fail(rank: int) -> dict[str, Any]:
    """Code of ours raises once on rank 1: as a batch begins or ends, before its backward pass, as the fit starts."""
    found = {}
    for place in (
        "callback.log_interval",
        "callback.loss_factor",
        "cadence.Cadence.start",
        "flight_recorder.FlightRecorder.keep_loss",
        "stages.ObservedStages._end_batch",
    ):
        name = f"attn_monitor.{place}"
        real = pkgutil.resolve_name(name)
        calls: list[int] = []

        def once(*args: Any, real: Any = real, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(1)
            if rank == 1 and len(calls) == 1:
                raise MemoryError("ours")
            return real(*args, **kwargs)

        with patch(name, once):
            found[place] = outcome(rank, DDPStrategy(), Uneven(), AttentionMonitor())
    return found


def test_a_hook_that_fails_on_one_rank_costs_a_record_at_most() -> None:
    first, second = run_ranks(hooks_that_fail, WORLD)
    for place, found in first.items():
        assert found["history"] == second[place]["history"]
        assert found["steps"] == STEPS
        lost = 0 if place in ("callback.log_interval", "cadence.Cadence.start") else 1
        assert len(found["history"]) == STEPS - lost, place


def clip_that_fails(rank: int) -> dict[str, Any]:
    """QK-Clip raises once on rank 1, before it asks the others and after."""
    found = {}
    for place in ("largest_logits", "head_lengths"):
        name = f"attn_monitor.qk_clip.{place}"
        real = pkgutil.resolve_name(name)
        calls: list[int] = []

        def once(*args: Any, real: Any = real, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                raise MemoryError("ours")
            return real(*args, **kwargs)

        with patch(name, once):
            monitor = AttentionMonitor(every_n_steps=1, mitigation=QKClip(tau=0.01))
            found[place] = outcome(rank, DDPStrategy(), Uneven(), monitor)
            found[place]["calls"] = len(calls)
    return found


def test_a_clip_that_fails_on_one_rank_holds_up_no_other() -> None:
    first, second = run_ranks(clip_that_fails, WORLD)
    for place, found in first.items():
        assert found["calls"] >= 2, place
        assert found["steps"] == second[place]["steps"] == STEPS
        assert len(found["history"]) == STEPS
        assert any("QK-Clip" in text for text in found["said"]), place
