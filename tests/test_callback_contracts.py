"""Training with the monitor is training without it, and nothing of it stays behind."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet

pytestmark = LIGHTNING_ADVICE


def train(model: Lit, callbacks: list[Any], **settings: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Train 20 steps; return the losses, the weights and the state of the random numbers."""
    torch.manual_seed(3)
    quiet(callbacks=callbacks, **settings).fit(model, loader(20 * settings.get("accumulate_grad_batches", 1)))
    return model.losses, list(model.state_dict().values()), torch.get_rng_state()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({}, {"precision": "bf16-mixed"}),
        ({}, {"precision": "bf16-true"}),
        ({}, {"accumulate_grad_batches": 3}),
        ({"reentrant": True}, {}),
        ({"reentrant": False}, {}),
        ({"reentrant": False}, {"precision": "bf16-mixed", "accumulate_grad_batches": 3}),
    ],
    ids=["eager", "autocast", "bfloat16", "accumulation", "reentrant", "non-reentrant", "all"],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # reentrant, first block
def test_training_is_the_same_to_the_bit(options: dict[str, Any], settings: dict[str, Any]) -> None:
    model = Lit("hand", "sdpa", "mha", dropout=0.2, **options)
    twin = copy.deepcopy(model)
    alone = train(model, [], **settings)
    monitor = AttentionMonitor(every_n_steps=1)
    watched = train(twin, [monitor], **settings)
    assert len(monitor.history) == 20
    assert all(len(record) == 3 for _, record in monitor.history)
    for one, other in zip(alone[0] + alone[1], watched[0] + watched[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(alone[2], watched[2])


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_always_called",
)


def trace(model: nn.Module) -> dict[str, Any]:
    """Return everything the monitor might leave on a model or in torch."""
    return {
        "hooks": {(name, kind): len(getattr(m, kind)) for name, m in model.named_modules() for kind in HOOKS},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "modes": len(_get_current_function_mode_stack()),
        "stance": torch._dynamo.eval_frame._stance.stance,
    }


class FailsAt(Lit):
    """Raises in the second batch, once, at a place of one's choice."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        super().__init__("hand", "sdpa", "mha")
        self.place, self.error, self.batch = place, error, 0
        self.net.blocks[1].register_forward_hook(lambda *_: self.fail("forward"))

    def fail(self, place: str) -> None:
        if place == self.place and self.batch == 2:
            self.batch = 0
            raise self.error("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch += 1
        loss = self.loss(batch)
        loss.register_hook(lambda _: self.fail("backward"))
        self.fail("step")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("end")


def run_to_the_end(model: FailsAt, callbacks: list[Any]) -> dict[str, Any]:
    """Train, survive the planned error, and return the traces."""
    trainer = quiet(callbacks=callbacks, accumulate_grad_batches=2)
    if model.place == "nowhere":
        trainer.fit(model, loader(4))
    else:
        with pytest.raises(SystemExit if model.error is KeyboardInterrupt else model.error):
            trainer.fit(model, loader(4))
    return trace(model)


@pytest.mark.parametrize("place", ["nowhere", "forward", "backward", "step", "optimizer", "end"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_on_the_model(place: str, error: type[BaseException]) -> None:
    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores Ctrl-C after the first
    try:
        alone, watched = FailsAt(place, error), FailsAt(place, error)
        assert run_to_the_end(watched, [AttentionMonitor()]) == run_to_the_end(alone, [])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert watched.net(torch.randn(3, 5, 12)).shape == (3, 5, 1)


def test_nothing_of_the_run_is_kept_alive() -> None:
    seen: list[weakref.ref[Any]] = []

    class Spy(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(weakref.ref(batch[0]))

    def run(monitor: AttentionMonitor) -> None:
        model = Lit("hand", "sdpa", "mha")
        for block in model.net.blocks:
            block.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
        trainer = quiet(callbacks=[Spy(), monitor])
        trainer.fit(model, loader(3))
        seen.extend([weakref.ref(model), weakref.ref(trainer)])

    monitor = AttentionMonitor(stages=("train", "validate"))
    run(monitor)
    gc.collect()
    assert len(seen) == 3 * 4 + 2
    assert [reference() for reference in seen if reference() is not None] == []
    assert len(monitor.history) == 3


@pytest.mark.slow
def test_memory_does_not_grow_from_step_to_step() -> None:
    counts: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.losses.clear()
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    quiet(callbacks=[AttentionMonitor(history_size=0, flight_recorder=1), Count()]).fit(
        Lit("hand", "sdpa", "mha"), loader(5)
    )
    assert counts[-1] <= counts[1]


class CountSyncs(TorchDispatchMode):
    """Counts what makes a device wait for the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no hints for it
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Quietly(Lit):
    """Counts the syncs and looks at itself inside every training step."""

    def __init__(self) -> None:
        super().__init__("hand", "sdpa", "mha")
        self.syncs: list[int] = []
        self.traces: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with CountSyncs() as counter:
            loss = self.loss(batch)
            loss.backward(retain_graph=True)
        self.zero_grad()
        self.syncs.append(counter.count)
        self.traces.append(trace(self))
        return loss


@pytest.mark.usefixtures("visible_operations")
def test_a_step_that_is_not_observed_has_no_hook_and_no_sync() -> None:
    model = Quietly()
    before = trace(model)["hooks"]
    monitor = AttentionMonitor(every_n_steps=3)
    quiet(callbacks=[monitor]).fit(model, loader(5))
    assert [step for step, _ in monitor.history] == [0, 2]
    idle = [model.traces[step] for step in (1, 3, 4)]
    assert all(seen["hooks"] == before for seen in idle)
    assert all((seen["modes"], seen["stance"]) == (0, "default") for seen in idle)
    assert all("training_step" not in seen["attributes"][""] for seen in idle)
    assert sum(model.traces[0]["hooks"].values()) > sum(before.values())
    assert model.syncs == [0] * 5  # in the hooks of observed steps neither


def test_statistics_travel_once_per_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the backward pass and the record only the record itself may wait for the device."""
    counts: list[int] = []
    original = AttentionMonitor.on_train_batch_end

    def counted(self: AttentionMonitor, *args: Any) -> None:
        with CountSyncs() as counter:
            original(self, *args)
        counts.append(counter.count)

    monkeypatch.setattr(AttentionMonitor, "on_train_batch_end", counted)
    quiet(callbacks=[AttentionMonitor(every_n_steps=3)]).fit(Lit("hand", "sdpa", "mha"), loader(5))
    assert [count for step, count in enumerate(counts) if step not in (0, 2)] == [0, 0, 0]


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda monitor: pickle.loads(pickle.dumps(monitor))])
def test_a_monitor_can_be_copied_in_the_middle_of_a_fit(copying: Callable[[Any], Any]) -> None:
    copies: list[AttentionMonitor] = []

    class Copy(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            copies.append(copying(monitor))

    monitor = AttentionMonitor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AttentionWarning)
        quiet(callbacks=[monitor, Copy()]).fit(Lit("hand", gain=50.0), loader(2))
    assert sum("no logger" in str(warning.message) for warning in caught) == 1
    assert [len(copied.history) for copied in copies] == [0, 1]
    quiet(callbacks=[copies[1]]).fit(Lit("hand"), loader(2))
    assert len(copies[1].history) == 3
    assert len(monitor.history) == 2


def test_a_model_can_be_copied_in_the_middle_of_a_fit() -> None:
    copies: list[Any] = []

    class Average(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            copies.append(copy.deepcopy(pl_module.net))

    monitor = AttentionMonitor()
    quiet(callbacks=[monitor, Average()]).fit(Lit("hand", "sdpa", "mha"), loader(2))
    monitor.history.clear()
    copies[0](torch.randn(3, 5, 12)).sum().backward()
    assert len(_get_current_function_mode_stack()) == 0
    assert len(monitor.history) == 0


class Compiled(Lit):
    """Counts how often its network is compiled."""

    def __init__(self, **options: Any) -> None:
        super().__init__("hand", "sdpa")
        self.graphs = 0
        self.net = torch.compile(self.net, backend=self.compile_graph, **options)

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def _fresh_dynamo() -> Any:
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_network_is_observed_and_not_compiled_again(fullgraph: bool) -> None:
    alone, watched = Compiled(fullgraph=fullgraph), Compiled(fullgraph=fullgraph)
    watched.load_state_dict(alone.state_dict())
    quiet().fit(alone, loader(6))
    monitor = AttentionMonitor(every_n_steps=3)
    quiet(callbacks=[monitor]).fit(watched, loader(6))
    assert [(step, [*record]) for step, record in monitor.history] == [
        (step, ["net.blocks.0", "net.blocks.1"]) for step in (0, 2, 5)
    ]
    assert alone.graphs > 0
    assert watched.graphs == alone.graphs
    torch.testing.assert_close(watched.losses, alone.losses)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_lightning_module_is_observed() -> None:
    graphs: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Plain(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    def run(callbacks: list[Any]) -> int:
        torch._dynamo.reset()
        graphs.clear()
        quiet(callbacks=callbacks).fit(torch.compile(Plain("hand", "sdpa"), backend=compile_graph), loader(6))
        return len(graphs)

    alone = run([])
    monitor = AttentionMonitor(every_n_steps=3)
    watched = run([monitor])
    assert [(step, [*record]) for step, record in monitor.history] == [
        (step, ["net.blocks.0", "net.blocks.1"]) for step in (0, 2, 5)
    ]
    assert 0 < watched <= alone


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*the trainer has 2 AttentionMonitors")
def test_two_monitors_leave_nothing_behind() -> None:
    monitors = [AttentionMonitor(modules="net.blocks.0"), AttentionMonitor(modules="net.blocks.1")]
    alone, watched = Lit("hand", "sdpa"), Lit("hand", "sdpa")
    quiet().fit(alone, loader(2))
    expected = trace(alone)
    quiet(callbacks=monitors).fit(watched, loader(2))
    assert trace(watched) == expected
