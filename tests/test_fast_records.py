from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer import record_writer
from torch.utils.tensorboard import SummaryWriter

from attn_monitor.dashboards.fast_records import hasten_checksums
from tests.models import read_events


def test_the_bytes_are_those_that_tensorboard_writes(tmp_path: Path) -> None:
    generator = random.Random(0)
    contents = [generator.randbytes(size) for size in (0, 1, 7, 255, 256, 257, 1000, 4099, 70_001)]
    for name, hastened in (("slow", False), ("fast", True)):
        with (tmp_path / name).open("wb") as file:
            records = record_writer.RecordWriter(file)
            if hastened:
                hasten_checksums(
                    SimpleNamespace(event_writer=SimpleNamespace(_async_writer=SimpleNamespace(_writer=records)))
                )
            for content in contents:
                records.write(content)
            records.flush()
    assert (tmp_path / "fast").read_bytes() == (tmp_path / "slow").read_bytes()


def test_a_summary_writer_no_longer_computes_checksums_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SummaryWriter(str(tmp_path))
    hasten_checksums(writer._get_file_writer())
    hasten_checksums(writer._get_file_writer())

    def loop(data: bytes) -> int:
        raise AssertionError("the loop ran")

    monkeypatch.setattr(record_writer, "masked_crc32c", loop)
    writer.add_scalar("loss", 0.25, 3)
    writer.add_text("page", "x" * 10_000, 4)
    writer.close()
    monkeypatch.undo()
    assert pywrap_tensorflow.masked_crc32c(b"") is not None  # what reads the file checks it
    events = read_events(tmp_path)
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(3, 0.25)]
    assert len(events.Tensors("page/text_summary")[0].tensor_proto.string_val[0]) == 10_000


@pytest.mark.parametrize("files", [None, object(), SimpleNamespace(event_writer=SimpleNamespace(_async_writer=None))])
def test_a_writer_of_another_kind_is_left_alone(files: Any) -> None:
    hasten_checksums(files)
