"""Colour scales, and the pictures of layers x heads."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from attn_monitor.catalog import ALL, STATISTICS
from attn_monitor.dashboards.colors import FRAME, INK, PALETTE, PAPER, UNKNOWN, color_indices, positions
from attn_monitor.dashboards.pictures import MAX_SIDE, Picture, draw, encode_png
from attn_monitor.dashboards.tables import Rows, Snapshot
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO, SCALES, Scale, scale_of
from tests.models import make_record

NAN, INF = math.nan, math.inf
RULE = SaturationRule()
LIMIT = 0.5
SPREAD = 8.0  # sqrt(d_k) of `make_record`


def snapshot(ratios: Sequence[Sequence[float]], **others: Sequence[Sequence[float]]) -> Snapshot:
    """Return the tables of layers with the given saturation ratios."""
    record = {}
    for row, heads in enumerate(ratios):
        values: dict[str, Any] = {name: table[row] for name, table in others.items()}
        spreads = [ratio * SPREAD for ratio in heads]
        record[f"layer.{row}"] = make_record(len(heads), logit_row_std=spreads, **values)
    return Rows().take(0, record, RULE)


def cells(picture: Picture, rows: int, columns: int) -> list[list[int]]:
    """Return the palette index in the middle of every cell."""
    middle = picture.cell // 2
    return [
        [
            int(
                picture.indices[
                    picture.top + row * picture.cell + middle, picture.left + column * picture.cell + middle
                ]
            )
            for column in range(columns)
        ]
        for row in range(rows)
    ]


# -- scales ------------------------------------------------------------------------------------------------------------


def test_every_number_per_head_has_a_scale() -> None:
    assert set(SCALES) == {*ALL, RATIO, "scale_ratio", "nonfinite"}
    assert scale_of("entropy_standard_error") == scale_of("entropy")
    assert scale_of("unheard_of") == Scale("linear", 0.0, 1.0)


@pytest.mark.parametrize("name", sorted(SCALES))
def test_a_scale_goes_from_0_to_1_and_back(name: str) -> None:
    scale = scale_of(name)
    assert [scale.position(scale.low), scale.position(scale.high)] == pytest.approx([0.0, 1.0])
    assert [scale.position(-INF), scale.position(INF)] == pytest.approx([0.0, 1.0])
    assert math.isnan(scale.position(NAN))
    for place in (0.0, 0.2, 0.5, 0.9, 1.0):
        assert scale.position(scale.value(place)) == pytest.approx(place, abs=1e-9)
    values = np.array([scale.value(place) for place in (0.1, 0.3, 0.8)])
    np.testing.assert_allclose(positions(scale, values), [0.1, 0.3, 0.8], atol=1e-9)


def test_a_signed_scale_has_zero_in_the_middle() -> None:
    scale = scale_of("logit_max")
    assert [scale.position(value) for value in (-1000.0, 0.0, 1000.0)] == [0.0, 0.5, 1.0]
    assert scale.position(-20.0) == pytest.approx(1 - scale.position(20.0))


def test_colours_are_fixed_and_nan_is_grey() -> None:
    found = PALETTE[color_indices("entropy_normalized", np.array([0.0, 1.0, -3.0, INF, NAN]))]
    assert found.tolist() == [[68, 1, 84], [253, 231, 37], [68, 1, 84], [253, 231, 37], [150, 150, 150]]


def lightness(indices: NDArray[np.uint8]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = PALETTE[indices].astype(float) @ [0.2126, 0.7152, 0.0722]
    return found


@pytest.mark.parametrize("name", sorted(SCALES))
def test_lightness_grows_with_the_value_and_extremes_are_stood(name: str) -> None:
    values = np.array([-INF, -1e30, -1.0, 0.0, 1e-30, 1e-3, 0.1, 0.45, 1.0, 50.0, 1e30, INF, NAN])
    found = color_indices(name, values)
    assert found[-1] == UNKNOWN
    light = lightness(found[:-1])
    assert np.diff(light).min() >= 0
    assert light[-1] > light[0] + 150


def test_the_map_of_the_ratio_breaks_at_the_limit() -> None:
    values = np.array([0.01, 0.3, 0.4999, 0.5, 0.5001, 0.7, 10.0])
    red, _, blue = (PALETTE[color_indices(RATIO, values, LIMIT)].astype(int)).T
    assert (blue > red + 50).tolist() == [True] * 4 + [False] * 3  # blue up to the limit, itself included
    assert (red > blue + 50).tolist() == [False] * 4 + [True] * 3
    values = np.geomspace(0.01, 10, 500)
    assert np.diff(lightness(color_indices(RATIO, values, LIMIT))).min() >= 0
    for limit in (1e-4, 0.01, 10.0, 99.0):  # at and beyond both ends of the scale
        just = color_indices(RATIO, np.array([limit, limit * 1.001]), limit)
        assert PALETTE[just[0]][2] > PALETTE[just[0]][0]
        assert PALETTE[just[1]][0] > PALETTE[just[1]][2]


@pytest.mark.parametrize(
    "seen",
    [  # Machado, Oliveira and Fernandes 2009, severity 1: without red, green and blue cones
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ],
)
def test_both_sides_of_the_limit_differ_for_the_colour_blind(seen: list[list[float]]) -> None:
    values = np.geomspace(0.01, 10, 60)
    linear = (PALETTE[color_indices(RATIO, values, LIMIT)] / 255) ** 2.2
    shown = 255 * np.clip(linear @ np.array(seen).T, 0, 1) ** (1 / 2.2)
    below, above = shown[values <= LIMIT], shown[values > LIMIT]
    distances = np.linalg.norm(below[:, None] - above[None], axis=-1)
    assert distances.min() > 50


def test_the_documentation_has_every_scale() -> None:
    page = (Path(__file__).parent.parent / "docs" / "dashboards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", page, re.MULTILINE)
    documented = {name: text for names, text in rows for name in re.findall(r"\w+", names) if name in SCALES}
    assert documented == {name: scale.describe() for name, scale in SCALES.items()}


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_cells_stand_where_layers_and_heads_are() -> None:
    entropy = [[0.0, 0.25, 0.5], [0.75, 1.0], [NAN, 0.1, 0.2, 0.3, 0.4]]
    picture = draw(
        "entropy_normalized", snapshot([[0.1] * len(row) for row in entropy], entropy_normalized=entropy), LIMIT
    )
    wanted = np.full((3, 5), PAPER)
    for row, values in enumerate(entropy):
        wanted[row, : len(values)] = color_indices("entropy_normalized", np.array(values))
    assert cells(picture, 3, 5) == wanted.tolist()
    assert wanted[2, 0] == UNKNOWN  # not measured is grey; no such head is blank


def test_heads_above_the_limit_are_framed_in_every_picture() -> None:
    shot = snapshot([[0.1, 0.9, 0.5], [0.1, 0.2, 0.51]], entropy_normalized=[[0.5] * 3] * 2)
    for name in ("entropy_normalized", RATIO):
        picture = draw(name, shot, LIMIT)
        size, top, left = picture.cell, picture.top, picture.left
        inner = picture.indices[
            top + 1 : top + 2 * size : size, left + 3 : left + 3 * size
        ]  # below each row's first line
        framed = [[bool((line[head * size : head * size + 9] == FRAME).all()) for head in range(3)] for line in inner]
        assert framed == [[False, True, False], [False, False, True]]


def test_a_layer_without_head_dimension_is_judged_by_its_own_limit() -> None:
    record = {
        "known": make_record(2, logit_row_std=[0.8 * SPREAD, 0.1], critical_ratio=[0.8, 0.1]),
        "unknown": make_record(2, head_dim=None, logit_row_std=[9.0, 9.0], critical_ratio=[0.8, 1.2]),
    }
    shot = Rows().take(0, record, RULE)
    assert shot.above.tolist() == [[True, False], [False, True]]
    (_, _, (b0, b1)) = PALETTE[np.array(cells(draw(RATIO, shot, LIMIT), 2, 2))[1]].T.tolist()
    assert b0 > 150  # blue
    assert b1 < 150


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 3), (12, 12), (80, 64), (7, 500), (1500, 3), (1, 2100)])
def test_pictures_are_sharp_and_of_moderate_size(layers: int, heads: int) -> None:
    generator = np.random.default_rng(0)
    shot = snapshot(generator.uniform(0.01, 0.4, (layers, heads)).tolist())
    picture = draw(RATIO, shot, LIMIT)
    assert max(picture.indices.shape) <= MAX_SIDE
    if layers <= 80 and heads <= 64:
        assert picture.cell >= 8
        assert cells(picture, layers, heads) == color_indices(RATIO, shot.tables[RATIO], LIMIT).tolist()
    assert min(picture.indices.shape) >= 65  # never a few pixels that a viewer would blow up
    opened = np.asarray(Image.open(io.BytesIO(picture.png())).convert("RGB"))
    np.testing.assert_array_equal(opened, picture.rgb())
    assert len(picture.png()) < 40_000


@pytest.mark.parametrize(("name", "worst"), [("logit_max", 50.0), ("entropy_normalized", 0.02)])
def test_what_does_not_fit_is_drawn_several_to_a_cell_by_the_worst(name: str, worst: float) -> None:
    layers = 2500
    values = [[5.0 if STATISTICS[name].worse == "up" else 0.9] for _ in range(layers)]
    values[1234] = [worst]
    picture = draw(name, snapshot([[0.1]] * layers, **{name: values}), LIMIT)
    (wanted,) = color_indices(name, np.array([worst]))
    assert (picture.indices[picture.top :, picture.left] == wanted).sum() == 1


def test_the_legend_shows_the_ends_of_the_scale_and_the_limit() -> None:
    def legend(name: str, limit: float) -> NDArray[np.uint8]:
        picture = draw(name, snapshot([[0.1]], entropy_normalized=[[0.5]]), limit)
        return picture.indices[picture.top + picture.cell :]

    bar = PALETTE[legend(RATIO, LIMIT)[10, 30:-12]].astype(int)
    turns = np.flatnonzero(np.diff((bar[:, 0] > bar[:, 2]).astype(int)))
    assert len(turns) == 1
    assert turns[0] / len(bar) == pytest.approx(scale_of(RATIO).position(LIMIT), abs=0.02)
    assert not np.array_equal(legend(RATIO, 0.25), legend(RATIO, LIMIT))
    bar = PALETTE[legend("entropy_normalized", LIMIT)[10, 30:-12]]
    assert (bar[0].tolist(), bar[-1].tolist()) == ([68, 1, 84], [253, 231, 37])
    assert (legend("entropy_normalized", LIMIT)[20:] == INK).sum() > 20  # numbers below the bar


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4), (80, 64), (7, 500)])
def test_both_axes_are_labelled_in_words(layers: int, heads: int) -> None:
    picture = draw(RATIO, snapshot([[0.1] * heads] * layers), LIMIT)
    margin = (picture.indices[: picture.top] == INK).astype(np.uint8)
    for word in ("layer", "head"):
        sheet = Image.new("1", (60, 20), 0)
        ImageDraw.Draw(sheet).text((4, 4), word, fill=1, font=ImageFont.load_default(size=10))
        drawn = np.asarray(sheet.crop(sheet.getbbox())).astype(np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(margin, drawn.shape)
        assert (windows == drawn).all(axis=(2, 3)).sum() == 1, word


def test_a_record_without_layers_gives_an_empty_picture() -> None:
    shot = Rows().take(0, {"a": make_record(2, logit_row_std=[1.0, 1.0])}, RULE)
    assert draw(RATIO, shot, LIMIT).cell > 0
    rows = Rows()
    rows.take(0, {"a": make_record(2, logit_row_std=[1.0, 1.0])}, RULE)
    assert RATIO not in rows.take(1, {}, RULE).tables
    assert rows.take(1, {}, RULE).above.tolist() == [[False, False]]


def test_png_of_a_single_pixel_and_line() -> None:
    for indices in (np.array([[3]], dtype=np.uint8), np.arange(7, dtype=np.uint8)[None]):
        opened = np.asarray(Image.open(io.BytesIO(encode_png(indices))).convert("RGB"))
        np.testing.assert_array_equal(opened, PALETTE[indices])
