"""The benchmark of alarms: its ground truth and its scores by examples worked out by hand, and tiny trainings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attn_monitor import AttentionProbe, SaturationRule
from tests.alarms import __main__ as command
from tests.alarms import page
from tests.alarms.cache import load, path, records, store
from tests.alarms.criteria import Criterion, Limit, events, replayed, sharp_rows, spike
from tests.alarms.data import batches
from tests.alarms.forecasts import fulfilment
from tests.alarms.grids import FULL, GPT, VIT
from tests.alarms.margins import Pilot
from tests.alarms.models import model
from tests.alarms.recipes import VARIANTS, Recipe, Setting
from tests.alarms.scores import Score, score, tuned
from tests.alarms.training import Array, Record, train
from tests.alarms.truth import Outcome, judged, outcomes, smoothed

TINY = Setting(layers=2, heads=3, head_dim=5, tokens=17, batch=2, steps=10, every=3)
COLLAPSING = Setting(layers=1, heads=2, head_dim=32, tokens=24, batch=4, steps=60, warmup=5)


def recipe(variant: str = "1/sqrt(d_k)", setting: Setting = TINY, lr: float = 1e-3) -> Recipe:
    return Recipe("gpt", setting, lr, variant, 0)


def record(loss: Array, statistics: dict[str, Array] | None = None, **changed: object) -> Record:
    """Return a record made by hand, with an observation every ten steps."""
    steps = np.arange(0, len(loss), 10)
    setting = replace(TINY, steps=len(loss), every=10)
    made = Record(recipe(setting=setting), loss, np.ones(len(loss)), steps, statistics or {}, keys=7)
    return replace(made, **changed)  # type: ignore[arg-type] # its own fields


def outcome(onset: int | None, name: float) -> Outcome:
    """Return an outcome whose record has a number by which a criterion can know it."""
    return Outcome(record(np.full(100, name)), final=name, excess=0.0, bad=onset is not None, onset=onset)


def calling(alarms: dict[float, int]) -> Criterion:
    """Return a criterion that calls some records, each at a step of its own."""
    return Criterion("made up", lambda given: alarms.get(float(given.loss[0])))


# -- ground truth ------------------------------------------------------------------------------------------------------


def test_a_smoothed_loss_is_the_mean_of_the_last_twenty() -> None:
    curve = smoothed(np.arange(30.0), 30)
    assert curve[0] == 0
    assert curve[9] == 4.5  # the mean of 0 to 9: there are no more
    assert curve[29] == 19.5  # the mean of 10 to 29


def test_a_training_is_bad_from_where_it_stays_above_the_best() -> None:
    good = np.full(100, 2.0)
    late = np.where(np.arange(100) < 60, 2.0, 2.5)  # its mean over 20 is above 2.1 once five are at 2.5
    recovered = np.where(np.arange(100) < 60, 2.5, 2.05)
    found = judged([record(good), record(late), record(recovered)], margin=0.11)
    assert [one.bad for one in found] == [False, True, False]
    assert found[1].onset == 64
    assert found[1].final == 2.5
    assert found[1].excess == pytest.approx(0.5)
    assert found[0].onset is found[2].onset is None


def test_a_margin_is_exceeded_not_reached() -> None:
    found = judged([record(np.full(40, 1.0)), record(np.full(40, 1.25))], margin=0.25)
    assert [one.bad for one in found] == [False, False]


def test_a_loss_that_is_not_finite_is_bad_from_there_on() -> None:
    broken = np.full(31, 2.0)
    broken[30] = math.nan  # the training ended with it
    whole = record(np.full(100, 2.0))
    found = judged([whole, replace(whole, loss=broken)], margin=0.1)
    assert [one.bad for one in found] == [False, True]
    assert found[1].onset == 30
    assert found[1].excess == math.inf


def test_a_family_that_breaks_down_as_a_whole_is_bad_as_a_whole() -> None:
    broken = record(np.array([2.0, math.nan, 2.0, 2.0]))
    assert [one.bad for one in judged([broken, broken], margin=0.1)] == [True, True]


def test_only_variants_of_the_same_model_rate_and_seed_compete() -> None:
    low, high = record(np.full(30, 1.0)), record(np.full(30, 3.0))
    apart = [replace(high, recipe=replace(high.recipe, lr=2e-3)), replace(high, recipe=replace(high.recipe, seed=1))]
    assert [one.bad for one in outcomes([low, *apart])] == [False, False, False]
    assert [one.bad for one in outcomes([low, high])] == [False, True]


def test_the_margin_of_the_pilot_is_three_times_the_spread_between_seeds() -> None:
    finals = {"1/sqrt(d_k)": (1.0, 1.2), "QK-norm": (3.0, 3.4)}  # variances 0.02 and 0.08, so 0.05 pooled
    made = [
        record(np.full(30, final), recipe=recipe(variant)) for variant, values in finals.items() for final in values
    ]
    assert Pilot.of(made).margin == pytest.approx(3 * math.sqrt(0.05))


# -- scores ------------------------------------------------------------------------------------------------------------


def test_precision_recall_and_lead_of_an_example() -> None:
    trainings = [outcome(50, 1.0), outcome(20, 2.0), outcome(40, 3.0), outcome(None, 4.0), outcome(None, 5.0)]
    found = score(calling({1.0: 10, 2.0: 26, 4.0: 30}), trainings)
    assert found == Score(found=2, missed=1, false=1, leads=(40, -6), shares=(0.4, -0.06))
    assert (found.precision, found.recall) == (2 / 3, 2 / 3)
    assert found.f1 == 2 / 3
    assert found.lead == 17
    assert found.share == pytest.approx(0.17)


def test_what_cannot_be_divided_is_no_number() -> None:
    silent = score(calling({}), [outcome(50, 1.0), outcome(None, 2.0)])
    assert math.isnan(silent.precision)
    assert math.isnan(silent.lead)
    assert (silent.recall, silent.f1) == (0, 0)
    assert math.isnan(score(calling({}), [outcome(None, 2.0)]).recall)
    assert page.score_cells(silent) == ("-", "0.00 (0/1)", "-")


def test_a_limit_is_tuned_for_the_highest_f1_then_for_the_longest_lead() -> None:
    rising = outcome(90, 1.0)
    trainings = [
        replace(rising, record=replace(rising.record, statistics={"x": np.arange(10.0)})),
        replace(outcome(None, 2.0), record=record(np.full(100, 2.0), {"x": np.full(10, 1.5)})),
    ]
    limit = Limit("x > {}", lambda given: given.statistics["x"], 9.0, True, (1.0, 2.0, 5.0, 20.0))
    best = tuned(limit, trainings)
    assert best.name == "x > 2"  # 1 calls the good one too, 5 is later, 20 finds nothing
    assert best.alarm(trainings[0].record) == 30
    assert best.alarm(trainings[1].record) is None


# -- criteria ----------------------------------------------------------------------------------------------------------


def test_a_spike_is_measured_by_the_fifty_losses_before_it() -> None:
    loss = np.where(np.arange(80) % 2, 1.0, 3.0)  # mean 2, standard deviation 1
    below, above = loss.copy(), loss.copy()
    below[60], above[60] = 7.9, 8.1
    assert spike().alarm(record(below)) is None
    assert spike().alarm(record(above)) == 60
    above[40] = 100.0  # with fewer than fifty before it
    above[60] = 3.0
    assert spike().alarm(record(above)) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_sharp_rows_are_counted_as_the_model_attends(variant: str) -> None:
    network = model(replace(recipe(variant), setting=replace(TINY, head_dim=16)))
    with torch.no_grad():
        for attention in network.attentions:
            attention.qkv.weight.mul_(3)
            attention.looking = True
        for given, _ in batches(recipe(variant)):
            network(given)
    shares = torch.stack([attention.sharp_rows() for attention in network.attentions])
    query, key = network.attentions[1]._looked_at
    logits = query @ key.mT * VARIANTS[variant].scale(16)
    if variant == "softcap 20":
        logits = 20 * torch.tanh(logits / 20)
    probabilities = logits.masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf).softmax(-1)
    expected = (probabilities[:, :, 1:].amax(-1) > 0.95).double().mean((0, 2))
    torch.testing.assert_close(shares[1].double(), expected)
    assert shares.shape == (2, 3)


def test_a_softcap_out_of_reach_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "softcap 20", replace(VARIANTS["softcap 20"], softcap=1e4))
    given, _ = next(batches(recipe()))
    torch.testing.assert_close(model(recipe("softcap 20"))(given), model(recipe())(given))


@pytest.mark.parametrize("task", ["gpt", "vit"])
def test_a_record_holds_what_the_probe_measured(task: str) -> None:
    made = replace(recipe(), task=task)  # type: ignore[arg-type] # one of the two
    found = train(made)
    assert (len(found.loss), found.steps.tolist()) == (10, [0, 3, 6, 9])
    assert {values.shape for values in found.statistics.values()} == {(4, 2, 3)}
    assert {"gradient_gain", "grad_logits_norm", "alignment", "sink_mass", "sharp_rows"} <= set(found.statistics)
    network = model(made)
    given, wanted = next(batches(made))
    with AttentionProbe(network) as probe:
        loss = F.cross_entropy(network(given), wanted)
        loss.backward()
    assert found.loss[0] == float(loss.detach())
    measured, again = probe.compute(), replayed(found, 0)
    assert list(again) == list(measured) == ["blocks.0.attention", "blocks.1.attention"]
    for layer, stats in measured.items():
        assert again[layer].measured().keys() == stats.measured().keys()
        for name, values in stats.measured().items():
            torch.testing.assert_close(again[layer].measured()[name].double(), values.double())
        assert (again[layer].head_dim, again[layer].keys, again[layer].calls) == (5, 17, 1)


def test_a_watched_training_learns_what_an_unwatched_one_learns() -> None:
    watched, once = train(recipe()), train(recipe(setting=replace(TINY, every=100)))
    assert watched.loss.tolist() == once.loss.tolist()
    assert len(once.steps) == 1


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_record_survives_the_disk_and_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = train(recipe())
    store(made, tmp_path)
    monkeypatch.setattr("tests.alarms.cache.train", lambda _: pytest.fail("it was there"))
    [found] = records([made.recipe], tmp_path, workers=1)
    assert found.loss.tolist() == made.loss.tolist()
    assert found.gradient_norm.tolist() == made.gradient_norm.tolist()
    assert (found.keys, found.steps.tolist()) == (17, made.steps.tolist())
    for name, values in made.statistics.items():
        np.testing.assert_array_equal(found.statistics[name], values)
    assert [file.name for file in tmp_path.iterdir()] == [f"{made.recipe.key}.npz"]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, lr=2e-3),
        lambda one: replace(one, seed=1),
        lambda one: replace(one, variant="unscaled"),
        lambda one: replace(one, setting=replace(one.setting, steps=11)),
    ],
)
def test_another_recipe_has_another_record(change: Callable[[Recipe], Recipe], tmp_path: Path) -> None:
    assert change(recipe()).key != recipe().key == recipe().key
    assert load(change(recipe()), tmp_path) is None


def test_another_version_has_another_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path(recipe(), tmp_path)
    monkeypatch.setattr("tests.alarms.recipes.VERSION", 2)
    assert path(recipe(), tmp_path) != before


def test_the_grid_is_large_and_every_part_has_both_models() -> None:
    recipes = [one for grid in FULL for one in grid.recipes()]
    assert len(recipes) == len({one.key for one in recipes}) >= 60
    for grid in (GPT, VIT):
        assert grid.rates[-1] / grid.rates[0] == pytest.approx(100)
        assert len(grid.seeds) >= 3
        parts = {(one.lr, one.seed): grid.part(one) for one in grid.recipes()}
        assert [parts[lr, 0] for lr in grid.rates] == ["tuning", "reported", "tuning", "reported"]
        assert {parts[lr, seed] for lr in grid.rates for seed in grid.fresh_seeds} == {"fresh"}


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_a_collapsing_training_is_called_and_a_healthy_one_is_not() -> None:
    collapsing = train(recipe("unscaled", COLLAPSING, lr=3e-2))
    healthy = train(recipe("QK-norm", COLLAPSING, lr=3e-3))
    assert command.CRITICAL.alarm(collapsing) is not None
    assert command.WARNING.alarm(collapsing) == 0  # unscaled attention starts above the limit
    assert command.CRITICAL.alarm(healthy) is None
    assert command.WARNING.alarm(healthy) is None
    assert sharp_rows(collapsing)[-1] > sharp_rows(healthy)[-1]
    assert events("none", frozenset(), SaturationRule()).alarm(collapsing) is None


@pytest.mark.slow
def test_the_quick_page_is_printed_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = page.PAGE.read_bytes() if page.PAGE.exists() else None
    for _ in range(2):  # trained, and from the cache
        command.main(["--quick", "--workers", "1", "--cache", str(tmp_path)])
    first, second = capsys.readouterr().out.split("# Alarms\n\n")[1:]
    assert first == second
    assert (page.PAGE.read_bytes() if page.PAGE.exists() else None) == before
    assert len(list(tmp_path.iterdir())) == 10
    rows = [line for line in first.splitlines() if line.startswith("| critical event |")]
    assert len(rows) == 1


def test_a_wrong_number_of_workers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--workers", "0"])
    assert "--workers expects at least 1, got 0" in capsys.readouterr().err


# -- forecasts ---------------------------------------------------------------------------------------------------------


def growing(reach: Callable[[float], float]) -> Outcome:
    """Return a training of one head, whose ratio at each step is given."""
    steps = np.arange(0.0, 1000, 10)
    spread = np.array([reach(step) for step in steps])[:, None, None] * math.sqrt(TINY.head_dim)
    counts = {name: np.zeros_like(spread) for name in ("rows", "masked_rows", "nonfinite")}
    made = record(np.zeros(1000), {"logit_row_std": spread, **counts})
    return Outcome(made, final=0.0, excess=0.0, bad=False, onset=None)


@pytest.mark.parametrize(
    ("reach", "what"),
    [
        (lambda step: 0.1 + step / 1000, "within"),  # at the limit at step 400
        (lambda step: 0.1 + step / 1000 if step < 375 else 2.0, "before"),
        (lambda step: min(0.1 + step / 1000, 0.48), "never"),
        (lambda step: min(0.1 + step / 1000, 0.48) + 0.5 * (step > 700), "after"),
        (lambda step: min(0.1 + step / 1000, 0.48) + 0.5 * (step > 500), "within"),
    ],
)
def test_a_forecast_is_compared_with_what_came(reach: Callable[[float], float], what: str) -> None:
    found = fulfilment([growing(reach)])
    assert (found.told, getattr(found, what)) == (1, 1)


def test_a_training_that_ends_too_soon_does_not_judge_a_forecast() -> None:
    given = growing(lambda step: min(0.1 + step / 1000, 0.48))
    cut = replace(
        given.record,
        steps=given.record.steps[:40],
        statistics={name: values[:40] for name, values in given.record.statistics.items()},
    )
    assert fulfilment([replace(given, record=cut)]).unknown == 1
