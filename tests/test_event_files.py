"""Records of event files: those of TensorBoard's own reader, and what is left of a damaged file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as reference
from torch.utils.tensorboard import SummaryWriter

from attn_monitor.checksum import masked_crc32c
from attn_monitor.reports.event_files import Damage, read_records

RECORDS = 13


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 255, 256, 257, 258, 259, 260, 1023, 1024, 1025, 4099, 65537])
def test_checksums_are_those_of_tensorboard(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert masked_crc32c(data) == reference(data)


@settings(suppress_health_check=[HealthCheck.too_slow])  # old versions of hypothesis make long ones slowly
@given(st.binary(min_size=250, max_size=700))
def test_checksums_of_any_bytes(data: bytes) -> None:
    assert masked_crc32c(data) == reference(data)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = SummaryWriter(str(tmp_path))
    for step in range(RECORDS - 1):  # and one with the version
        writer.add_scalar(f"loss/{'x' * (100 * step)}", step, step)
    writer.close()
    [path] = tmp_path.iterdir()
    return path


def read(path: Path, wanted: Callable[[bytes], bool] = lambda _: True) -> tuple[list[bytes], Damage, int]:
    damage, sizes = Damage(), list[int]()
    return list(read_records(path, wanted, damage, sizes.append)), damage, sum(sizes)


def starts(path: Path) -> list[int]:
    """Return where each record starts, and where the file ends."""
    places = [0]
    for record in RawEventFileLoader(str(path)).Load():
        places.append(places[-1] + 16 + len(record))
    return places


def test_records_are_those_of_tensorboards_reader(file: Path) -> None:
    records, damage, size = read(file)
    assert records == list(RawEventFileLoader(str(file)).Load())
    assert len(records) == RECORDS
    assert (damage, str(damage)) == (Damage(), "")
    assert size == file.stat().st_size


def test_only_what_is_wanted_is_returned(file: Path) -> None:
    records, damage, size = read(file, lambda payload: len(payload) > 500)
    assert records == [record for record in RawEventFileLoader(str(file)).Load() if len(record) > 500]
    assert (damage, size) == (Damage(), file.stat().st_size)


@pytest.mark.parametrize("missing", [1, 4, 5, 20, 400])
def test_a_truncated_file_gives_all_but_its_last_record(file: Path, missing: int) -> None:
    whole, _, _ = read(file)
    data = file.read_bytes()
    last = starts(file)[-2]
    file.write_bytes(data[:-missing])
    records, damage, size = read(file)
    assert records == whole[:-1]
    assert damage == Damage(unfinished=len(data) - missing - last)
    assert str(damage) == f"the last record is unfinished, {len(data) - missing - last} bytes left out"
    assert size == len(data) - missing


def test_a_changed_payload_costs_one_record(file: Path) -> None:
    whole, _, _ = read(file)
    data = bytearray(file.read_bytes())
    data[starts(file)[4] + 40] ^= 1
    file.write_bytes(data)
    records, damage, _ = read(file)
    assert records == whole[:4] + whole[5:]
    assert str(damage) == "1 damaged record left out"


@pytest.mark.parametrize("byte", [0, 7, 9])
def test_behind_a_changed_length_reading_goes_on(file: Path, byte: int) -> None:
    whole, _, _ = read(file)
    places = starts(file)
    data = bytearray(file.read_bytes())
    data[places[4] + byte] ^= 0x55
    file.write_bytes(data)
    records, damage, size = read(file)
    assert records == whole[:4] + whole[5:]
    assert str(damage) == f"{places[5] - places[4]} bytes that are no records left out"
    assert size == len(data)


def test_behind_a_block_of_zeros_reading_goes_on(file: Path) -> None:
    whole, _, _ = read(file)
    places = starts(file)
    data = bytearray(file.read_bytes())
    data[places[3] + 5 : places[6] + 50] = bytes(places[6] + 45 - places[3])
    file.write_bytes(data)
    records, damage, _ = read(file)
    assert records == whole[:3] + whole[7:]
    assert damage == Damage(skipped=places[7] - places[3])


def test_what_is_no_event_file_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.write_bytes(random.Random(1).randbytes(5003))
    assert read(path) == ([], Damage(skipped=5003), 5003)
    path.write_bytes(b"")
    assert read(path) == ([], Damage(), 0)


def test_a_record_written_while_reading_waits_for_the_next_time(file: Path) -> None:
    whole, _, _ = read(file)
    data = file.read_bytes()
    records = read_records(file, lambda _: True, Damage(), lambda _: None)
    first = next(records)
    file.write_bytes(data + data)
    assert [first, *records] == whole
    assert Event.FromString(whole[-1]).step == RECORDS - 2
