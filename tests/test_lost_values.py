"""What can be given no more reads nan: in `callback_metrics`, in every logger, and for Lightning's own callbacks."""

from __future__ import annotations

import csv
import math
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor.dashboards.given import Given
from attn_monitor.dashboards.scalars import scalars
from attn_monitor.dashboards.tables import Rows, overview
from attn_monitor.lightning_loop import LightningLoop
from attn_monitor.publishing import Publisher
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO
from tests.models import DIM, LIGHTNING_ADVICE, Lit, fit, make_record, quiet, read_events

pytestmark = LIGHTNING_ADVICE
NAN = math.nan
RULE = SaturationRule()
FIRST, SECOND = "net.blocks.0", "net.blocks.1"


class Breaking(Lit):
    """The key weights of one head of a layer are nan from a step on; nothing learns, so that nothing else is."""

    def __init__(self, *, layer: int = 1, heads: tuple[int, ...] = (0, 1), step: int = 3) -> None:
        super().__init__("hand", "hand")
        self.place, self.step = (layer, heads), step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_step == self.step:
            layer, heads = self.place
            width = DIM // 2
            with torch.no_grad():
                for head in heads:
                    self.net.blocks[layer].qkv.weight[DIM + head * width : DIM + (head + 1) * width] = NAN
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def last(trainer: Any) -> dict[str, float]:
    return {tag: value.item() for tag, value in trainer.callback_metrics.items() if tag.startswith("attn_")}


def of_layer(tags: dict[str, float], layer: str) -> dict[str, float]:
    return {tag: value for tag, value in tags.items() if tag.endswith(f"/{layer}")}


# -- in a training -----------------------------------------------------------------------------------------------------


def test_a_layer_whose_logits_turned_nan_reads_nan_everywhere(tmp_path: Path) -> None:
    board, table = TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "csv")
    trainer, _ = fit(Breaking(), AttentionMonitor(), 5, logger=[board, table])
    found = last(trainer)
    broken, healthy = of_layer(found, SECOND), of_layer(found, FIRST)
    assert len(broken) == len(healthy) == 11
    assert all(map(math.isnan, broken.values())), broken
    assert not any(math.isnan(value) for tag, value in healthy.items() if "grad" not in tag)
    assert math.isnan(found["attn_grad_logits_norm/net.blocks.0"])  # the loss is nan, and so is what comes back of it
    assert math.isnan(found["attn_monitor/saturation_ratio_max"])
    assert (found["attn_monitor/saturated_heads"], found["attn_monitor/observed_layers"]) == (2, 2)

    events = read_events(board.log_dir)
    for tag in (*broken, "attn/entropy_normalized_min", "attn/saturation_ratio_max"):
        points = events.Scalars(tag)
        assert [point.step for point in points] == [0, 1, 2, 3, 4], tag
        assert [math.isnan(point.value) for point in points] == [False] * 3 + [True] * 2, tag
    stored = [torch.tensor(event.tensor_proto.float_val) for event in events.Tensors("attn_monitor/entropy_normalized")]
    assert len(stored) == 5

    with (Path(table.log_dir) / "metrics.csv").open() as file:
        column = [row[f"attn_entropy_normalized_min/{SECOND}"] for row in csv.DictReader(file)]
    assert [value for value in column if value][-2:] == ["nan", "nan"]


def test_the_pictures_after_nan_are_of_the_step_that_is_nan(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(Breaking(layer=0), AttentionMonitor(), 5, logger=logger)  # nothing in the whole model has an entropy any more
    images = read_events(logger.log_dir).Images("attn_heads/entropy_normalized")
    assert images[-1].step == 4


def test_one_head_with_nan_is_the_worst_and_leaves_the_mean_of_the_others() -> None:
    trainer, _ = fit(Breaking(layer=1, heads=(1,)), AttentionMonitor(), 5)
    found = last(trainer)
    assert math.isnan(found[f"attn_logit_row_std_max/{SECOND}"])
    assert math.isnan(found[f"attn_entropy_normalized_min/{SECOND}"])
    assert 0 < found[f"attn_entropy_normalized/{SECOND}"] < 1
    assert 0 < found[f"attn_entropy_normalized_min/{FIRST}"] < 1


def test_early_stopping_and_checkpoints_see_nan(tmp_path: Path) -> None:
    tag = f"attn_entropy_normalized_min/{SECOND}"
    stopping = EarlyStopping(tag, mode="max", patience=99, check_on_train_epoch_end=True)
    saving = ModelCheckpoint(tmp_path, monitor=tag, mode="max", every_n_train_steps=1, save_top_k=1, filename="{step}")
    callbacks = [stopping, saving]
    trainer, _ = fit(Breaking(), AttentionMonitor(), 5, callbacks=callbacks, max_epochs=4, enable_checkpointing=True)
    assert trainer.global_step == 5
    weights = torch.load(saving.best_model_path, weights_only=True)["state_dict"]
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_a_layer_that_does_not_run_keeps_what_is_known_of_it(tmp_path: Path) -> None:
    class Dropping(Lit):
        def __init__(self) -> None:
            super().__init__("hand", "hand")

        def loss(self, batch: Any) -> Tensor:
            blocks = self.net.blocks if self.global_step % 2 == 0 else self.net.blocks[:1]
            x = batch[0]
            for block in blocks:
                x = x + block(x)
            return (self.net.head(x) ** 2).mean()

    logger, monitor = TensorBoardLogger(tmp_path), AttentionMonitor()
    trainer, _ = fit(Dropping(), monitor, 4, logger=logger)
    found = last(trainer)
    _, record = monitor.history[2]
    entropy = record[SECOND].entropy_normalized
    assert entropy is not None
    assert found[f"attn_entropy_normalized_min/{SECOND}"] == pytest.approx(entropy.min().item())
    points = read_events(logger.log_dir).Scalars(f"attn_entropy_normalized_min/{SECOND}")
    assert [point.step for point in points] == [0, 2]
    assert found["attn_monitor/observed_layers"] == 1


def test_a_record_that_fails_and_a_layer_that_is_skipped_read_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def from_the_third_on(real: Any) -> Any:
        def fails(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) >= 3:
                raise ZeroDivisionError("broken on purpose")
            return real(*args, **kwargs)

        return fails

    for place in ("attn_monitor.probe.AttentionProbe.compute", "attn_monitor.looks.attention_rows"):
        with monkeypatch.context() as patched:
            calls.clear()
            patched.setattr(place, from_the_third_on(pkgutil.resolve_name(place)))
            trainer, _ = fit(Lit("sdpa"), AttentionMonitor(gradients=False), 4)
        assert len(calls) >= 3
        found = of_layer(last(trainer), FIRST)
        assert len(found) == 10
        assert all(map(math.isnan, found.values())), place


# -- what is published -------------------------------------------------------------------------------------------------


def publish(publisher: Publisher, trainer: Any, step: int, *layers: str, **more: Any) -> dict[str, float]:
    record = {layer: make_record(3, logit_row_std=[1.0, 2.0, 3.0], entropy=[0.1, 0.2, 0.3]) for layer in layers}
    publisher.publish(LightningLoop(trainer), step, record, 0, **more)
    return last(trainer)


def make_publisher(said: list[str] | None = None) -> Publisher:
    told = [] if said is None else said
    return Publisher(frozenset({"entropy", "logit_row_std"}), RULE, "", told.append)


def test_what_was_lost_is_nan_and_what_did_not_run_stays() -> None:
    publisher, trainer = make_publisher(), quiet()
    before = publish(publisher, trainer, 0, "a", "b", "c")
    after = publish(publisher, trainer, 1, "a", lost=["b", "never.seen"])
    assert of_layer(after, "a") == of_layer(before, "a")
    assert of_layer(after, "c") == of_layer(before, "c")
    assert set(of_layer(after, "b")) == {"attn_entropy/b", "attn_entropy_min/b"} | {
        "attn_logit_row_std/b",
        "attn_logit_row_std_max/b",
    }
    assert all(map(math.isnan, of_layer(after, "b").values()))
    assert after["attn_monitor/saturation_ratio_max"] == before["attn_monitor/saturation_ratio_max"] == 0.375
    again = publish(publisher, trainer, 2, "a", "b", "c")
    assert again == before


def test_of_a_record_that_was_lost_everything_is_nan_but_the_counts() -> None:
    publisher, trainer = make_publisher(), quiet()
    before = publish(publisher, trainer, 0, "a", "b")
    after = publish(publisher, trainer, 1, lost=None)
    counts = {"attn_monitor/saturated_heads", "attn_monitor/observed_layers"}
    assert set(after) == set(before)
    assert {tag for tag, value in after.items() if not math.isnan(value)} == counts


def test_a_record_in_which_nothing_ran_loses_nothing() -> None:
    publisher, trainer = make_publisher(), quiet()
    before = publish(publisher, trainer, 0, "a")
    assert publish(publisher, trainer, 1) == {**before, "attn_monitor/observed_layers": 0}


def test_an_error_of_ours_while_making_the_scalars_leaves_no_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    said: list[str] = []
    publisher, trainer = make_publisher(said), quiet()
    publish(publisher, trainer, 0, "a")
    monkeypatch.setattr("attn_monitor.publishing.scalars", fails)
    assert all(map(math.isnan, publish(publisher, trainer, 1, "a").values()))
    assert said == ["making the scalars failed: ZeroDivisionError: broken on purpose"]


def test_a_stage_and_a_second_monitor_are_completed_under_their_own_prefix() -> None:
    given = Given("monitor2_val_")
    tags = {"monitor2_val_attn_entropy/a": 1.0, "monitor2_val_attn_monitor/saturation_ratio_max": 0.5}
    assert given.completed(tags, ["a"]) == tags
    assert given.completed({}, [], []) == {}
    assert set(given.completed({}, ["a"])) == set(tags)
    assert set(given.completed({}, ["b"])) == {"monitor2_val_attn_monitor/saturation_ratio_max"}


def test_layers_of_unusual_names_are_completed() -> None:
    record = {"a/b": make_record(1, entropy=[0.5]), "saturation_ratio_max": make_record(1, entropy=[0.25])}
    given = Given()
    tags = scalars(record, ["entropy"], RULE, 0)
    given.completed(tags, record)
    counts = {tag: value for tag, value in tags.items() if tag.startswith("attn_monitor/")}
    found = given.completed(counts, [], ["a/b"])
    assert sum(map(math.isnan, found.values())) == 2  # mean and worst head of a/b
    assert set(found) - set(counts) == {tag for tag in tags if "a_b" in tag}


# -- what a record says ------------------------------------------------------------------------------------------------


def test_a_layer_with_nan_logits_has_its_tags_from_the_first_record_on() -> None:
    record = {"a": make_record(2, nonfinite=[3, 4]), "b": make_record(2, entropy=[0.5, 0.75])}
    tags = scalars(record, ["entropy"], RULE, 2)
    assert math.isnan(tags["attn_entropy/a"])
    assert math.isnan(tags["attn_entropy_min/a"])
    assert (tags["attn_entropy/b"], tags["attn_entropy_min/b"]) == (0.625, 0.5)


def test_a_head_with_some_inf_logits_and_a_number_has_that_number() -> None:
    record = {"a": make_record(2, nonfinite=[1, 0], logit_row_std=[4.0, 2.0], entropy=[0.5, 0.75])}
    tags = scalars(record, ["entropy"], RULE, 1)
    assert (tags["attn_entropy_min/a"], tags["attn_monitor/saturation_ratio_max"]) == (0.5, 0.5)
    assert overview(Rows().take(0, record, RULE), ["entropy_normalized"], 1)[f"{RATIO}_max"] == 0.5


def test_a_head_that_has_no_number_for_another_reason_is_left_out() -> None:
    record = {"a": make_record(2, nonfinite=[0, 5], logit_row_std=[NAN, 2.0], entropy=[NAN, 0.75])}
    assert scalars(record, ["entropy"], RULE, 1)["attn_entropy_min/a"] == 0.75


# -- loggers that fail -------------------------------------------------------------------------------------------------


class Failing(Logger):
    """Fails with another text every time, and with another error every third time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @property
    def name(self) -> str:
        return "failing"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Take them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(tag.startswith("attn_") for tag in metrics):
            self.calls += 1
            error = KeyError if self.calls % 3 == 0 else ConnectionError
            raise error(f"request {self.calls} timed out")


def test_a_logger_whose_error_has_another_text_each_time_is_told_once_for_each_kind(tmp_path: Path) -> None:
    one, two = Failing(), Failing()
    trainer, said = fit(Lit("hand"), AttentionMonitor(), 7, logger=[one, two, CSVLogger(tmp_path)])
    assert (trainer.global_step, one.calls, two.calls) == (7, 7, 7)
    assert [text.removeprefix("AttentionMonitor: ") for text in said] == [
        f"writing to {name} failed: {error}"
        for error in ("ConnectionError: request 1 timed out", "KeyError: 'request 3 timed out'")
        for name in ("Failing", "Failing 2")
    ]
    assert math.isfinite(last(trainer)[f"attn_logit_std/{FIRST}"])
