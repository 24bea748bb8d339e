from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from attn_monitor.catalog import ALL, STATISTICS
from attn_monitor.colors import heat_image
from attn_monitor.saturation import SaturationEvent, SaturationRule
from attn_monitor.tensorboard import HeadWriter, head_tables, layer_tag, scalars
from tests.models import make_record

RULE = SaturationRule()
NAN, INF = math.nan, math.inf


def read(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def test_a_tag_keeps_dots_and_replaces_what_breaks() -> None:
    assert layer_tag("encoder.layers.0.self_attn") == "encoder.layers.0.self_attn"
    assert layer_tag("layers.0.attn#1") == "layers.0.attn#1"
    assert layer_tag("layers.0.attn@3") == "layers.0.attn@3"
    assert not {"/", " ", ":"} & {*layer_tag("a/b c:d")}


def test_different_names_give_different_tags() -> None:
    names = ["a b", "a_b", "a/b", "a:b", "a\tb", "", " ", "_", layer_tag("a b"), layer_tag(layer_tag("a b"))]
    assert all(layer_tag(one) != layer_tag(other) for one, other in combinations(names, 2))


def test_scalars_are_the_mean_over_heads_and_the_worst_head() -> None:
    record = {
        "net.a": make_record(
            3, logit_row_std=[1.0, 8.0, 3.0], entropy_normalized=[0.9, 0.3, 0.6], sink_mass=[0, 0.5, 1]
        ),
        "net.b": make_record(1, head_dim=16, logit_row_std=[6.0]),
    }
    assert scalars(record, {"logit_row_std", "entropy_normalized", "sink_mass", "q_rms"}, RULE, 2) == {
        "attn_logit_row_std/net.a": 4.0,
        "attn_logit_row_std_max/net.a": 8.0,
        "attn_logit_row_std/net.b": 6.0,
        "attn_logit_row_std_max/net.b": 6.0,
        "attn_entropy_normalized/net.a": pytest.approx(0.6),
        "attn_entropy_normalized_min/net.a": pytest.approx(0.3),
        "attn_sink_mass/net.a": 0.5,
        "attn_monitor/saturated_heads": 2.0,
        "attn_monitor/observed_layers": 2.0,
        "attn_monitor/saturation_ratio_max": 1.5,
    }


def test_the_error_of_sampled_rows_is_logged_beside_the_estimates() -> None:
    errors = {"entropy": torch.tensor([0.1, 0.3]), "logit_std": torch.tensor([9.0, 9.0])}
    record = {
        "net.a": replace(make_record(2, entropy=[2.0, 1.5], logit_std=[1.0, 1.0]), standard_error=errors),
        "net.b": make_record(2, entropy=[1.0, 1.0]),
    }
    tags = scalars(record, {"entropy"}, RULE, 0)
    assert tags["attn_monitor/sampling_error_max"] == pytest.approx(0.2)  # that of what is not chosen does not count
    assert "attn_monitor/sampling_error_max" not in scalars({"net.b": record["net.b"]}, {"entropy"}, RULE, 0)
    table = head_tables(record, RULE, ["net.a", "net.b"])["entropy_standard_error"]
    torch.testing.assert_close(table, torch.tensor([[0.1, 0.3], [NAN, NAN]]), equal_nan=True)


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_worst_head_has_a_tag_where_the_table_has_a_direction(name: str) -> None:
    values: dict[str, Any] = {name: [1.0, 2.0]}
    tags = scalars({"a": make_record(**values)}, [name], SaturationRule(threshold=9), 0)
    worse = STATISTICS[name].worse
    assert tags[f"attn_{name}/a"] == 1.5
    assert tags.get(f"attn_{name}_max/a") == (2.0 if worse == "up" else None)
    assert tags.get(f"attn_{name}_min/a") == (1.0 if worse == "down" else None)


def test_heads_without_a_finite_value_are_left_out_and_none_gives_no_tag() -> None:
    record = {"a": make_record(logit_max=[NAN, 4.0], logit_std=[INF, 2.0]), "b": make_record(logit_max=[NAN, NAN])}
    tags = scalars(record, {"logit_max", "logit_std", "entropy"}, RULE, 0)
    assert {tag: value for tag, value in tags.items() if not tag.startswith("attn_monitor")} == {
        "attn_logit_max/a": 4.0,
        "attn_logit_max_max/a": 4.0,
        "attn_logit_std/a": 2.0,
        "attn_logit_std_max/a": 2.0,
    }
    assert "attn_monitor/saturation_ratio_max" not in tags


def test_an_empty_record_still_has_the_model_wide_counts() -> None:
    assert scalars({}, ALL, RULE, 0, prefix="val_") == {
        "val_attn_monitor/saturated_heads": 0.0,
        "val_attn_monitor/observed_layers": 0.0,
    }


def test_tables_hold_one_row_per_layer_padded_with_nan() -> None:
    record = {"b": make_record(3, logit_row_std=[4.0, 8.0, 2.0]), "a": make_record(1, logit_row_std=[1.0], q_rms=[2.0])}
    tables = head_tables(record, RULE, ["absent", "b", "a"])
    np.testing.assert_array_equal(tables["logit_row_std"], [[NAN] * 3, [4, 8, 2], [1, NAN, NAN]])
    np.testing.assert_array_equal(tables["q_rms"], [[NAN] * 3, [NAN] * 3, [2, NAN, NAN]])
    np.testing.assert_array_equal(tables["saturation_ratio"], [[NAN] * 3, [0.5, 1, 0.25], [0.125, NAN, NAN]])
    assert set(tables) == {"logit_row_std", "q_rms", "saturation_ratio", "nonfinite"}
    assert all(table.dtype == torch.float32 for table in tables.values())


def test_the_colours_are_fixed_and_nan_is_grey() -> None:
    image = heat_image("entropy_normalized", torch.tensor([[0.0, 0.5, 1.0], [-3.0, NAN, INF]]))
    assert image.dtype == torch.uint8
    assert image.tolist() == [
        [[68, 1, 84], [33, 145, 140], [253, 231, 37]],
        [[68, 1, 84], [128, 128, 128], [253, 231, 37]],
    ]
    ratios = heat_image("saturation_ratio", torch.tensor([[0.0, 0.01, 10**-0.5, 10.0, 1e9]]))
    assert ratios[0].tolist() == [[68, 1, 84], [68, 1, 84], [33, 145, 140], [253, 231, 37], [253, 231, 37]]


@pytest.mark.parametrize("name", [*sorted(ALL), "saturation_ratio"])
def test_every_statistic_has_a_scale_that_grows_and_stands_extremes(name: str) -> None:
    values = torch.tensor([[-INF, -1e30, -1.0, 0.0, 1e-30, 1e-3, 0.1, 0.45, 1.0, 50.0, 1e30, INF, NAN]])
    image = heat_image(name, values)[0].int()
    assert image.shape == (13, 3)
    green = image[:-1, 1]  # grows along the whole colour map
    assert green.diff().min() >= 0
    assert green[-1] > green[0]


def test_pictures_have_a_largest_side_and_may_be_empty() -> None:
    assert heat_image("entropy", torch.zeros(3000, 2)).shape == (1024, 2, 3)
    assert heat_image("entropy", torch.full((1, 2), NAN)).tolist() == [[[128] * 3] * 2]


def event(step: int, head: int) -> SaturationEvent:
    return SaturationEvent(
        step=step,
        layer="a",
        head=head,
        statistic="logit_row_std",
        value=9.0,
        head_dim=64,
        ratio=9 / 8,
        threshold=0.5,
        severity="critical",
    )


def test_images_tensors_and_texts_come_back_from_the_event_file(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    heads = HeadWriter({"entropy_normalized"}, RULE)
    record = {"net.a b": make_record(2, entropy_normalized=[0.0, 0.5], logit_row_std=[4.0, 8.0])}
    assert heads.write([writer], 3, record, [event(3, 0), event(3, 1)]) == []
    late = {"first": make_record(1, entropy_normalized=[1.0], logit_row_std=[2.0]), **record}
    assert heads.write([writer], 7, late, []) == []
    writer.close()

    events = read(tmp_path)
    tags = events.Tags()
    assert set(tags["images"]) == {"attn_heads/entropy_normalized", "attn_heads/saturation_ratio"}
    pictures = [
        np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)))
        for picture in events.Images("attn_heads/entropy_normalized")
    ]
    assert pictures[0].tolist() == [[[68, 1, 84], [33, 145, 140]]]
    assert pictures[1].tolist() == [[[68, 1, 84], [33, 145, 140]], [[253, 231, 37], [128, 128, 128]]]

    tables = events.Tensors("attn_monitor/logit_row_std")
    assert [table.step for table in tables] == [3, 7]
    np.testing.assert_array_equal(tensor_util.make_ndarray(tables[0].tensor_proto), [[4, 8]])
    np.testing.assert_array_equal(tensor_util.make_ndarray(tables[1].tensor_proto), [[4, 8], [2, NAN]])
    assert tensor_util.make_ndarray(tables[1].tensor_proto).dtype == np.float32
    metadata = events.SummaryMetadata("attn_monitor/logit_row_std")
    assert (metadata.plugin_data.plugin_name, metadata.data_class) == ("attn_monitor", 2)
    assert "root of the mean over rows" in metadata.summary_description
    content = json.loads(events.PluginTagToContent("attn_monitor")["attn_monitor/logit_row_std"])
    assert content == {"version": 1, "kind": "heads", "statistic": "logit_row_std", "layers": ["net.a b"]}
    names = [tensor_util.make_ndarray(row.tensor_proto).tolist() for row in events.Tensors("attn_monitor/layers")]
    assert names == [[b"net.a b"], [b"net.a b", b"first"]]

    texts = events.Tensors("attn_monitor/events/text_summary")
    assert [(text.step, text.tensor_proto.string_val[0].decode()) for text in texts] == [
        (3, str(event(3, 0))),
        (3, str(event(3, 1))),
    ]


def test_a_rich_write_that_fails_is_given_up_for_that_writer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = SummaryWriter(str(tmp_path / "broken")), SummaryWriter(str(tmp_path / "sound"))

    def no_loop(*args: Any, **kwargs: Any) -> None:
        raise TypeError("No loop matching the specified signature")

    def disk_full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, "add_image", no_loop)
    monkeypatch.setattr(broken, "_get_file_writer", disk_full)
    heads = HeadWriter({"entropy_normalized"}, RULE)
    record = {"a": make_record(entropy_normalized=[0.1, 0.2])}
    assert heads.write([broken, sound], 0, record, []) == [
        "images (TypeError: No loop matching the specified signature)",
        "tensors (OSError: [Errno 28] No space left on device)",
    ]
    assert heads.write([broken, sound], 1, record, []) == []
    sound.close()
    assert len(read(tmp_path / "sound").Images("attn_heads/entropy_normalized")) == 2


def test_only_tensorboard_writers_are_written_to() -> None:
    class CsvLike:
        def add_scalar(self) -> None: ...

    assert HeadWriter({"entropy"}, RULE).write([CsvLike(), None], 0, {"a": make_record()}, [event(0, 0)]) == []


def test_a_foreign_writer_gets_images_and_texts_but_no_tensors() -> None:
    calls: list[tuple[Any, ...]] = []

    class Foreign:
        def add_image(self, tag: str, *args: object, **kwargs: object) -> None:
            calls.append((tag, kwargs["dataformats"]))

        def add_text(self, *args: object) -> None:
            calls.append(args)

    record = {"a": make_record(entropy_normalized=[0.1, 0.2])}
    assert HeadWriter({"entropy_normalized"}, RULE, prefix="val_").write([Foreign()], 4, record, [event(4, 1)]) == []
    assert calls == [
        ("val_attn_monitor/events", str(event(4, 1)), 4),
        ("val_attn_heads/entropy_normalized", "HWC"),
        ("val_attn_heads/saturation_ratio", "HWC"),
    ]
