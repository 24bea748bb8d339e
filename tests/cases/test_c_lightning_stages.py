"""C: packages, stages, fits and searches, checkpoints, compiled modules, interrupts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import ALL
from tests.cases.lit import Block, data
from tests.cases.support import Thermostat, Trained, close, fit, hooks, normal, serve, value
from tests.models import LIGHTNING_ADVICE, quiet
from tests.reference import assert_matches, attention_reference

pytestmark = LIGHTNING_ADVICE
LAYER = "net.attn"


def test_c03_the_monitor_is_a_callback_of_both_packages() -> None:
    assert isinstance(AttentionMonitor(), lightning.pytorch.Callback)
    assert isinstance(AttentionMonitor(), pl.Callback)


ONE_PACKAGE = """
import json, logging, sys, warnings
sys.modules[{blocked!r}] = None
import {package} as pl
import torch
from attn_monitor import AttentionMonitor

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.attn = torch.nn.MultiheadAttention(12, 2, batch_first=True)
    def training_step(self, x):
        return self.attn(x, x, x)[0].square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

warnings.simplefilter("ignore")
logging.getLogger({package!r}).setLevel(logging.ERROR)
x = torch.randn(6, 5, 12, generator=torch.Generator().manual_seed(7))
monitor = AttentionMonitor(every_n_steps=1)
trainer = pl.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[monitor],
)
trainer.fit(model := Model(), torch.utils.data.DataLoader(x, batch_size=2))
print(json.dumps(dict(
    callback=isinstance(monitor, pl.Callback),
    loaded=sorted(name for name in sys.modules if name.startswith({blocked!r} + ".")),
    steps=[step for step, _ in monitor.history],
    values=[record["attn"].logit_std.tolist() for _, record in monitor.history],
    logged=float(trainer.callback_metrics["attn_logit_std/attn"]),
)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocked", "package"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")]
)
def test_c03_one_package_is_enough(blocked: str, package: str) -> None:
    script = ONE_PACKAGE.format(blocked=blocked, package=package)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["callback"]
    assert found["loaded"] == []
    assert found["steps"] == [0, 1, 2]
    assert found["logged"] == pytest.approx(sum(found["values"][-1]) / 2)
    torch.manual_seed(3)
    weight = nn.MultiheadAttention(12, 2, batch_first=True).in_proj_weight.detach()  # the biases are 0 at first
    x = torch.randn(6, 5, 12, generator=torch.Generator().manual_seed(7))[:2]
    q, k, _ = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (x @ weight.T).chunk(3, -1))
    assert found["values"][0] == pytest.approx(attention_reference(q, k)["logit_std"].tolist(), rel=1e-5)
    assert found["values"][2] != pytest.approx(found["values"][0], rel=1e-3)  # it has trained


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
    assert [step for step, _ in again[0].history] == [0, 1, 2, 3, 4, 5]


RESTORING = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
"""Lightning's, of every callback with a state that it takes out of the trainer for a search."""


class Searched(Trained):
    """Saturated until `on_train_start` of a callback, which no search calls, makes it healthy."""

    net: Thermostat

    def __init__(self) -> None:
        super().__init__(Thermostat())
        self.net.std = 50.0
        self.batch_size = 1
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return serve(torch.zeros(20, 1), self.batch_size)

    def val_dataloader(self) -> Any:
        return serve(torch.zeros(1, 1))


class Healing(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.std = 1.0


def find_rate(trainer: Any, model: Searched) -> None:
    Tuner(trainer).lr_find(model, num_training=10, max_lr=1e3, update_attr=False)


def find_batch_size(trainer: Any, model: Searched) -> None:
    Tuner(trainer).scale_batch_size(model, steps_per_trial=2, init_val=1, max_trials=3)


SEARCHES: dict[str, Any] = {"rate": find_rate, "batch size": find_batch_size}
FINDERS: dict[str, Any] = {
    "rate": lambda: LearningRateFinder(num_training_steps=10, max_lr=1e3, update_attr=False),
    "batch size": lambda: BatchSizeFinder(steps_per_trial=2, init_val=1, max_trials=3),
}


def written_down(monitor: AttentionMonitor) -> str:
    """Return all that a monitor remembers as text, where nan is like nan."""
    return repr(tree_map_only(Tensor, Tensor.tolist, monitor.state_dict()))


@pytest.mark.slow
@RESTORING
@pytest.mark.parametrize("what", SEARCHES)
def test_c13_a_search_leaves_no_trace_in_what_the_monitor_knew(tmp_path: Path, what: str) -> None:
    monitor, model = AttentionMonitor(), Searched()
    fit(model, monitor, None, limit_train_batches=2)
    assert [(event.step, event.head) for event in monitor.events] == [(0, 0), (0, 1)]  # the trap: such steps alarm
    before, known, calls = written_down(monitor), list(monitor.history), model.calls
    trainer = quiet(callbacks=[monitor, Healing()], default_root_dir=tmp_path, limit_train_batches=2)
    SEARCHES[what](trainer, model)
    assert model.calls - calls >= 2
    assert written_down(monitor) == before
    assert [step for step, _ in monitor.history] == [step for step, _ in known]
    for (_, new), (_, old) in zip(monitor.history, known, strict=True):
        close(new["net"], old["net"], relative=0, absolute=0)
    assert hooks(model) == 0
    trainer.fit(model)
    assert len(monitor.events) == 2
    assert [step for step, _ in monitor.history][-2:] == [0, 1]


@pytest.mark.slow
@RESTORING
@pytest.mark.parametrize("what", FINDERS)
@pytest.mark.parametrize("first", [True, False])
def test_c13_a_search_by_a_callback_of_the_fit_leaves_no_trace(tmp_path: Path, what: str, first: bool) -> None:
    monitor, model = AttentionMonitor(), Searched()
    callbacks = [monitor, FINDERS[what](), Healing()] if first else [FINDERS[what](), Healing(), monitor]
    trainer = quiet(callbacks=callbacks, default_root_dir=tmp_path, limit_train_batches=2)
    trainer.fit(model)
    assert model.calls >= 4
    assert monitor.events == []
    assert [step for step, _ in monitor.history] == [0, 1]
    assert [float(value(record["net"], "logit_row_std").max()) for _, record in monitor.history] == pytest.approx(
        [float(model.net.pattern.var(-1, correction=0).mean(-1).max().sqrt())] * 2, rel=1e-5
    )
    assert hooks(model) == 0


def seeded() -> Block:
    torch.manual_seed(9)
    return Block()


class Late(Trained):
    """Builds and compiles its network in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.compile(seeded(), backend="eager")


class Silent(Trained):
    """Logs nothing of its own: a log inside of a compiled step is the user's to avoid."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("where", ["outside", "inside", "configure_model"])
def test_c15_compiled_modules_are_observed_under_their_plain_names(where: str) -> None:
    torch._dynamo.reset()
    model: Any
    if where == "outside":
        model = torch.compile(Silent(seeded()), backend="eager")
    elif where == "inside":
        compiled: Any = torch.compile(seeded(), backend="eager")
        model = Trained(compiled)
    else:
        model = Late()
    monitor, plain = (AttentionMonitor(statistics=sorted(ALL)) for _ in range(2))
    trainer, said = fit(model, monitor, data(3))
    assert said == []
    assert [(step, list(record)) for step, record in monitor.history] == [(step, [LAYER]) for step in range(3)]
    torch._dynamo.reset()

    fit(Trained(seeded()), plain, data(3))
    for (_, record), (_, wanted) in zip(monitor.history, plain.history, strict=True):
        close(record[LAYER], wanted[LAYER])
    first, last = (monitor.history[step][1][LAYER] for step in (0, -1))
    q, k, _ = seeded().attn.heads_of(normal(3, 5, 12)[:1])
    assert_matches(first, attention_reference(q, k))
    logged = float(trainer.callback_metrics[f"attn_logit_std/{LAYER}"])
    assert logged == pytest.approx(float(value(last, "logit_std").mean()), rel=1e-6)


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
