"""What is done about events: checkpoints, resuming, several processes."""

from __future__ import annotations

import copy
import gc
import json
import math
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy

from attn_monitor import AttentionMonitor, AttentionSaturationError, QKClip, SaturationRule
from attn_monitor.events import AttentionWarning, SaturationEvent
from attn_monitor.notices import Notices, surviving
from tests.models import LIGHTNING_ADVICE, loader, make_record, quiet
from tests.processes import START_METHOD
from tests.scripted import Scripted, fit

pytestmark = LIGHTNING_ADVICE


def test_a_checkpoint_is_saved_at_the_first_flag_and_when_it_is_critical(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = AttentionMonitor(save_checkpoint=True)
    _, said = fit(Scripted([0.3, 0.6, 0.3, 0.6, 1.2, 0.1, 1.2], both=True), monitor, 7, logger=logger)
    folder = Path(logger.log_dir) / "checkpoints"
    names = ["attn_monitor-critical-step=4.ckpt", "attn_monitor-flagged-step=1.ckpt"]
    assert sorted(path.name for path in folder.glob("*.ckpt")) == names
    assert [text for text in said if "checkpoint" in text] == [
        f"step 1: checkpoint saved, {folder}/{names[1]}",
        f"step 4: checkpoint saved, {folder}/{names[0]}",
    ]
    saved = torch.load(folder / names[1], weights_only=True)
    assert saved["global_step"] == 2  # after the step that was flagged
    assert "state_dict" in saved


class Breaking(Scripted):
    """Has nan in the queries of head 0 at the steps that are scripted as nan."""

    def loss(self, batch: Any) -> Any:
        if math.isnan(self.ratios[self.global_step]):
            with torch.no_grad():
                self.net.blocks[0].qkv.bias[0] = math.nan
        return super().loss(batch)


@pytest.mark.parametrize(
    ("ratios", "kept", "before"),
    [
        ([0.3, math.nan, math.nan], [], "none was saved before"),
        ([0.6, math.nan, math.nan], ["attn_monitor-flagged-step=0.ckpt"], "the last one before is {}"),
        ([0.3, math.nan, 0.6], ["attn_monitor-flagged-step=2.ckpt"], "none was saved before"),
    ],
)
def test_no_checkpoint_is_saved_while_logits_are_nan(
    tmp_path: Path, ratios: list[float], kept: list[str], before: str
) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(save_checkpoint=True)
    _, said = fit(Breaking(ratios), monitor, len(ratios), logger=logger)
    folder = Path(logger.log_dir) / "checkpoints"
    assert [path.name for path in folder.glob("*.ckpt")] == kept
    (told,) = [text for text in said if "no checkpoint is saved" in text]
    assert told == (
        "step 1: no checkpoint is saved while logits are nan or inf, since the weights may be too; "
        + before.format(*(folder / name for name in kept))
    )


def test_without_the_option_or_an_event_nothing_is_saved(tmp_path: Path) -> None:
    for monitor, ratios in ((AttentionMonitor(), [0.6]), (AttentionMonitor(save_checkpoint=True), [0.3])):
        fit(Scripted(ratios), monitor, 1, logger=CSVLogger(tmp_path))
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_a_checkpoint_that_cannot_be_saved_is_told_and_the_training_goes_on(tmp_path: Path) -> None:
    class Full(Scripted):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise OSError(28, "No space left on device")

    trainer, said = fit(Full([0.6, 0.6]), AttentionMonitor(save_checkpoint=True), 2, logger=CSVLogger(tmp_path))
    assert trainer.global_step == 2
    assert "saving a checkpoint at step 0 failed: OSError: [Errno 28] No space left on device" in "".join(said)


# Up in a straight line, for a forecast; then warnings, a collapse, a recovery, and once more.
RISING = [0.2 + 0.02 * step for step in range(17)]
RATIOS = [*RISING, 0.7, 0.9, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 0.3, 0.3, 0.3, 0.3, 0.6, 0.6, 0.6, 0.6]


class Story(Callback):
    """Writes down what a monitor says, step by step."""

    def __init__(self, monitor: AttentionMonitor) -> None:
        self.monitor = monitor
        self.lines: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for event in self.monitor.events:
            self.lines.append(f"{trainer.global_step} {event}")


def story(
    monitor: AttentionMonitor, steps: int, every: int, checkpoint: Path | None = None
) -> tuple[Any, list[str], list[str]]:
    """Train up to a step and return the trainer, the state of all events after each step, and the forecasts."""
    told = Story(monitor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet(callbacks=[monitor, told], max_steps=steps, max_epochs=-1, log_every_n_steps=every)
        trainer.fit(Scripted(RATIOS, both=True), loader(len(RATIOS)), ckpt_path=checkpoint)
    forecasts = [str(warning.message) for warning in caught if "at its present growth" in str(warning.message)]
    return trainer, told.lines, forecasts


@pytest.mark.slow
@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize(("every", "extra"), [(1, 0), (3, 0), (3, 4)])
def test_a_resumed_run_raises_the_events_of_an_unbroken_one(
    tmp_path: Path, patience: int, every: int, extra: int
) -> None:
    def monitor() -> AttentionMonitor:
        return AttentionMonitor(saturation=SaturationRule(patience=patience), adaptive_steps=extra)

    _, whole, foretold = story(monitor(), len(RATIOS), every)
    assert any("critical" in line for line in whole)
    assert bool(foretold) == (every == 1)  # else there are too few observations
    for cut in (1, 13, 17, 19, 22, 28, 32):
        trainer, before, first = story(monitor(), cut, every)
        trainer.save_checkpoint(tmp_path / "cut.ckpt")
        _, after, second = story(monitor(), len(RATIOS), every, tmp_path / "cut.ckpt")
        assert (before + after, first + second) == (whole, foretold), f"cut after step {cut}"


class OneSided(Scripted):
    """Collapses on both ranks, on the first one less."""

    def on_fit_start(self) -> None:
        if self.global_rank == 0:
            self.ratios = [0.8 * ratio for ratio in self.ratios]


class Note(Callback):
    """Writes down how far a process came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(trainer.global_step))


def reached(folder: Path) -> list[int]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def two_processes(folder: Path, monitor: AttentionMonitor, ratios: Sequence[float]) -> None:
    strategy = DDPStrategy(start_method=START_METHOD, process_group_backend="gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = CSVLogger(folder, name="csv", version=0)
        trainer = quiet(strategy=strategy, devices=2, callbacks=[Note(folder), monitor], logger=logger)
        trainer.fit(OneSided(ratios, both=True), loader(2 * len(ratios)))


@pytest.mark.slow
def test_every_process_stops_after_the_step_at_which_one_is_critical(tmp_path: Path) -> None:
    two_processes(tmp_path, AttentionMonitor(on_saturation="stop", save_checkpoint=True), [0.3, 0.3, 1.2, 1.2, 1.2])
    assert reached(tmp_path) == [3, 3]
    assert len(list(tmp_path.rglob("attn_monitor-critical-step=2.ckpt"))) == 1


@pytest.mark.slow
def test_every_process_raises_where_one_is_critical(tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match="attention is critically saturated"
    ):  # a process that raised, whichever is first
        two_processes(tmp_path, AttentionMonitor(on_saturation="raise"), [0.3, 1.2, 1.2])
    assert reached(tmp_path) == [2, 2]


def test_the_error_of_a_process_without_events_says_where_they_are() -> None:
    assert str(AttentionSaturationError([])) == (
        "attention is critically saturated\n  the events were found by another rank"
    )


def an_event(step: int, head: int, **more: Any) -> SaturationEvent:
    settings: dict[str, Any] = {
        "statistic": "logit_row_std",
        "value": 9.0,
        "ratio": 0.6 + head / 1000,
        "threshold": 0.5,
    }
    settings |= {"severity": "warning", "head_dim": 7, **more}
    return SaturationEvent(step=step, layer="a", head=head, **settings)


def said_of(notices: Notices) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notices.say(aloud=True)
    return [str(warning.message) for warning in caught]


def test_the_number_of_warnings_grows_with_the_logarithm_of_the_number_of_events() -> None:
    notices, said = Notices(), []
    for step in range(3000):
        notices.add_events([an_event(step, step), an_event(step, step, severity="critical")])
        said.append(said_of(notices))
    told = [text for texts in said for text in texts]
    assert len(told) == 2 * 12  # at 1, 2, 4, ... 2048 of each
    assert all(text.count("\n") <= 2 for text in told)
    assert told[-1] == (
        "1024 more heads are newly saturated (2048 events so far), the worst at step 2047: head 2047 of a is "
        "saturated, logit_row_std 9 is 2.65 x sqrt(d_k=7) (limit 0.5)"
    )
    notices.forget_said()  # another fit
    notices.add_events([an_event(0, 0)])
    assert said_of(notices)[0].startswith("1 head is newly saturated:\n")


def test_another_remedy_gets_a_line_and_one_that_was_told_does_not() -> None:
    notices, said = Notices(), []
    for step, remedy in enumerate(["scale", "scale", "norm", "norm", "norm", "norm", "norm", "norm"]):
        notices.add_events([an_event(step, step, cause=f"likely cause: {remedy}", remedy=remedy)])
        said += said_of(notices)
    assert [text.splitlines()[1:] for text in said[1:]] == [[], ["  likely cause: norm; what helps: norm"], []]


def test_the_cause_of_many_says_whose_it_is() -> None:
    notices = Notices()
    notices.add_events([an_event(3, head, cause=f"likely cause: {head}", remedy="norm") for head in range(7)])
    (text,) = said_of(notices)
    lines = text.splitlines()
    assert lines[0] == "7 heads are newly saturated:"
    assert lines[1].startswith("  step 3: head 6 of a is saturated")
    assert lines[4:] == [
        "    likely cause (for the worst of these, head 6 of a): 6; what helps: norm",
        "  and 4 more, all in `monitor.events`",
    ]


def test_what_is_nan_is_told_first_and_as_critical() -> None:
    broken = an_event(3, 1, statistic="nonfinite", severity="critical", ratio=math.inf, value=5)
    notices = Notices()
    notices.add_events([an_event(3, 0), broken, an_event(3, 2, statistic="float16_overflow")], "training stops, ")
    assert [text.splitlines()[0] for text in said_of(notices)] == [
        "training stops, 1 head is critical, its logits are nan or inf:",
        "1 head is newly saturated:",
        "1 head has logits near the end of float16:",
    ]
    assert str(AttentionSaturationError([broken])).startswith(
        "logits are nan or inf\n  step 3: head 1 of a has 5 unmasked"
    )
    both = AttentionSaturationError([broken, an_event(3, 0, severity="critical")])
    assert str(both).startswith("attention is critically saturated and logits are nan or inf\n")


def test_an_error_that_comes_back_in_other_words_is_told_once() -> None:
    notices = Notices()
    said: list[str] = []
    for step in range(5):
        with surviving(notices.add, f"judging the record of step {step}"):
            raise (OSError if step < 3 else ValueError)(f"at 12:0{step}")
        said += said_of(notices)
    assert said == [
        "judging the record of step 0 failed: OSError: at 12:00",
        "judging the record of step 3 failed: ValueError: at 12:03",
    ]


@pytest.mark.filterwarnings("error::attn_monitor.events.AttentionWarning")
def test_a_warning_that_is_an_error_starts_with_what_happened() -> None:
    notices = Notices()
    notices.add("the scale is missing")
    with pytest.raises(AttentionWarning, match=r"^the scale is missing$"):
        notices.say(aloud=True)


def test_a_shown_warning_names_the_package_once() -> None:
    notices = Notices()
    notices.add("the scale is missing")
    with pytest.warns(AttentionWarning) as caught:
        notices.say(aloud=True)
    shown = warnings.formatwarning(str(caught[0].message), caught[0].category, caught[0].filename, caught[0].lineno)
    assert shown == "attn_monitor:1: AttentionWarning: the scale is missing\n"


def test_warnings_name_no_line_of_the_package() -> None:
    with pytest.warns(AttentionWarning) as caught:
        quiet(callbacks=[AttentionMonitor()]).fit(Scripted([0.6]), loader(1))
    assert {warning.filename for warning in caught if issubclass(warning.category, AttentionWarning)} == {
        "attn_monitor"
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of everything within nested dictionaries and lists."""
    if isinstance(value, dict):
        return [path, *(place for key, item in value.items() for place in places(item, (*path, key)))]
    if isinstance(value, list):
        return [path, *(place for key, item in enumerate(value[:2]) for place in places(item, (*path, key)))]
    return [path]


BESIDE = ("flight", "history")
"""What is restored for itself; it has tests of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("junk", [None, "junk", -1, [], {}, float("nan")], ids=repr)
def test_a_damaged_state_is_restored_whole_or_not_at_all(junk: Any) -> None:
    donor = AttentionMonitor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        fit(Scripted(RATIOS[:24], both=True), donor, 24)
    state = donor.state_dict()
    for place in places({name: value for name, value in state.items() if name not in BESIDE})[1:]:
        damaged = copy.deepcopy(state)
        inner = damaged
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = junk
        heir = AttentionMonitor()
        fresh = {name: value for name, value in heir.state_dict().items() if name not in BESIDE}
        heir.load_state_dict(damaged)
        if not heir._restored:
            assert {name: value for name, value in heir.state_dict().items() if name not in BESIDE} == fresh, place
        with warnings.catch_warnings():  # whatever was restored must not end a training
            warnings.simplefilter("ignore", AttentionWarning)
            heir._judge.take(99, {"net.blocks.0": make_record(2, logit_row_std=[9.0, 9.0], jacobian_trace=[0.1, 0.1])})


def test_an_error_while_judging_costs_the_judgement_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("attn_monitor.tracking.SaturationTracker.update", broken)
    monitor = AttentionMonitor(on_saturation="raise")
    trainer, said = fit(Scripted([1.5, 1.5], both=True), monitor, 2)
    assert (trainer.global_step, [step for step, _ in monitor.history]) == (2, [0, 1])
    assert "judging the record of step 0 failed: ZeroDivisionError: ours" in said


@pytest.mark.parametrize("flight", [None, 3, {"heads": {"net.blocks.0": float("inf")}}], ids=repr)
def test_a_damaged_flight_record_does_not_end_a_resumed_fit(flight: Any) -> None:
    monitor = AttentionMonitor()
    monitor.load_state_dict({**AttentionMonitor().state_dict(), "flight": flight})
    trainer, _ = fit(Scripted([0.3]), monitor, 1)
    assert trainer.global_step == 1


def test_nothing_of_a_model_is_kept_after_a_fit_with_a_mitigation() -> None:
    monitor, model = AttentionMonitor(mitigation=QKClip()), Scripted([0.3])
    fit(model, monitor, 1)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_every_forecast_of_a_step_is_said() -> None:
    monitor = AttentionMonitor()
    _, said = fit(Scripted(RISING, layers=2), monitor, len(RISING))
    (told,) = [text for text in said if "at its present growth" in text]
    assert [f"net.blocks.{index} reaches the limit" in told for index in (0, 1)] == [True, True]
