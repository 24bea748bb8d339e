"""The experiments of the examples: closed forms where there are some, and what their trainings must show."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attn_monitor import AttentionProbe, AttentionWarning
from examples import contrastive, why_sqrt_dk
from examples.why_sqrt_dk import CHOICES, HEAD_DIM, HEADS, Attention, Choice

BY_NAME = {choice.name: choice for choice in CHOICES}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_the_variance_of_products_is_the_dimension() -> None:
    found = why_sqrt_dk.products((3, 17, 101), items=211, rows=61)
    assert list(found) == [3, 17, 101]
    for dimension, variance in found.items():
        assert variance == pytest.approx(dimension, rel=0.03)


@pytest.mark.parametrize("spread", [0.25, 0.5])
def test_narrow_logits_follow_the_moments_of_a_lognormal(spread: float) -> None:
    """E[exp(k s)] = exp(k^2 sigma^2 / 2), so that the sum of p^k is exp(k (k - 1) sigma^2 / 2) / n^(k - 1)."""
    keys, variance = 1021, spread**2
    squares, cubes = math.exp(variance) / keys, math.exp(3 * variance) / keys**2
    found = why_sqrt_dk.concentration(keys, (spread,), rows=307)[spread]
    assert found["entropy_normalized"] == pytest.approx(1 - variance / (2 * math.log(keys)), abs=1e-3)
    assert found["jacobian_trace"] == pytest.approx((1 - squares) / (1 - 1 / keys), abs=3e-5)
    assert found["jacobian_norm"] == pytest.approx(math.sqrt(squares - 2 * cubes + squares**2), rel=1e-2)


def test_wide_logits_approach_the_random_energy_model() -> None:
    """Beyond the critical standard deviation the sum of p^2 tends to 1 - critical / std (Derrida 1981)."""
    keys = 4093
    critical = why_sqrt_dk.critical_std(keys)
    assert critical == pytest.approx(math.sqrt(2 * math.log(keys)))
    found = why_sqrt_dk.concentration(keys, (2 * critical, 4 * critical), rows=401)
    for times, statistics in zip((2, 4), found.values(), strict=True):
        assert statistics["jacobian_trace"] == pytest.approx(1 / times, rel=0.2)
        assert statistics["max_probability"] > 1 - 1 / times  # the largest is at least the sum of squares


def test_the_norm_of_the_jacobian_rises_and_falls_and_its_trace_only_falls() -> None:
    found = list(why_sqrt_dk.concentration(257, (0.25, 3.0, 32.0), rows=101).values())
    norms, traces = ([statistics[name] for statistics in found] for name in ("jacobian_norm", "jacobian_trace"))
    assert norms[0] < norms[1] > norms[2]
    assert traces[0] > traces[1] > traces[2]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_attention_is_what_its_choice_says(choice: Choice) -> None:
    attention, x = Attention(choice), torch.randn(3, 7, why_sqrt_dk.WIDTH)
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    if choice.norm:
        if choice.norm == "layer":  # centred, then of length sqrt(d_k) instead of 1
            query, key = (part - part.mean(-1, keepdim=True) for part in (query, key))
        length = math.sqrt(HEAD_DIM) if choice.norm == "layer" else 1.0
        query, key = (length * F.normalize(part, dim=-1) for part in (query, key))
    logits = choice.scale / math.sqrt(HEAD_DIM) * query @ key.mT
    if choice.softcap < math.inf:
        logits = choice.softcap * torch.tanh(logits / choice.softcap)
    probabilities = logits.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    expected = attention.out((probabilities @ value).transpose(1, 2).flatten(2))
    low = choice.softmax != torch.float32
    torch.testing.assert_close(attention(x), expected, atol=0.02 if low else 1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("1/sqrt(d_k)", 1.0),
        ("no scale", math.sqrt(HEAD_DIM)),
        ("1/d_k", 1 / math.sqrt(HEAD_DIM)),
        ("0.8/sqrt(d_k)", 0.8),
        ("1.2/sqrt(d_k)", 1.2),
        ("QK-norm", 1.0),
        ("no scale, softcap 30", math.sqrt(HEAD_DIM)),
        ("softmax in bf16", 1.0),
    ],
)
def test_the_monitor_sees_the_scale_of_the_choice(name: str, ratio: float) -> None:
    with AttentionProbe(attention := Attention(BY_NAME[name])) as probe:
        attention(torch.randn(3, 7, why_sqrt_dk.WIDTH))
    assert not probe.skipped
    [statistics] = probe.compute().values()
    assert statistics.scale_ratio is not None
    torch.testing.assert_close(statistics.scale_ratio, torch.full((HEADS,), ratio).double())


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice.learned], ids=lambda choice: choice.name)
def test_learned_factors_are_one_a_layer_or_one_a_head_and_learn(choice: Choice) -> None:
    attention = Attention(choice)
    attention(torch.randn(3, 7, why_sqrt_dk.WIDTH)).square().sum().backward()
    factor = attention.factor
    assert isinstance(factor, torch.nn.Parameter)
    assert factor.numel() == choice.learned in (1, HEADS)
    assert factor.grad is not None
    assert bool(factor.grad.ne(0).all())


def test_every_choice_reads_the_same_text() -> None:
    first, second = (list(why_sqrt_dk.RandomWindows(steps=3, seed=7)) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    assert first[0].shape == (why_sqrt_dk.BATCH, why_sqrt_dk.CONTEXT + 1)


def table(printed: str, first_cell: str) -> dict[str, list[str]]:
    """Return the cells of the table with this first cell, by row."""
    [block] = [block for block in printed.split("\n\n") if re.match(rf"\| {re.escape(first_cell)} +\|", block)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return {row[0]: row[1:] for row in rows}


def assert_real(rows: dict[str, list[str]], names: list[str]) -> None:
    """Assert that there is a row for each choice, with numbers that a training can have."""
    assert [name for name in rows if name in BY_NAME] == names
    for name in names:
        loss, ratio, entropy, trace, flagged, _ = rows[name]
        assert 3.5 < float(loss) < math.log(why_sqrt_dk.VOCABULARY) + 0.5  # hardly trained
        assert 0 < float(ratio) < 2
        assert 0 < float(entropy) <= 1
        assert 0 < float(trace) <= 1
        assert 0 <= int(flagged) <= why_sqrt_dk.LAYERS * HEADS


def test_the_row_of_a_short_training_has_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = why_sqrt_dk.train(BY_NAME["alpha a head, learned"], lr=1e-2, steps=3, seed=0, out=tmp_path)
    name, *cells = (str(cell) for cell in why_sqrt_dk.row([run]))
    assert name == "alpha a head, learned"
    assert_real({name: cells}, [name])
    assert cells[0] == f"{sum(run.losses.tolist()) / 3:.3f}"
    assert len(run.factors) == why_sqrt_dk.LAYERS * HEADS
    assert all(0.9 < factor < 1.1 and factor != 1 for factor in run.factors)
    assert [step for step, _ in run.monitor.history] == [0, 1, 2]
    why_sqrt_dk.show("Title", ["choice", "loss"], [[name, cells[0]]])
    assert table(capsys.readouterr().out, "choice")[name] == [cells[0]]


@pytest.mark.slow
def test_quick_run_has_every_choice_in_its_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert why_sqrt_dk.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert float(table(printed, "d_k")["256"][0]) == pytest.approx(256, rel=0.03)
    assert_real(table(printed, "choice"), list(BY_NAME))
    for picture in ("softmax.png", "trainings.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "no-scale" / "seed0").is_dir()


@pytest.mark.slow
def test_without_the_scale_heads_collapse_and_with_qk_norm_none_does(tmp_path: Path) -> None:
    unscaled, normed = (
        why_sqrt_dk.train(BY_NAME[name], lr=1e-2, steps=60, seed=0, out=tmp_path) for name in ("no scale", "QK-norm")
    )
    assert unscaled.flagged() == why_sqrt_dk.LAYERS * HEADS
    assert normed.flagged() == 0
    assert unscaled.lowest("jacobian_trace") < 0.1 < 0.5 < normed.lowest("jacobian_trace")
    assert unscaled.loss > normed.loss + 0.03


def test_views_are_two_noisy_copies_of_each_digit() -> None:
    digits = 0.5 + torch.rand(53, 8, 8)
    left, right = contrastive.views(digits, torch.Generator().manual_seed(0))
    assert left.shape == right.shape == digits.shape
    assert not torch.equal(left, right)
    far = (left - digits).abs() > 0.25  # five standard deviations of the noise: pixels that are gone
    assert float(far.float().mean()) == pytest.approx(0.1, abs=0.02)


@pytest.mark.slow
def test_the_runaway_temperature_is_flagged_and_the_clamped_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(AttentionWarning, match=r"contrastive.*critical_ratio"):
        assert contrastive.main(["--steps", "60", "--logdir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "runaway" in printed
    assert "none" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clamped", "runaway"]


def test_the_temperature_is_the_spread_of_the_logits_over_that_of_the_cosines(tmp_path: Path) -> None:
    outcome = contrastive.train(contrastive.Recipe("own", lr=3e-3, limit=5.5), steps=60, seed=0, logdir=tmp_path)
    temperatures = torch.stack(outcome.model.temperatures)
    assert float(temperatures[0]) == pytest.approx(contrastive.START)
    assert float(temperatures.max()) == pytest.approx(5.5)  # it would go on, and is held there
    ratio = math.sqrt(2 * math.log(contrastive.BATCH))
    spreads, ratios = outcome.curve("logit_row_std"), outcome.curve("critical_ratio")
    assert ratios == pytest.approx([spread / ratio for spread in spreads], rel=1e-4)
    assert not outcome.monitor.events
