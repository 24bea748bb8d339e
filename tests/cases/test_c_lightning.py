"""C: pitfalls of Lightning callbacks."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.tuner.tuning import Tuner
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from attn_monitor.tags import EVENTS_FILE
from tests.cases.support import SelfAttention, Thermostat, Trained, close, fit, hooks, normal, serve, tb_tags, value
from tests.models import LIGHTNING_ADVICE, quiet, read_events

pytestmark = LIGHTNING_ADVICE
LAYER = "net.attn"


class Block(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.attn = SelfAttention(12, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def data(steps: int, seed: int = 5) -> Any:
    return serve(normal(steps, 5, 12, seed=seed))


def columns(logger: CSVLogger) -> list[dict[str, str]]:
    """Return the rows a CSV logger wrote."""
    logger.save()
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def steps_of(logger: CSVLogger, column: str) -> list[int]:
    return [int(row["step"]) for row in columns(logger) if row.get(column)]


def test_c01_every_entry_point_logs_where_lightning_allows_no_log(tmp_path: Path) -> None:
    monitor = AttentionMonitor(stages=("train", "validate", "test", "predict"))
    logger = CSVLogger(tmp_path)
    model = Trained(Block())
    trainer, said = fit(model, monitor, data(4), data(2), logger=logger)
    trainer.test(model, data(2), verbose=False)
    trainer.predict(model, data(2))
    quiet(callbacks=[AttentionMonitor()], logger=CSVLogger(tmp_path)).fit(Trained(Block()), data(2))
    assert said == []
    keys = [f"{prefix}attn_logit_std/{LAYER}" for prefix in ("", "val_", "test_", "predict_")]
    assert [len(steps_of(logger, key)) for key in keys] == [4, 1, 1, 1]
    assert len({tuple(row) for row in columns(logger)}) == 1


class Adversarial(Trained):
    """Steps two optimizers by hand in every batch."""

    def __init__(self) -> None:
        super().__init__(Block())
        self.automatic_optimization = False
        self.judge = nn.Linear(12, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override] # returns nothing on purpose
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = self.judge(self.net(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.judge)]


def test_c02_two_optimizers_by_hand_do_not_double_the_x(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor()
    trainer, _ = fit(Adversarial(), monitor, data(6), logger=logger, log_every_n_steps=2)
    assert trainer.global_step == 12  # the trap
    assert steps_of(logger, "train_loss") == [1, 3, 5]
    assert steps_of(logger, f"attn_logit_std/{LAYER}") == [0, 1, 3, 5]  # the first step is always observed
    assert [step for step, _ in monitor.history] == [0, 1, 3, 5]


def test_c03_the_monitor_is_a_callback_of_both_packages() -> None:
    assert isinstance(AttentionMonitor(), lightning.pytorch.Callback)
    assert isinstance(AttentionMonitor(), pl.Callback)


ONE_PACKAGE = """
import sys
sys.modules[{blocked!r}] = None
import {package} as pl
from attn_monitor import AttentionMonitor
print(isinstance(AttentionMonitor(), pl.Callback))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocked", "package"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")]
)
def test_c03_one_package_is_enough(blocked: str, package: str) -> None:
    script = ONE_PACKAGE.format(blocked=blocked, package=package)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]


class Branching(Trained):
    """Rank 1 runs the second attention in no batch; the first is saturated on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"first": SelfAttention(12, 2), "second": SelfAttention(12, 2)}), lr=0.0)

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        if self.global_rank == 0:
            return net["second"](net["first"](batch[0])).square().mean()
        return net["first"](batch[0] * 300).square().mean()


class Note(Callback):
    """Counts the collectives of the monitor's own hooks, and writes down what each process knows."""

    def __init__(self, folder: str, monitor: AttentionMonitor) -> None:
        self.folder, self.monitor = folder, monitor

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        known = {
            "layers": [list(record) for _, record in self.monitor.history],
            "events": [str(event) for event in self.monitor.events],
            "keys": [key for key in trainer.callback_metrics if key.startswith("attn_monitor/")],
        }
        Path(self.folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(known))


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier", "broadcast")


def counting(called: list[str], name: str) -> Any:
    """Return the collective, which notes each call of it."""
    real = getattr(torch.distributed, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return real(*args, **kwargs)

    return spy


class Counted(AttentionMonitor):
    """Writes down the collectives that happen inside the monitor."""

    folder: str

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        called: list[str] = []
        spies: dict[str, Any] = {name: counting(called, name) for name in COLLECTIVES}
        with patch.multiple(torch.distributed, **spies):
            super().on_train_batch_end(trainer, *args, **kwargs)
        with open(Path(self.folder, f"collectives{trainer.global_rank}.txt"), "a") as file:
            file.write(" ".join(["step", *called]) + "\n")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fit `Branching` in two spawned processes and return the folder with all that they left."""
    folder = tmp_path_factory.mktemp("spawned")
    monitor = Counted()
    monitor.folder = str(folder)
    strategy = DDPStrategy(start_method="spawn", process_group_backend="gloo", find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet(
            strategy=strategy,
            devices=2,
            callbacks=[monitor, Note(str(folder), monitor)],
            logger=CSVLogger(folder, name="csv", version=0),
        )
        trainer.fit(Branching(), data(6))
    assert list(monitor.history) == []  # the trap: what the workers saw stays with them
    return folder


@pytest.mark.slow
def test_c04_collectives_do_not_grow_with_metrics_or_layers(two_processes: Path) -> None:
    # A record is one gather and a decision, the first one also an exchange of names and a second gather.
    first, *later = (two_processes / "collectives0.txt").read_text().splitlines()
    assert first == "step all_gather all_gather_object all_gather all_reduce"
    assert later == ["step all_gather all_reduce"] * 2
    assert (two_processes / "collectives1.txt").read_text().splitlines() == [first, *later]


@pytest.mark.slow
def test_c05_ranks_that_see_different_layers_and_events_have_one_record(two_processes: Path) -> None:
    known = [json.loads((two_processes / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert known[0] == known[1]
    assert known[0]["layers"] == [["net.first", "net.second"]] * 3
    assert len([event for event in known[0]["events"] if "is saturated" in event]) == 2  # of rank 1 alone


@pytest.mark.slow
def test_c14_the_parent_of_spawned_workers_finds_the_events_in_the_run(two_processes: Path) -> None:
    lines = (two_processes / "csv" / "version_0" / EVENTS_FILE).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert {(event["layer"], event["head"]) for event in found} == {("net.first", 0), ("net.first", 1)}


NAMES = ("encoder.layers.0.self_attn", "net.dataloader_idx_0.attn", "a b", "x:y")


class Named(nn.Module):
    """Attentions in modules with the names that break loggers."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, SelfAttention(12, 2))

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = x + self.get_submodule(name)(x)
        return x


def test_c06_layer_names_of_any_kind_make_different_safe_tags(tmp_path: Path) -> None:
    table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(statistics=["logit_std"])
    trainer, said = fit(Trained(Named()), monitor, data(2), logger=[table, board])
    assert said == []
    assert list(monitor.history[0][1]) == [f"net.{name}" for name in NAMES]
    keys = [key for key in trainer.callback_metrics if key.startswith("attn_logit_std/")]
    assert len(keys) == 4
    assert all(key.count("/") == 1 and not set(key) & set(" :") for key in keys)
    assert keys[:2] == [f"attn_logit_std/net.{name}" for name in NAMES[:2]]
    assert set(keys) <= tb_tags(board.log_dir)
    assert set(keys) <= set(columns(table)[0])


@pytest.mark.parametrize("first", ["csv", "tensorboard"])
def test_c07_pictures_go_to_tensorboard_wherever_it_stands(tmp_path: Path, first: str) -> None:
    table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    loggers = [table, board] if first == "csv" else [board, table]
    _, said = fit(Trained(Block()), AttentionMonitor(), data(3), logger=loggers)
    assert said == []
    assert len(read_events(board.log_dir).Images("attn_heads/entropy_normalized")) == 3
    assert len(read_events(board.log_dir).Tensors("attn_monitor/entropy_normalized")) == 3
    assert steps_of(table, f"attn_logit_std/{LAYER}") == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "hints"),
    [
        ({"logger": False}, 1),
        ({"fast_dev_run": True, "logger": True}, 0),
        ({"fast_dev_run": True, "logger": "tensorboard"}, 0),
        ({"overfit_batches": 1, "logger": False}, 1),
        ({"limit_train_batches": 0, "logger": False}, 1),
    ],
)
def test_c08_without_a_logger_events_work_and_one_hint_is_enough(
    tmp_path: Path, settings: dict[str, Any], hints: int
) -> None:
    if settings.get("logger") == "tensorboard":
        settings = {**settings, "logger": TensorBoardLogger(tmp_path)}
    net = Thermostat()
    net.std = 50.0
    monitor = AttentionMonitor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AttentionWarning)
        trainer = quiet(callbacks=[monitor], **settings)
        trainer.fit(Trained(net), serve(torch.zeros(2, 1)), serve(torch.zeros(2, 1)))
    said = [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]
    assert sum("logger" in text for text in said) == hints
    ran = trainer.global_step > 0
    assert [event.head for event in monitor.events] == ([0, 1] if ran else [])
    assert bool(monitor.history) == ran


def test_c09_sanity_checks_and_validation_stay_out_of_training() -> None:
    alone, amid = AttentionMonitor(), AttentionMonitor()
    twins = [Trained(Block()) for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    stages: list[str] = []
    twins[1].net.register_forward_hook(lambda *_: stages.append(str(twins[1].trainer.state.stage)))
    fit(twins[0], alone, data(3))
    trainer, _ = fit(twins[1], amid, data(3), data(2, seed=8), num_sanity_val_steps=2, val_check_interval=1)
    assert {stage.rpartition(".")[2] for stage in stages} == {"SANITY_CHECKING", "TRAINING", "VALIDATING"}  # the trap
    assert [record[LAYER].calls for _, record in amid.history] == [1, 1, 1]
    for (_, one), (_, other) in zip(alone.history, amid.history, strict=True):
        close(one[LAYER], other[LAYER], relative=0, absolute=0)
    assert not any("attn" in key for key in trainer.callback_metrics if key.startswith("val_"))


def test_c09_validation_has_numbers_of_its_own() -> None:
    monitor = AttentionMonitor(stages=("train", "validate"))
    fit(Trained(Block(), lr=0.0), monitor, data(3), data(2, seed=8), num_sanity_val_steps=2, val_check_interval=1)
    assert [record[LAYER].calls for _, record in monitor.history] == [1, 1, 1]
    assert monitor.evaluations["validate"][LAYER].calls == 2


def test_c10_a_second_and_a_third_fit_count_nothing_twice() -> None:
    model, monitor = Trained(Block()), AttentionMonitor()
    before = hooks(model)
    for _ in range(3):
        monitor.history.clear()
        fit(model, monitor, data(3))
        assert hooks(model) == before
        assert [(step, record[LAYER].calls) for step, record in monitor.history] == [(0, 1), (1, 1), (2, 1)]


def test_c10_two_monitors_on_one_model_are_independent() -> None:
    twins = [Trained(Block()) for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    alone = AttentionMonitor()
    fit(twins[0], alone, data(4))
    all_steps, every_second = AttentionMonitor(), AttentionMonitor(every_n_steps=2)
    fit(twins[1], [all_steps, every_second], data(4))
    assert [step for step, _ in every_second.history] == [0, 1, 3]
    assert hooks(twins[1]) == 0
    wanted = dict(alone.history)
    for monitor in (all_steps, every_second):
        for step, record in monitor.history:
            close(record[LAYER], wanted[step][LAYER], relative=0, absolute=0)


class Thermostats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Thermostat(), Thermostat()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) + self.decoder(x)


def test_c11_the_memory_of_two_monitors_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    def monitors() -> list[AttentionMonitor]:
        return [AttentionMonitor(modules=f"net.{part}*") for part in ("enc", "dec")]

    def hot() -> Trained:
        net = Thermostats()
        net.encoder.std = 6.0  # saturated, and stays so
        return Trained(net, lr=0.0)

    first = monitors()
    trainer, said = fit(hot(), first, serve(torch.zeros(3, 1)))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert len([text for text in said if "2 AttentionMonitors" not in text]) == 1
    assert first[0].state_key != first[1].state_key

    again = monitors()
    assert [monitor.state_key for monitor in again] == [monitor.state_key for monitor in first]
    trainer, said = fit(hot(), again, serve(torch.zeros(3, 1)), max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert trainer.global_step == 6
    assert [(event.step, event.layer, event.head) for event in again[0].events] == [
        (0, "net.encoder", 0),
        (0, "net.encoder", 1),
    ]
    assert again[1].events == []
    assert all("2 AttentionMonitors" in text for text in said)  # the episode goes on, so nothing is news
    assert [step for step, _ in again[0].history] == [3, 4, 5]


KEY = "attn_monitor/saturation_ratio_max"


@pytest.mark.parametrize("order", list(permutations([0, 1])))
def test_c12_early_stopping_finds_the_keys_in_any_order(order: tuple[int, ...]) -> None:
    stopping = EarlyStopping(KEY, patience=0, check_on_train_epoch_end=True, strict=True)
    callbacks: list[Any] = [AttentionMonitor(), stopping]
    net = Thermostat()
    model = Trained(net, lr=0.0)
    trainer, _ = fit(model, [callbacks[i] for i in order], serve(torch.zeros(2, 1)), max_epochs=9, log_every_n_steps=50)
    assert trainer.callback_metrics[KEY] == pytest.approx(net_ratio(net), rel=1e-5)
    assert trainer.current_epoch == 2  # the ratio of the second epoch is no smaller


def net_ratio(net: Thermostat) -> float:
    return float(net.pattern.var(-1, correction=0).mean(-1).max().sqrt() / net.D**0.5)


def test_c13_the_steps_of_a_learning_rate_search_leave_no_trace(tmp_path: Path) -> None:
    monitor = AttentionMonitor()
    model = Trained(Block())
    trainer = quiet(callbacks=[monitor], default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, data(20), num_training=10, max_lr=1e3)
    assert (monitor.events, list(monitor.history)) == ([], [])
    assert hooks(model) == 0
    trainer.fit(model, data(2))
    assert [step for step, _ in monitor.history] == [0, 1]


@pytest.mark.slow
def test_c14_what_spawned_workers_saw_is_on_disk(two_processes: Path) -> None:
    with open(two_processes / "csv" / "version_0" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attn_logit_std/net.first"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert all(float(row["attn_logit_std/net.second"]) > 0 for row in rows)
    assert {float(row["attn_monitor/observed_layers"]) for row in rows} == {2.0}


class Late(Trained):
    """Builds and compiles its network in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.compile(Block(), backend="eager")


class Silent(Trained):
    """Logs nothing of its own: a log inside of a compiled step is the user's to avoid."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("where", ["outside", "inside", "configure_model"])
def test_c15_compiled_modules_are_observed_under_their_plain_names(where: str) -> None:
    torch._dynamo.reset()
    model: Any
    if where == "outside":
        model = torch.compile(Silent(Block()), backend="eager")
    elif where == "inside":
        compiled: Any = torch.compile(Block(), backend="eager")
        model = Trained(compiled)
    else:
        model = Late()
    monitor = AttentionMonitor()
    trainer, said = fit(model, monitor, data(3))
    assert said == []
    assert [(step, list(record)) for step, record in monitor.history] == [(step, [LAYER]) for step in range(3)]
    assert f"attn_logit_std/{LAYER}" in trainer.callback_metrics
    torch._dynamo.reset()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_c16_every_entry_point_attaches_and_detaches(stage: str) -> None:
    model = Trained(Block())
    during: list[int] = []
    model.net.register_forward_hook(lambda *_: during.append(hooks(model)))
    monitor = AttentionMonitor(stages=(stage,))
    before = hooks(model)
    getattr(quiet(callbacks=[monitor]), stage)(model, data(2))
    assert hooks(model) == before
    assert min(during) > before
    assert monitor.evaluations[stage][LAYER].calls == 2
    assert value(monitor.evaluations[stage][LAYER], "logit_std").min() > 0


@contextmanager
def keeping_sigint() -> Iterator[None]:
    """Put back the handler of Ctrl-C, which Lightning ignores after the first."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_c16_ctrl_c_leaves_nothing_behind(stage: str) -> None:
    model = Trained(Block())
    model.net.register_forward_hook(interrupt)
    before = hooks(model)
    trainer = quiet(callbacks=[AttentionMonitor(stages=("train", "validate", "test", "predict"))])
    with keeping_sigint(), pytest.raises(SystemExit):
        getattr(trainer, stage)(model, data(2))
    assert hooks(model) == before
    assert torch._C._len_torch_function_stack() == 0
    assert not {"training_step", "validation_step", "test_step", "predict_step"} & set(vars(model))
