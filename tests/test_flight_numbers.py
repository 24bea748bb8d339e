"""What stands in the last steps of a run, against a plain computation, and where it says that it began."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import nn

from attn_monitor import AttentionMonitor
from attn_monitor.gradient_norms import GradientNorms, attention_parameters
from attn_monitor.nonfinite import Largest, Turn, where_it_began
from attn_monitor.saturation import SaturationRule
from tests.flights import Scheduled
from tests.models import LIGHTNING_ADVICE, Lit, fit, make_record

pytestmark = LIGHTNING_ADVICE
LAYERS = ("net.blocks.0", "net.blocks.1")


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


# -- where it began ----------------------------------------------------------------------------------------------------


def _records(*broken: list[int]) -> dict[str, Any]:
    return {f"layer{index}": make_record(len(counts), nonfinite=counts) for index, counts in enumerate(broken)}


@pytest.mark.parametrize(
    ("broken", "layer", "head", "words"),
    [
        ([[0, 0], [0, 0, 3], [9, 9]], "layer1", 2, "it begins in head 2 of layer1"),
        (
            [[0, 0], [4, 4]],
            "layer1",
            0,
            "head 0 of layer1, as in all 2 of its heads: look at the layer's input and its query/key weights",
        ),
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
