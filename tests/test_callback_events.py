"""Events of a training: warned of once, counted, flushed, and what is done about them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor

from attn_monitor import AttentionMonitor, AttentionSaturationError, SaturationEvent, SaturationRule
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet, read_events
from tests.scripted import Scripted, fit

pytestmark = LIGHTNING_ADVICE


def test_the_script_sets_the_ratio_of_one_head() -> None:
    monitor = AttentionMonitor(saturation=SaturationRule(threshold=99))
    fit(Scripted([0.25, 1.0]), monitor, 2)
    ratios = [monitor.saturation.ratio(record["net.blocks.0"]).tolist() for _, record in monitor.history]
    assert ratios == [[0.0, pytest.approx(0.25)], [0.0, pytest.approx(1.0)]]


def test_a_head_is_warned_of_once_until_it_recovers() -> None:
    monitor = AttentionMonitor()
    _, said = fit(Scripted([0.3, 0.6, 0.9, 1.5, 0.6, 0.3, 0.6, 0.6]), monitor, 8)
    assert [(event.step, event.head, event.severity) for event in monitor.events] == [
        (1, 1, "warning"),
        (6, 1, "warning"),
    ]
    assert len(said) == 2
    assert said[0].startswith("1 head is newly saturated:\n  step 1: head 1 of net.blocks.0 is")
    assert "(limit 0.5)" in said[0]
    assert said[1].startswith("1 head is saturated again (2 events so far), at step 6: head 1 of net.blocks.0 is")
    assert "\n" not in said[1]  # the remedy was told


def test_one_warning_per_step_names_every_head() -> None:
    monitor = AttentionMonitor()
    _, (said,) = fit(Scripted([0.7], layers=3), monitor, 1)
    assert said.startswith("3 heads are newly saturated:")
    assert all(f"head 1 of net.blocks.{layer}" in said for layer in range(3))


def test_a_long_list_is_cut_to_the_worst() -> None:
    monitor = AttentionMonitor()
    _, (said,) = fit(Scripted([0.7], layers=25), monitor, 1)
    assert said.count("\n") == 5  # with one explanation for all
    assert said.endswith("and 22 more, all in `monitor.events`")
    assert len(monitor.events) == 25


def test_saturated_heads_counts_the_open_events(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(saturation=SaturationRule(release=0.5))
    fit(Scripted([0.3, 0.6, 0.3, 0.2], layers=2), monitor, 4, logger=logger)
    events = read_events(logger.log_dir)
    assert [point.value for point in events.Scalars("attn_monitor/saturated_heads")] == [0.0, 2.0, 2.0, 0.0]
    texts = events.Tensors("attn_monitor/events/text_summary")
    pages = [text.tensor_proto.string_val[0].decode() for text in texts]
    assert all(event.line in pages[0] for event in monitor.events)
    assert "2 heads recovered" in pages[1]
    assert [text.step for text in texts] == [1, 3]


def test_events_are_flushed_at_once(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, flush_secs=10_000, max_queue=10_000)
    seen: list[int] = []

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(len(read_events(logger.log_dir).Tags()["scalars"]))

    fit(Scripted([0.6]), AttentionMonitor(), 1, logger=logger, callbacks=[Look()])
    assert seen[0] > 0


def test_warn_lets_a_critical_run_go_on() -> None:
    trainer, said = fit(Scripted([5.0, 5.0, 5.0]), AttentionMonitor(on_saturation="warn"), 3)
    assert (trainer.global_step, len(said)) == (3, 1)


class Spreading(Scripted):
    """Has one more layer at the given ratio in every step, from the first layer on."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            for index, block in enumerate(self.net.blocks):
                if index > self.global_step:
                    block.qkv.weight *= 0.1
        return super().loss(batch)


def test_one_cause_that_takes_layer_after_layer_is_told_in_full_once_and_then_counted() -> None:
    layers = 17
    monitor = AttentionMonitor()
    _, said = fit(Spreading([0.7] * layers, layers=layers), monitor, layers)
    assert len(monitor.events) == layers
    assert [text.split(":")[0] for text in said if "saturated" in text] == [
        "1 head is newly saturated",
        "1 more head is newly saturated (2 events so far), at step 1",
        "2 more heads are newly saturated (4 events so far), the worst at step 2",
        "4 more heads are newly saturated (8 events so far), the worst at step 4",
        "8 more heads are newly saturated (16 events so far), the worst at step 8",
    ]


def test_stop_ends_the_fit_after_the_step_that_made_an_event_critical() -> None:
    monitor = AttentionMonitor(on_saturation="stop")
    trainer, said = fit(Scripted([0.6, 0.8, 1.0, 1.0, 1.0], both=True), monitor, 5)
    assert (trainer.global_step, trainer.should_stop) == (3, True)
    stopping = [text for text in said if "training stops" in text]
    assert len(stopping) == 1
    assert stopping[0].startswith(
        "training stops, 2 heads are critical:\n  step 2: head 0 of net.blocks.0 is saturated, "
    )
    assert ", since step 0\n" in stopping[0]
    reason = (
        "critical: only 38% of the gradient of uniform attention gets through, on average over the model's 2 heads "
        "(mean jacobian_trace, limit 45%); no harm if the loss still falls"
    )
    assert stopping[0].count(reason) == 1
    assert [event.severity for event in monitor.events] == ["critical", "critical"]


def test_stop_says_that_it_waits_for_the_least_number_of_steps() -> None:
    monitor = AttentionMonitor(on_saturation="stop")
    trainer, said = fit(Scripted([1.5] * 9, both=True), monitor, 9, min_steps=4)
    (waiting,) = [text for text in said if "training stops" in text]
    assert waiting.startswith(
        "training stops as soon as min_epochs=1 and min_steps=4 allow it, 2 heads are critical:\n"
    )
    assert "step 0: head 1 of net.blocks.0 is saturated" in waiting
    assert trainer.global_step == 9  # Lightning takes min_epochs=1 where only min_steps is given


def test_stop_ignores_a_mere_warning() -> None:
    trainer, _ = fit(Scripted([0.6, 5.0, 0.7]), AttentionMonitor(on_saturation="stop"), 3)
    assert (trainer.global_step, trainer.should_stop) == (3, False)


def test_raise_ends_the_fit_with_the_critical_events(tmp_path: Path) -> None:
    monitor = AttentionMonitor(on_saturation="raise")
    logger = TensorBoardLogger(tmp_path)
    model = Scripted([0.6, 1.2, 1.2], both=True)
    with pytest.raises(
        AttentionSaturationError, match=r"step 1: head 1 of net\.blocks\.0 is saturated.*since step 0"
    ) as raised:
        fit(model, monitor, 3, logger=logger)
    assert raised.value.events == monitor.events
    assert (model.global_step, [event.severity for event in monitor.events]) == (2, ["critical"] * 2)
    assert [point.step for point in read_events(logger.log_dir).Scalars("attn_monitor/saturated_heads")] == [0, 1]


def test_a_callable_is_given_new_and_escalated_events() -> None:
    calls: list[tuple[int, list[str]]] = []

    def note(trainer: Any, pl_module: Any, events: Sequence[SaturationEvent]) -> None:
        calls.append((trainer.global_step, [event.severity for event in events]))
        assert isinstance(pl_module, Scripted)

    fit(Scripted([0.3, 0.6, 0.7, 1.2, 1.3, 0.1, 1.1], both=True), AttentionMonitor(on_saturation=note), 7)
    assert calls == [(2, ["warning"] * 2), (4, ["critical"] * 2), (7, ["critical"] * 2)]


def test_an_error_in_the_users_callable_is_the_users_and_costs_nothing_of_the_record(tmp_path: Path) -> None:
    def broken(trainer: Any, pl_module: Any, events: Sequence[SaturationEvent]) -> None:
        raise ZeroDivisionError("mine")

    monitor, model = AttentionMonitor(on_saturation=broken), Scripted([0.3, 0.6])
    logger = TensorBoardLogger(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError, match="mine"):
            quiet(callbacks=[monitor], logger=logger).fit(model, loader(2))
    # Whatever belongs to the step is there: the warning, the record, the metrics, the events, the flight record.
    assert any("1 head is newly saturated" in str(warning.message) for warning in caught)
    assert [step for step, _ in monitor.history] == [0, 1]
    assert [(event.step, event.head) for event in monitor.events] == [(1, 1)]
    written = read_events(logger.log_dir).Scalars("attn_monitor/saturated_heads")
    assert [(point.step, point.value) for point in written] == [(0, 0.0), (1, 1.0)]
    assert [path.name for path in Path(logger.log_dir).glob("attn_monitor_flight_*.json")]
    # And nothing of ours is left.
    assert not any(hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks))
    assert "training_step" not in vars(model)
    assert not monitor._observers
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nan_and_inf_are_counted_flagged_and_said(broken: float) -> None:
    model = Lit("hand")
    with torch.no_grad():
        model.net.blocks[0].qkv.bias[0] = broken  # one query entry of head 0 ...
        model.net.blocks[0].qkv.bias[12] = 100.0  # ... that meets positive key entries only
    monitor = AttentionMonitor()
    trainer, said = fit(model, monitor, 3)
    assert trainer.global_step == 3
    first = monitor.history[0][1]["net.blocks.0"]
    assert first.nonfinite.tolist() == [3 * 5 * 5, 0]
    event = monitor.events[0]
    assert (event.step, event.head, event.statistic, event.value, event.severity) == (0, 0, "nonfinite", 75, "critical")
    assert any("step 0: head 0 of net.blocks.0 has 75 unmasked logits that are nan or inf" in text for text in said)
    told, *later = [text for text in said if "critical" in text]
    assert all(text.startswith("1 more head is critical, its logits are nan or inf (") for text in later)
    assert told.startswith("1 head is critical, its logits are nan or inf:\n  step 0: head 0 of net.blocks.0 has 75")


def no_events(trainer: Any, pl_module: Any) -> None: ...


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"on_saturation": None}, TypeError, 'got None of type NoneType. Leave it out, or write "warn"'),
        ({"on_saturation": 3}, TypeError, "got 3 of type int"),
        ({"on_saturation": "halt"}, ValueError, r"expects one of \['warn', 'stop', 'raise'\] or a callable .*'halt'"),
        ({"on_saturation": no_events}, TypeError, r"no_events:\d+, which cannot be called with three arguments"),
        ({"on_saturation": Callback}, TypeError, "got the class Callback. Pass an instance or a function"),
        ({"modules": lambda module: True}, TypeError, r"lambda>:\d+, which cannot be called with two arguments"),
        ({"modules": ["a", lambda a, b, c: True]}, TypeError, "cannot be called with two arguments"),
        ({"modules": ""}, ValueError, "`modules` has an empty name"),
        ({"modules": ["a", ""]}, ValueError, "`modules` has an empty name"),
        ({"modules": []}, ValueError, "`modules` is an empty list"),
        ({"modules": ()}, ValueError, "`modules` is an empty list"),
        ({"stages": 3}, TypeError, "`stages` expects a collection of some of .*, got 3"),
        ({"stages": [3]}, TypeError, "`stages` expects names of stages, .*, got 3"),
        ({"stages": "train"}, TypeError, r"Write stages=\('train',\)"),
        ({"stages": ["fit"]}, ValueError, "`stages` expects some of .*, got 'fit'"),
    ],
)
def test_bad_arguments_are_refused_when_the_monitor_is_made(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AttentionMonitor(**settings)


@pytest.mark.parametrize("action", [print, lambda *found: None, lambda a, b, c, d=1: None, partial(print, sep="")])
def test_whatever_can_be_called_with_three_arguments_is_an_action(action: Any) -> None:
    assert AttentionMonitor(on_saturation=action).on_saturation is action
