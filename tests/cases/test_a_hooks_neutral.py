"""A: what hooks must not hold, change or break."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionProbe
from attn_monitor import looks as looks_module
from tests.cases.hooked import Blocks
from tests.cases.support import SelfAttention, Trained, collect, fit, normal, serve, value
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE
LONG_SEQUENCE = """
import resource
import torch
from attn_monitor.functional import attention_statistics
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)
query, key = (torch.randn(1, 2, 8192, 64, generator=generator) for _ in range(2))
attention_statistics(query[:, :, :64], key[:, :, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stats = attention_statistics(query, key, statistics=["logit_std", "logit_max", "entropy"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
rows = torch.randperm(8192, generator=generator)[:256]
logits = (query[:, :, rows].double() @ key.double().mT / 8).transpose(0, 1).flatten(1, 2)
probs = logits.softmax(-1)
print(float((logits.flatten(1).std(1) / stats.logit_std - 1).abs().max()))
print(float((-(probs * probs.log()).sum(-1).mean(1) / stats.entropy - 1).abs().max()))
print(bool((stats.logit_max >= logits.amax((1, 2)) * (1 - 1e-6)).all()))
"""


def test_a07_a_long_sequence_needs_no_matrix_of_all_logits() -> None:
    run = subprocess.run([sys.executable, "-c", LONG_SEQUENCE], capture_output=True, text=True, check=True)
    grown, std, entropies, largest = run.stdout.split()
    assert int(grown) * 1024 < 128 << 20  # the matrix would be 512 MiB
    assert float(std) < 0.01  # 256 of 8192 rows are a sample
    assert float(entropies) < 0.01
    assert largest == "True"


def reachable(root: object) -> list[object]:
    """Return what an object holds, through containers and instances; not through code, classes and modules."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            seen[id(thing)] = thing
            waiting.extend(gc.get_referents(thing))
    return list(seen.values())


@pytest.mark.parametrize("every", [pytest.param(1000, marks=pytest.mark.slow), 1])
def test_a15_no_graph_stays_alive(every: int) -> None:
    counts: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (5, 49):
                gc.collect()
                counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    monitor = AttentionMonitor(every_n_steps=every, history_size=0, flight_recorder=0)
    model = Trained(nn.Sequential(SelfAttention(12, 2), SelfAttention(12, 3)))
    reference = weakref.ref(model)
    trainer, _ = fit(model, [monitor, Count()], serve(normal(50, 5, 12)))
    assert counts[1] <= counts[0]
    assert not any(isinstance(thing, Tensor) and thing.requires_grad for thing in reachable(monitor))
    del model, trainer
    gc.collect()
    assert reference() is None


def test_a16_residuals_in_place_work_and_have_their_gradients() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attn(x, x, x, need_weights=False)[0]
            y += x
            return F.relu_(y)

    alone = Block()
    watched = copy.deepcopy(alone)
    x = normal(2, 5, 12)
    trapped = copy.deepcopy(alone)
    trapped.attn.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        trapped(x).sum().backward()  # the trap

    alone(x).sum().backward()
    stats = collect(watched, lambda: watched(x).sum().backward())["attn"]
    assert value(stats, "grad_logits_norm").min() > 0
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a17_a_frozen_layer_has_statistics_and_no_gradient() -> None:
    model = Trained(Blocks())
    model.net.get_submodule("blocks.0").requires_grad_(False)
    monitor = AttentionMonitor()
    trainer, said = fit(model, monitor, serve(normal(3, 5, 12)))
    keys = trainer.callback_metrics
    assert "attn_logit_std/net.blocks.0" in keys
    assert "attn_grad_logits_norm/net.blocks.0" not in keys
    assert keys["attn_grad_logits_norm/net.blocks.1"] > 0
    assert monitor.history[0][1]["net.blocks.0"].grad_logits_norm is None
    assert said == []

    def without_gradients() -> None:
        with torch.no_grad():
            model.net(normal(1, 5, 12))

    found = collect(model.net, without_gradients)
    assert all(stats.grad_logits_norm is None for stats in found.values())
    assert all(value(stats, "logit_std").min() > 0 for stats in found.values())


def test_a19_a_watched_model_and_its_monitor_can_be_pickled(tmp_path: Path) -> None:
    model, x = Blocks(), normal(2, 5, 12)
    probe = AttentionProbe(model)
    probe.attach()
    out = model(x)
    copied = pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for twin in (copied, loaded, copy.deepcopy(model)):
        assert torch.equal(twin(x), out)
    probe.detach()
    assert probe.compute()["blocks.0"].calls == 1

    monitor = AttentionMonitor(modules="net.blocks.1")
    fit(Trained(model), monitor, serve(normal(2, 5, 12)))
    twin = pickle.loads(pickle.dumps(monitor))
    assert [list(record) for _, record in twin.history] == [["net.blocks.1"]] * 2
    fit(Trained(model), twin, serve(normal(2, 5, 12)))
    assert len(twin.history) == 4


def test_a23_an_error_or_a_value_of_ours_never_reaches_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    alone = Trained(Blocks())
    watched = copy.deepcopy(alone)
    data = normal(4, 5, 12)
    fit(alone, [], serve(data))

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("the statistic is broken")

    monkeypatch.setattr(looks_module, "attention_rows", broken)
    monkeypatch.setattr(looks_module, "softmax_rows", broken)
    trainer, (said,) = fit(watched, AttentionMonitor(), serve(data))
    assert trainer.global_step == 4
    assert said.startswith("seen, but not measured: net.blocks.0, net.blocks.1 (ZeroDivisionError: the statistic is")
    assert all(torch.equal(one, other) for one, other in zip(alone.parameters(), watched.parameters(), strict=True))

    monkeypatch.undo()
    monkeypatch.setattr(looks_module, "attention_rows", broken)
    monkeypatch.setattr(looks_module, "attention_gradient_rows", broken)
    net = copy.deepcopy(alone.net)
    x = data[:2]
    with AttentionProbe(net) as probe:
        out = net(x)
        out.square().sum().backward()
    alone.zero_grad()
    wanted = alone.net(x)
    wanted.square().sum().backward()
    assert torch.equal(out, wanted)
    for one, other in zip(alone.net.parameters(), net.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert set(probe.skipped) == {"blocks.0", "blocks.1"}
