"""What is left of a training that went wrong: when it is written, what stands in it, and that it disturbs nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from attn_monitor import flight_memory as memory_module
from attn_monitor import flight_recorder as recorder_module
from attn_monitor.events import SaturationEvent
from attn_monitor.flight_memory import KEPT, FlightMemory
from attn_monitor.flight_records import FlightRecord, Observation, from_json
from attn_monitor.gradient_norms import GradientNorms, attention_parameters
from attn_monitor.nonfinite import Largest, Turn, where_it_began
from attn_monitor.saturation import SaturationRule
from tests.models import DIM, LIGHTNING_ADVICE, Lit, fit, loader, make_record, quiet

pytestmark = LIGHTNING_ADVICE
LAYERS = ("net.blocks.0", "net.blocks.1")
_INF = float("inf")


def written(folder: str | Path) -> list[FlightRecord]:
    """Read the files of a folder, in the order of their steps; all of them must be strict JSON and none a leftover."""
    assert not list(Path(folder).glob("*.part"))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    paths = sorted(Path(folder).glob("attn_monitor_flight_*.json"), key=lambda path: int(path.stem.split("_")[-1]))
    texts = [path.read_text() for path in paths]
    for text in texts:
        json.loads(text, parse_constant=refuse)
    return [from_json(text) for text in texts]


class Planted(Lit):
    """Plants a value in the query weights of one head at a step, and passes over updates that are not finite."""

    def __init__(
        self, layer: int = 1, head: int = 1, step: int = 5, skipping: bool = True, value: float = _INF
    ) -> None:
        super().__init__("hand", "hand")  # the fused kernel of CPUs puts out numbers even for logits that are nan
        self.place, self.step, self.skipping, self.value = (layer, head), step, skipping, value

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_step == self.step:
            layer, head = self.place
            width = DIM // 2
            with torch.no_grad():
                self.net.blocks[layer].qkv.weight[head * width : (head + 1) * width] = self.value
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.skipping and not all(bool(p.grad.isfinite().all()) for p in self.parameters() if p.grad is not None):
            for parameter in self.parameters():
                parameter.grad = None


class Reference(Callback):
    """Computes what the recorder should find, in a plain way."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.layer: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(_norm(pl_module))
        self.layer.append(_norm(pl_module.net.blocks[0]))
        self.rates.append(optimizer.param_groups[0]["lr"])


def _norm(module: nn.Module) -> float:
    squares = [p.grad.double().pow(2).sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


class Scheduled(Lit):
    """Halves its learning rate every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# -- what is recorded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_rates_and_norms_are_those_of_a_plain_computation(accumulate: int) -> None:
    model, reference = Scheduled("hand", "mha"), Reference()
    monitor = AttentionMonitor(every_n_steps=2)
    fit(model, monitor, 7, callbacks=[reference], accumulate_grad_batches=accumulate, gradient_clip_val=0.01)
    kept = monitor.flight_recorder.memory.observations
    steps = -(-7 // accumulate)
    groups = [model.losses[start : start + accumulate] for start in range(0, 7, accumulate)]
    expected = [float(torch.stack(group).double().mean()) for group in groups]
    assert [one.step for one in kept] == [step for step in range(steps) if step == 0 or step % 2]
    assert [loss for _, loss in monitor.flight_recorder.memory.losses] == pytest.approx(expected, rel=1e-6)
    assert [step for step, _ in monitor.flight_recorder.memory.losses] == list(range(steps))
    for one in kept:
        assert one.loss == pytest.approx(expected[one.step], rel=1e-6)
        assert one.learning_rates == [[reference.rates[one.step]]]
        assert one.grad_norm == pytest.approx(reference.norms[one.step], rel=1e-5)
        assert one.layer_grad_norms["net.blocks.0"] == pytest.approx(reference.layer[one.step], rel=1e-5)
        assert set(one.layer_grad_norms) == set(LAYERS)
    assert reference.rates[:2] == [0.1, 0.05]


def test_the_numbers_of_heads_are_those_of_the_records() -> None:
    monitor = AttentionMonitor(every_n_steps=2)
    fit(Lit("hand", "sdpa", "mha"), monitor, 5)
    tables = monitor.flight_recorder.memory.tables()
    assert {"saturation_ratio", "logit_max", "entropy_normalized", "q_rms", "scale_ratio"} <= set(tables)
    assert len(monitor.history) == 3
    for name, table in tables.items():
        assert (table.dtype, tuple(table.shape)) == (torch.float32, (3, 6))
        for row, (_, record) in zip(table, monitor.history, strict=True):
            for layer, stats in enumerate(record.values()):
                values = SaturationRule().ratio(stats) if name == "saturation_ratio" else getattr(stats, name)
                if values is not None:
                    assert torch.equal(row[2 * layer : 2 * layer + 2], values.float())


class Manual(Lit):
    """Two optimizers of its own, no loss returned but on request."""

    def __init__(self, returns: bool) -> None:
        super().__init__("sdpa")
        self.automatic_optimization = False
        self.returns = returns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.losses.append(loss.detach().clone())
        return {"loss": loss, "more": 1} if self.returns else None

    def configure_optimizers(self) -> Any:
        attention = torch.optim.SGD(self.net.blocks.parameters(), lr=0.1)
        return attention, torch.optim.Adam([{"params": self.net.head.parameters(), "lr": 0.02}])


@pytest.mark.parametrize("returns", [True, False])
def test_manual_optimization_has_all_rates_and_one_norm(returns: bool) -> None:
    model, reference = Manual(returns), Reference()
    monitor = AttentionMonitor()
    fit(model, monitor, 3, callbacks=[reference])
    kept = monitor.flight_recorder.memory.observations
    assert [one.learning_rates for one in kept] == [[[0.1], [0.02]]] * 3
    assert [one.loss for one in kept] == ([float(loss) for loss in model.losses] if returns else [None] * 3)
    assert [one.grad_norm for one in kept] == pytest.approx(reference.norms[::2], rel=1e-5)


def test_accumulation_may_change_on_the_way() -> None:
    model, monitor = Lit("hand"), AttentionMonitor()
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    fit(model, monitor, 4, callbacks=[schedule], max_epochs=2)
    losses = [float(loss) for loss in model.losses]
    expected = [*losses[:4], (losses[4] + losses[5]) / 2, (losses[6] + losses[7]) / 2]
    assert [loss for _, loss in monitor.flight_recorder.memory.losses] == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_measured_is_none() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    dense, frozen, idle = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    frozen.requires_grad_(False)
    model = nn.ModuleDict({"table": table, "dense": dense, "frozen": frozen, "idle": idle})
    frozen(dense(table(torch.tensor([1, 1, 4])))).sum().backward()
    norms = GradientNorms()
    norms.take(torch.optim.SGD(model.parameters(), lr=1.0))
    total, layers = norms.read(model, ["table", "dense", "dense#1", "dense@2", "frozen", "idle", "named by the user"])
    expected = pytest.approx(_norm(dense), rel=1e-6)
    assert layers == {
        "table": None,
        "dense": expected,
        "dense#1": expected,
        "dense@2": expected,
        "frozen": None,
        "idle": None,
        "named by the user": None,
    }
    assert (total, norms.unmeasured) == (None, {"sparse"})
    norms.clear()
    assert norms.read(model, ["dense"]) == (None, {"dense": None})
    norms.take(torch.optim.SGD(dense.parameters(), lr=1.0), scaled=True)
    assert norms.read(model, ["dense"]) == (None, {"dense": None})
    assert norms.unmeasured == {"still scaled for float16"}


def test_norms_of_half_and_complex_gradients_do_not_overflow() -> None:
    half, double = nn.Parameter(torch.zeros(7, dtype=torch.float16)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    imaginary = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    half.grad = torch.full((7,), 60_000.0, dtype=torch.float16)
    double.grad = torch.full((3,), 1e30, dtype=torch.float64)
    imaginary.grad = torch.tensor([3 + 4j, 0])
    for parameter, expected in ((half, float(half.grad[0]) * 7**0.5), (double, 1e30 * 3**0.5), (imaginary, 5.0)):
        norms = GradientNorms()
        norms.take(torch.optim.SGD([parameter], lr=1.0))
        assert norms.read(nn.Module(), [])[0] == pytest.approx(expected, rel=1e-6)


def test_parameters_are_those_of_the_module_or_of_the_next_one_around_it() -> None:
    inner = nn.ModuleDict({"softmax": nn.Identity(), "query": nn.Linear(2, 3)})
    model = nn.ModuleDict({"block": nn.ModuleDict({"attention": inner, "mlp": nn.Linear(5, 7)})})
    found = attention_parameters(model, ["block.attention", "block.attention.softmax", "ModuleDict", "ModuleDict#1"])
    sizes = {layer: sum(p.numel() for p in parameters) for layer, parameters in found.items()}
    assert sizes == {
        "block.attention": 9,
        "block.attention.softmax": 9,
        "ModuleDict": 51,
        "ModuleDict#1": 51,
    }


# -- when it is written ------------------------------------------------------------------------------------------------


def test_a_critical_event_writes_it(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=2)
    fit(Lit("hand", "sdpa", gain=50.0), monitor, 4, logger=logger)
    critical = [event for event in monitor.events if event.severity == "critical"]
    assert critical
    first = written(logger.log_dir)[0]
    assert (first.step, first.reasons, first.exception, first.began) == (critical[0].step, ["critical event"], "", None)
    assert f"step {critical[0].latest}: {critical[0].finding}" in first.diagnosis
    assert f"  critical: {critical[0].critical_reason}" in first.diagnosis
    assert list(first.heads.items()) == [("net.blocks.0", 2), ("net.blocks.1", 2)]
    assert first.observations[-1].step == first.step
    assert monitor.flight_recorder.paths[0].parent == Path(logger.log_dir)


def test_a_healthy_run_writes_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Lit("hand"), AttentionMonitor(), 3, logger=logger)
    assert written(logger.log_dir) == []


def test_an_exception_writes_it_and_reaches_the_user(tmp_path: Path) -> None:
    class Failing(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx == 4:
                raise error
            return super().training_step(batch, batch_idx)

    error = ZeroDivisionError("mine <b>")
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=3)
    with pytest.raises(ZeroDivisionError) as raised:
        fit(Failing("hand"), monitor, 6, logger=logger)
    assert raised.value is error
    [record] = written(logger.log_dir)
    assert (record.step, record.reasons, record.exception) == (4, ["exception"], "ZeroDivisionError: mine <b>")
    assert [one.step for one in record.observations] == [0, 2]
    assert [step for step, _ in record.losses] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error::attn_monitor.events.AttentionWarning")
def test_an_exception_reaches_the_user_even_if_writing_fails_and_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx == 1:
                raise ZeroDivisionError("mine")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(recorder_module, "write_flight", _disk_full)
    with pytest.raises(ZeroDivisionError, match="mine"):
        quiet(callbacks=[AttentionMonitor()], logger=CSVLogger(tmp_path)).fit(Failing("hand"), loader(2))


def _disk_full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_before_the_first_step_writes_nothing(tmp_path: Path) -> None:
    class Early(Callback):
        def on_train_start(self, *_: Any) -> None:
            raise ZeroDivisionError

    logger = CSVLogger(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(Lit("hand"), AttentionMonitor(), 2, logger=logger, callbacks=[Early()])
    assert written(logger.log_dir) == []


def test_a_loss_that_turns_nan_on_an_unobserved_step_is_known_to_the_step_and_the_head(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    _, said = fit(Planted(layer=1, head=1, step=5, value=math.nan), monitor, 9, logger=logger)
    assert [step for step, _ in monitor.history] == [0, 3, 7]
    record = written(logger.log_dir)[0]
    assert record.step == 7
    assert {"critical event", "loss not finite", "logits not finite"} == set(record.reasons)
    began = record.began
    assert began is not None
    assert (began.step, began.loss, began.seen_at) == (5, "nan", 7)
    assert (began.basis, began.layer, began.head) == ("logits", "net.blocks.1", 1)
    assert began.text == (
        "the loss turned nan at step 5; in the order of the forward pass it begins in head 1 of net.blocks.1 "
        "(seen at step 7; updates since may have moved it)"
    )
    assert any(text.endswith(f"{began.text}; what led to it is in attn_monitor_flight_7.json") for text in said)
    assert [math.isfinite(loss) for _, loss in record.losses] == [True] * 5 + [False] * 3


def test_after_an_update_with_nan_a_guess_is_called_a_guess(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    fit(Planted(step=5, skipping=False, value=math.nan), monitor, 9, logger=logger)
    began = written(logger.log_dir)[0].began
    assert began is not None
    logits = {
        (name, head): float(value)
        for name, stats in monitor.history[1][1].items()
        for head, value in enumerate(stats.logit_max if stats.logit_max is not None else [])
    }
    largest = max(logits, key=lambda place: abs(logits[place]))
    assert (began.step, began.basis, (began.layer, began.head)) == (5, "largest", largest)
    assert began.text == (
        "the loss turned nan at step 5; by step 7 all 4 heads have nan or inf logits, so that the first one cannot be "
        f"told; the largest logit in the last finite record, {logits[largest]:.3g} at step 3, was that of head "
        f"{largest[1]} of {largest[0]}"
    )


def test_a_loss_that_turns_nan_after_the_last_observation_is_found_at_the_end(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    _, said = fit(Planted(step=5, skipping=False, value=math.nan), monitor, 7, logger=logger)
    [record] = written(logger.log_dir)
    assert (record.step, record.reasons) == (6, ["loss not finite"])
    assert record.began is not None
    assert (record.began.step, record.began.seen_at, record.began.basis) == (5, None, "largest")
    assert any("the loss turned nan at step 5; no later step was observed" in text for text in said)


class Overflowing(Lit):
    """A loss that is inf though all of the model is finite, for one step or from then on."""

    def __init__(self, *steps: int) -> None:
        super().__init__("sdpa", "hand")
        self.steps = steps

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + float("inf") if self.global_step in self.steps else loss


def test_a_loss_that_is_inf_by_itself_has_the_next_step_observed(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    fit(Overflowing(3), monitor, 12, logger=logger)
    assert [step for step, _ in monitor.history] == [0, 3, 4, 7, 11]
    [record] = written(logger.log_dir)
    assert record.began is not None
    assert (record.step, record.began.step, record.began.loss, record.began.basis) == (3, 3, "inf", "largest")
    assert "all logits of step 3 are finite: it began outside of them; the largest" in record.began.text
    assert monitor.flight_recorder.wants_next is False


def test_a_loss_that_turns_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor()
    _, said = fit(Overflowing(*range(1, 30, 2)), monitor, 30, logger=logger)
    assert [record.step for record in written(logger.log_dir)] == [1, 3, 5, 7, 9, 11, 13, 29]
    assert sum("the loss turned" in text for text in said) == 1


def test_a_critical_event_at_every_step_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = recorder_module.FlightRecorder.record
    event = SaturationEvent(
        step=0,
        layer="a",
        head=0,
        statistic="logit_row_std",
        value=1.0,
        head_dim=4,
        ratio=1.0,
        threshold=0.5,
        severity="critical",
    )

    def always(self: Any, trainer: Any, module: Any, record: Any, rule: Any, changed: Any, events: Any) -> None:
        original(self, trainer, module, record, rule, [event], [event] * 23)

    monkeypatch.setattr(recorder_module.FlightRecorder, "record", always)
    logger = CSVLogger(tmp_path)
    fit(Lit("hand"), AttentionMonitor(), 9, logger=logger)
    records = written(logger.log_dir)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert len(records[0].diagnosis) == 21
    assert records[0].diagnosis[-1] == "and 3 more, all in attn_monitor_events.jsonl"


def test_raising_at_a_critical_event_leaves_one_file_with_both_reasons(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.raises(RuntimeError, match="critically saturated"):
        fit(Lit("hand", gain=50.0), AttentionMonitor(on_saturation="raise"), 5, logger=logger)
    record = written(logger.log_dir)[-1]
    assert record.reasons == ["critical event", "exception"]
    assert record.exception.startswith("AttentionSaturationError: attention is critically saturated")


# -- where it is written -----------------------------------------------------------------------------------------------


def test_every_logger_with_a_folder_gets_it_and_without_any_the_root(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    fit(Planted(step=1), AttentionMonitor(), 3, logger=loggers)
    for logger in loggers:
        assert written(str(logger.log_dir))[0].step == 1
    fit(Planted(step=1), AttentionMonitor(), 3, logger=False, default_root_dir=tmp_path / "root")
    assert written(tmp_path / "root")[0].step == 1


def test_fast_dev_run_writes_nothing_and_names_no_file(tmp_path: Path) -> None:
    monitor = AttentionMonitor()
    _, said = fit(Planted(step=1), monitor, 3, fast_dev_run=3, default_root_dir=tmp_path)
    assert not list(tmp_path.rglob("*flight*"))
    assert monitor.flight_recorder.paths == []
    [text] = [text for text in said if "the loss turned nan at step 1" in text]
    assert text.endswith("it begins in head 1 of net.blocks.1")


class Remote(Logger):
    """Writes to an address, as the loggers of object stores do; nothing of it reaches a disk here."""

    log_dir = "s3://bucket/run"  # a property of Lightning's own loggers, which this one must not ask for a folder
    name, version = "remote", 0

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Take them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Take them."""


@pytest.mark.parametrize("ends", [False, True])
def test_of_logs_at_an_address_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = AttentionMonitor(every_n_steps=100 if ends else 1)
    _, said = fit(Planted(step=1), monitor, 3, logger=Remote(), default_root_dir=tmp_path)
    assert not list(tmp_path.rglob("*flight*"))
    [text] = [text for text in said if "the loss turned nan at step 1" in text]
    assert text.endswith(
        "; what led to it is in the next checkpoint alone, as no file of it is written to s3://bucket/run"
    )
    local = CSVLogger(tmp_path / "local")
    fit(Planted(step=1), AttentionMonitor(), 3, logger=[Remote(), local])
    assert written(str(local.log_dir))[0].step == 1


def test_a_file_that_could_not_be_written_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "write_flight", _disk_full)
    _, said = fit(Overflowing(1), AttentionMonitor(), 3, logger=CSVLogger(tmp_path))
    assert any("the loss turned inf at step 1" in text for text in said)
    assert not any("attn_monitor_flight_" in text for text in said)


def test_a_writing_error_with_another_text_each_time_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, text: str, name: str) -> Path:
        raise OSError(f"{folder / name} is gone")

    monkeypatch.setattr(recorder_module, "write_flight", fails)
    _, said = fit(Overflowing(1, 3, 5), AttentionMonitor(), 7, logger=CSVLogger(tmp_path))
    failed = [text for text in said if "writing the flight record failed" in text]
    assert len(failed) == 1
    assert "attn_monitor_flight_1.json is gone" in failed[0]


def test_a_prefix_gives_the_files_of_a_second_monitor_names_of_their_own(tmp_path: Path) -> None:
    monitor, start = AttentionMonitor(), recorder_module.FlightRecorder.start
    monitor.flight_recorder.start = lambda *_: start(monitor.flight_recorder, "monitor2_")  # type: ignore[method-assign] # as if it were the second
    logger = CSVLogger(tmp_path)
    _, said = fit(Planted(step=1), monitor, 3, logger=logger)
    assert sorted(path.name for path in Path(str(logger.log_dir)).glob("*flight*")) == [
        "monitor2_attn_monitor_flight_1.json"
    ]
    assert any(text.endswith("what led to it is in monitor2_attn_monitor_flight_1.json") for text in said)


def test_two_monitors_on_one_trainer_leave_a_file_each(tmp_path: Path) -> None:
    one, two = AttentionMonitor(modules="net.blocks.0"), AttentionMonitor(modules="net.blocks.1")
    logger = CSVLogger(tmp_path)
    fit(Planted(layer=0, step=1), one, 3, callbacks=[two], logger=logger)
    folder = Path(str(logger.log_dir))
    first = from_json((folder / "attn_monitor_flight_1.json").read_text())
    second = from_json((folder / "monitor2_attn_monitor_flight_1.json").read_text())
    assert (list(first.heads), list(second.heads)) == (["net.blocks.0"], ["net.blocks.1"])


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor()
    trainer = quiet(callbacks=[monitor], logger=logger)
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    trainer.fit(Planted(step=1), loader(3))
    assert not list(tmp_path.rglob("*flight*"))
    assert monitor.flight_recorder.began is not None


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "write_flight", _disk_full)
    trainer, said = fit(Overflowing(1, 3), AttentionMonitor(), 5, logger=CSVLogger(tmp_path))
    assert trainer.global_step == 5
    failed = [text for text in said if "flight record failed" in text]
    assert [text.removeprefix("AttentionMonitor: ") for text in failed] == [
        "writing the flight record failed: OSError: [Errno 28] No space left on device"
    ]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    class Remove(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                root.rename(tmp_path / "elsewhere")

    root = tmp_path / "root"
    root.mkdir()
    fit(Overflowing(1), AttentionMonitor(), 3, logger=False, default_root_dir=root, callbacks=[Remove()])
    assert [record.step for record in written(root)] == [1]


# -- that it disturbs nothing ------------------------------------------------------------------------------------------


def test_training_is_the_same_to_the_bit() -> None:
    results: list[tuple[list[Tensor], list[Any], Tensor]] = []
    for size in (None, 0, 64):
        torch.manual_seed(3)
        model = Scheduled("hand", "sdpa", "mha", dropout=0.1)
        callbacks = [] if size is None else [AttentionMonitor(flight_recorder=size, every_n_steps=2)]
        quiet(callbacks=callbacks).fit(model, loader(5))
        results.append((model.losses, list(model.parameters()), torch.get_rng_state()))
    for other in results[1:]:
        for index in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(results[0][index], other[index], strict=True))
        assert torch.equal(results[0][2], other[2])


def test_a_part_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    for place, name in ((GradientNorms, "take"), (FlightMemory, "add"), (recorder_module, "_numbers")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            trainer, said = fit(Lit("hand"), AttentionMonitor(), 3)
            assert trainer.global_step == 3
            assert 1 <= sum("broken on purpose" in text for text in said) <= 2


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)])
def test_a_wrong_size_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`flight_recorder` expects a whole number"):
        AttentionMonitor(flight_recorder=value)


def test_none_keeps_and_writes_nothing(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(flight_recorder=0)
    fit(Planted(step=1), monitor, 4, logger=logger)
    assert written(logger.log_dir) == []
    assert (monitor.flight_recorder.memory.observations, list(monitor.flight_recorder.memory.losses)) == ([], [])
    assert monitor.state_dict()["flight"] == {}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FlightMemory(7)
    record = {"a": make_record(heads=5, logit_max=[1.0, 2.0, 3.0, 4.0, 5.0])}
    for step in range(2000):
        memory.add_loss(step, 0.5)
        memory.add(Observation(step=step), record, SaturationRule())
    assert [one.step for one in memory.observations] == list(range(1993, 2000))
    assert len(memory.losses) == 1024
    assert sum(table.numel() for table in memory.tables().values()) <= 7 * 5 * len(KEPT)
    monkeypatch.setattr(memory_module, "MOST_BYTES", 3 * 5 * len(KEPT) * 4)
    memory.add(Observation(step=2000), record, SaturationRule())
    assert [one.step for one in memory.observations] == [1998, 1999, 2000]


def test_the_largest_model_named_in_the_documentation_takes_what_it_says() -> None:
    size = 64 * 80 * 64 * len(KEPT) * 4
    assert len(KEPT) * 4 == 56
    assert 18e6 < size < 19e6 < memory_module.MOST_BYTES


def test_losses_that_wait_are_bounded_and_the_step_is_then_at_or_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 3)
    monitor = AttentionMonitor(every_n_steps=8, adaptive_steps=0)
    fit(Planted(step=2, value=math.nan), monitor, 8)
    began = monitor.flight_recorder.began
    assert began is not None
    assert began.text.startswith("the loss turned nan at step 5 or before; in the order of the forward pass")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_it_and_a_resumed_run_continues(tmp_path: Path) -> None:
    whole = AttentionMonitor(every_n_steps=2)
    torch.manual_seed(1)
    fit(Lit("hand", "sdpa"), whole, 4, max_epochs=2)
    torch.manual_seed(1)
    first, second = AttentionMonitor(every_n_steps=2), AttentionMonitor(every_n_steps=2)
    trainer, _ = fit(Lit("hand", "sdpa"), first, 4)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)["callbacks"]
    [state] = [value["flight"] for value in stored.values() if "flight" in value]
    assert state["heads"] == {"net.blocks.0": 2, "net.blocks.1": 2}
    assert all(table.shape == (3, 4) for table in state["tables"].values())

    model = Lit("hand", "sdpa")
    resumed = quiet(callbacks=[second], max_epochs=2)
    resumed.fit(model, loader(4), ckpt_path=path)
    memory = second.flight_recorder.memory
    assert [one.step for one in memory.observations] == [0, 1, 3, 4, 5, 7]  # a fit starts with an observation
    assert list(memory.losses) == list(whole.flight_recorder.memory.losses)
    kept = [0, 1, 2, 4, 5]
    for name, table in whole.flight_recorder.memory.tables().items():
        assert torch.equal(table.nan_to_num(-1.0), memory.tables()[name][kept].nan_to_num(-1.0))


def test_a_step_that_is_repeated_replaces_what_was_and_what_came_later() -> None:
    memory = FlightMemory(9)
    for step in (0, 3, 6, 3):
        memory.add_loss(step, float(len(memory.losses)))
        memory.add(Observation(step=step), {"a": make_record(logit_max=[float(step), 1.0])}, SaturationRule())
    assert [one.step for one in memory.observations] == [0, 3]
    assert list(memory.losses) == [(0, 0.0), (3, 3.0)]
    assert memory.tables()["logit_max"].tolist() == [[0.0, 1.0], [3.0, 1.0]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(version=99),
        lambda state: state.pop("heads"),
        lambda state: state["heads"].update(new=3),
        lambda state: state["tables"].update(logit_max=torch.zeros(2)),
        lambda state: state["observations"].append({"nonsense": 1}),
        lambda state: state.update(observations=3),
        lambda state: state.update(tables=None),
    ],
)
def test_a_damaged_state_is_ignored_with_a_warning(damage: Any) -> None:
    source = AttentionMonitor()
    fit(Lit("hand"), source, 2)
    state = copy.deepcopy(source.state_dict())
    damage(state["flight"])
    target = AttentionMonitor()
    target.load_state_dict(state)
    _, said = fit(Lit("hand"), target, 2)
    assert sum("the flight record in the checkpoint is ignored: " in text for text in said) == 1
    assert [one.step for one in target.flight_recorder.memory.observations] == [0, 1]


def test_a_checkpoint_without_it_loads() -> None:
    source, target = AttentionMonitor(), AttentionMonitor()
    fit(Lit("hand"), source, 2)
    state = source.state_dict()
    del state["flight"]
    target.load_state_dict(state)
    _, said = fit(Lit("hand"), target, 2)
    assert not any("flight" in text or "ignored" in text for text in said)


def test_another_model_starts_afresh() -> None:
    monitor = AttentionMonitor()
    fit(Lit("hand", "sdpa"), monitor, 3)
    fit(Lit("mha"), monitor, 2)
    memory = monitor.flight_recorder.memory
    assert memory.heads == {"net.blocks.0": 2}
    assert [one.step for one in memory.observations] == [0, 1]


def test_a_layer_that_joins_later_has_no_numbers_before() -> None:
    memory = FlightMemory(5)
    memory.add(Observation(step=0), {"a": make_record(heads=2, logit_max=[1.0, 2.0])}, SaturationRule())
    both = {name: make_record(heads=heads, logit_max=[float(heads)] * heads) for name, heads in (("b", 3), ("a", 2))}
    memory.add(Observation(step=1), both, SaturationRule())
    table = memory.tables()["logit_max"]
    assert memory.heads == {"a": 2, "b": 3}
    assert table[0, :2].tolist() == [1.0, 2.0]
    assert table[0, 2:].isnan().all()
    assert table[1].tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_copies_hold_what_is_kept_and_nothing_of_the_fit() -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            recorder = monitor.flight_recorder
            copies.extend([copy.deepcopy(recorder), pickle.loads(pickle.dumps(monitor)).flight_recorder])
            waiting.append(len(recorder._waiting))

    waiting: list[int] = []
    monitor = AttentionMonitor(every_n_steps=3)
    fit(Lit("hand"), monitor, 3, callbacks=[Copy()])
    assert waiting == [0, 0, 1]
    assert [len(copied.memory.observations) for copied in copies] == [0, 0, 1, 1, 1, 1]
    assert not any(copied._waiting or copied._norms._norms for copied in copies)
    assert [one.step for one in monitor.flight_recorder.memory.observations] == [0, 2]
    assert (len(monitor.flight_recorder._waiting), monitor.flight_recorder._norms._norms) == (0, [])


# -- where it began ----------------------------------------------------------------------------------------------------


def _records(*broken: list[int]) -> dict[str, Any]:
    return {f"layer{index}": make_record(len(counts), nonfinite=counts) for index, counts in enumerate(broken)}


@pytest.mark.parametrize(
    ("broken", "layer", "head", "words"),
    [
        ([[0, 0], [0, 0, 3], [9, 9]], "layer1", 2, "it begins in head 2 of layer1"),
        ([[0, 0], [4, 4]], "layer1", 0, "head 0 of layer1, as in all 2 of its heads: what enters the layer is nan or"),
        ([[5]], "layer0", 0, "it begins in head 0 of layer0"),
        ([[5, 5], [5]], "before", 6, "all 3 heads have nan or inf logits, so that the first one cannot be told; the "),
        ([[0, 0], [0]], "before", 6, "all logits of step 11 are finite: it began outside of them, or it was gone by"),
    ],
)
def test_where_it_began(broken: list[list[int]], layer: str, head: int, words: str) -> None:
    began = where_it_began(Turn(7, math.nan, True), 11, _records(*broken), Largest(5, "before", 6, 123.456))
    assert (began.step, began.loss, began.layer, began.head) == (7, "nan", layer, head)
    assert words in began.text
    assert began.basis == ("largest" if layer == "before" else "logits")
    assert ("123 at step 5, was that of head 6 of before" in began.text) == (layer == "before")


def test_logits_that_broke_before_the_loss_are_where_it_began() -> None:
    earlier = where_it_began(None, 5, _records([0, 0], [0, 2]), None)
    assert (earlier.step, earlier.loss) == (5, "")
    began = where_it_began(Turn(6, math.inf, True), 8, _records([3, 3], [3, 3]), None, earlier=earlier)
    assert (began.step, began.loss, began.layer, began.head) == (6, "inf", "layer1", 1)
    assert began.text == (
        "the loss turned inf at step 6; before that, logits turned nan or inf by step 5; in the order of the forward "
        "pass it begins in head 1 of layer1"
    )


def test_without_any_finite_record_nothing_is_guessed() -> None:
    began = where_it_began(None, 4, _records([1, 1]), None)
    assert (began.basis, began.layer, began.head) == ("none", None, None)
    assert began.text.startswith("logits turned nan or inf by step 4; by step 4 all 2 heads")
