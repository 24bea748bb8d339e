"""Tags, scalars and tables: what is made of a record, and how much of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from attn_monitor import publishing
from attn_monitor.catalog import ALL, HEADLINE, STATISTICS
from attn_monitor.dashboards.scalars import scalars
from attn_monitor.dashboards.tables import Rows
from attn_monitor.publishing import Publisher, picture_due
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO
from attn_monitor.tags import layer_tag
from tests.models import LIGHTNING_ADVICE, make_record, read_events

pytestmark = LIGHTNING_ADVICE
RULE = SaturationRule()
NAN, INF = math.nan, math.inf


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
    table = Rows().take(0, record, RULE).tables["entropy_standard_error"]
    np.testing.assert_allclose(table, [[0.1, 0.3], [NAN, NAN]])


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
    rows = Rows()
    rows.take(0, {"absent": make_record(2, q_rms=[5.0, 5.0])}, RULE)
    record = {"b": make_record(3, logit_row_std=[4.0, 8.0, 2.0]), "a": make_record(1, logit_row_std=[1.0], q_rms=[2.0])}
    shot = rows.take(4, record, RULE)
    assert (shot.step, shot.layers, shot.heads, shot.joined) == (4, ("absent", "b", "a"), (2, 3, 1), True)
    np.testing.assert_array_equal(shot.tables["logit_row_std"], [[NAN] * 3, [4, 8, 2], [1, NAN, NAN]])
    np.testing.assert_array_equal(shot.tables["q_rms"], [[NAN] * 3, [NAN] * 3, [2, NAN, NAN]])
    np.testing.assert_array_equal(shot.tables[RATIO], [[NAN] * 3, [0.5, 1, 0.25], [0.125, NAN, NAN]])
    np.testing.assert_array_equal(shot.limits, [NAN, 0.5, 0.5])
    assert shot.above.tolist() == [[False] * 3, [False, True, False], [False] * 3]
    assert set(shot.tables) == {"logit_row_std", "q_rms", RATIO, "nonfinite"}
    assert all(table.dtype == np.float32 for table in shot.tables.values())
    assert not rows.take(5, record, RULE).joined


def test_tables_never_get_narrower() -> None:
    rows = Rows()
    rows.take(0, {"a": make_record(3, q_rms=[1.0, 2.0, 3.0])}, RULE)
    shot = rows.take(1, {"a": make_record(1, head_dim=None, q_rms=[7.0])}, RULE)
    np.testing.assert_array_equal(shot.tables["q_rms"], [[7, NAN, NAN]])
    np.testing.assert_array_equal(shot.head_dims, [NAN])
    assert shot.heads == (3,)


# -- how much ----------------------------------------------------------------------------------------------------------


def publish(folder: Path, layers: int, heads: int, chosen: frozenset[str], steps: int = 1) -> list[str]:
    """Publish records of random numbers to a TensorBoard logger; return what was reported."""
    logger = TensorBoardLogger(folder, name="", version="")
    loop: Any = SimpleNamespace(is_global_zero=True, loggers=[logger], metrics={})
    reported: list[str] = []
    publisher = Publisher(chosen, RULE, "", reported.append)
    values: dict[str, Any] = {name: torch.rand(heads).tolist() for name in sorted(ALL)}
    record = {f"model.layers.{layer}.self_attn": make_record(heads, **values) for layer in range(layers)}
    for step in range(steps):
        publisher.publish(loop, step, record, 0)
    logger.finalize("success")
    return reported


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (12, 12), (80, 64)])
@pytest.mark.parametrize("chosen", [HEADLINE, sorted(ALL)])
def test_the_number_of_scalar_tags_is_bounded(tmp_path: Path, layers: int, heads: int, chosen: list[str]) -> None:
    assert publish(tmp_path, layers, heads, frozenset(chosen)) == []
    tags = read_events(tmp_path).Tags()
    assert len(tags["scalars"]) <= 2 * len(chosen) * layers + 10
    if layers == 80 and len(chosen) == len(HEADLINE):
        assert len(tags["scalars"]) == 11 * 80 + 3 + 6  # as docs/dashboards.md says
    assert len(tags["images"]) == len(tags["histograms"]) == len(chosen) + 1


def test_pictures_become_rarer() -> None:
    due = [observation for observation in range(1, 2001) if picture_due(observation)]
    assert due[:20] == [*range(1, 17), 18, 20, 22, 24]
    assert len(due) == 71
    assert all(later - sooner <= max(1, sooner / 8) for sooner, later in pairwise(due))


def test_other_steps_have_pictures_when_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "picture_due", lambda observation: observation == 2)
    assert publish(tmp_path, 2, 3, frozenset(["entropy"]), steps=4) == []
    events = read_events(tmp_path)
    assert [picture.step for picture in events.Images("attn_heads/entropy")] == [1]
    assert [point.step for point in events.Histograms("attn_heads_histogram/entropy")] == [0, 1, 2, 3]
    assert [table.step for table in events.Tensors("attn_monitor/entropy")] == [0, 1, 2, 3]
    assert [text.step for text in events.Tensors("attn_monitor/summary/text_summary")] == [1]
