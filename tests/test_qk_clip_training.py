"""QK-Clip in a training: a run that runs away stays about tau, and any other is the same to the bit."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor
from attn_monitor.clip_records import Clipped
from attn_monitor.events import AttentionWarning
from attn_monitor.qk_clip import QKClip
from tests.clipping import BATCH, Block, Normalised, hidden
from tests.models import LIGHTNING_ADVICE, quiet

pytestmark = LIGHTNING_ADVICE


class Unscaled(pl.LightningModule):
    """One attention without its scale, trained so fast that its logits run away."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.block = kind()
        self.block.attend = partial(F.scaled_dot_product_attention, scale=1.0)  # type: ignore[method-assign] # no subclass
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        [x] = batch
        loss = F.mse_loss(self.block(x), x.roll(1, dims=1))  # each token is to find the one before
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Watching(AttentionMonitor):
    """The monitor with QK-Clip, which keeps what was done."""

    def __init__(self, clip: QKClip, **settings: Any) -> None:
        super().__init__(mitigation=clip, **settings)
        self.clipped: list[Clipped] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        assert self._clipper is not None
        apply = self._clipper.apply

        def kept(*args: Any, **kwargs: Any) -> Clipped:
            self.clipped.append(apply(*args, **kwargs))
            return self.clipped[-1]

        self._clipper.apply = kept  # type: ignore[method-assign] # of this one clipper

    @property
    def largest(self) -> list[float]:
        found = (statistics.logit_max for _, layers in self.history for statistics in layers.values())
        return [float(logits.max()) for logits in found if logits is not None]


STEPS = 40


def fit(callback: Any = None, kind: type[Block] = Block, accumulate: int = 1) -> Unscaled:
    model = Unscaled(kind)
    settings = {"accumulate_grad_batches": accumulate, "callbacks": [callback] if callback else []}
    quiet(**settings).fit(model, DataLoader(TensorDataset(hidden(21).repeat(STEPS, 1, 1)), batch_size=BATCH))
    return model


SATURATED = pytest.mark.filterwarnings("ignore::attn_monitor.events.AttentionWarning")


@pytest.mark.slow
@SATURATED
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_runs_away_stays_about_tau_with_clipping_and_does_not_without(accumulate: int) -> None:
    free, held = Watching(QKClip(tau=1e9)), Watching(QKClip(tau=30.0))
    fit(free, accumulate=accumulate)
    fit(held, accumulate=accumulate)
    assert max(free.largest) > 70
    first = next(number for number, clipped in enumerate(held.clipped) if clipped.heads)
    assert held.largest[: first + 1] == free.largest[: first + 1]
    assert max(held.largest[first + 1 :]) < 36
    assert sum(len(clipped.heads) for clipped in held.clipped) > 10
    assert not any(clipped.refused for clipped in held.clipped)
    assert not any(clipped.heads or clipped.waiting for clipped in free.clipped)


@SATURATED
@pytest.mark.parametrize(("kind", "tau"), [(Block, 1e9), (Normalised, 0.01)])
def test_where_nothing_is_rescaled_the_training_is_the_same_to_the_bit(kind: type[Block], tau: float) -> None:
    plain, clipping = fit(kind=kind), Watching(QKClip(tau=tau))
    watched = fit(clipping, kind=kind)
    assert torch.equal(torch.stack(plain.losses), torch.stack(watched.losses))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert any(clipped.refused for clipped in clipping.clipped) == (tau < 1)


@SATURATED
def test_the_monitor_logs_how_many_heads_it_rescaled_and_says_what_it_refused() -> None:
    seen: list[float] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics["attn_monitor/clipped_heads"]))

    clipping = Watching(QKClip(tau=30.0), every_n_steps=1)
    model = Unscaled()
    data = DataLoader(TensorDataset(hidden(21).repeat(STEPS, 1, 1)), batch_size=BATCH)
    quiet(callbacks=[clipping, Look()]).fit(model, data)
    assert seen == [len(clipped.heads) for clipped in clipping.clipped]
    assert sum(seen) > 0

    with pytest.warns(AttentionWarning, match=r"QK-Clip: .*block head \d \(largest logit [\d.]+ > 30, weights times 0"):
        fit(AttentionMonitor(mitigation=QKClip(tau=30.0)))
    with pytest.warns(AttentionWarning, match=r"QK-Clip leaves alone: block \(.*normalised"):
        fit(AttentionMonitor(mitigation=QKClip(tau=0.01)), kind=Normalised)


def test_the_monitor_looks_for_weights_in_the_very_next_step() -> None:
    """The clip comes one step after the look, not one interval."""
    monitor = AttentionMonitor(mitigation=QKClip(tau=0.5), every_n_steps=20, adaptive_steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        fit(monitor)
    assert [step for step, _ in monitor.history][:3] == [0, 1, 19]


def test_wrong_mitigations_fail_at_once() -> None:
    with pytest.raises(TypeError, match=r"`mitigation` expects a QKClip or None, got 100"):
        AttentionMonitor(mitigation=100)  # type: ignore[arg-type] # as a user would
    with pytest.raises(ValueError, match="`mitigation` needs the largest logit, which `max_queries` does not give"):
        AttentionMonitor(mitigation=QKClip(), max_queries=7)
