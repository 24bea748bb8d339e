"""What the cases share: collecting from any model, attention as its reporters wrote it, and fits that record warnings.

Axes: B batch, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor, AttentionProbe, AttentionStatistics
from attn_monitor.events import AttentionWarning
from tests.models import quiet, read_events

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def collect(model: nn.Module, run: Callable[[], Any], **options: Any) -> Mapping[str, AttentionStatistics]:
    """Watch the model while `run` runs."""
    with AttentionProbe(model, **options) as probe:
        run()
    assert not probe.skipped
    return probe.compute()


def only(found: Mapping[str, AttentionStatistics]) -> AttentionStatistics:
    """Return the only record."""
    (stats,) = found.values()
    return stats


def value(stats: AttentionStatistics, name: str) -> Tensor:
    """Return a statistic, [H], which must have been measured."""
    tensor = getattr(stats, name)
    assert isinstance(tensor, Tensor), f"{name} was not measured"
    return tensor.double()


def close(
    one: AttentionStatistics, other: AttentionStatistics, *, relative: float = 1e-5, absolute: float = 1e-6
) -> None:
    """Compare everything two records hold."""
    assert one.measured().keys() == other.measured().keys()
    for name, tensor in one.measured().items():
        expected = other.measured()[name]
        equal = torch.isclose(tensor.double(), expected.double(), rtol=relative, atol=absolute, equal_nan=True)
        assert bool(equal.all()), f"{name}: {tensor.tolist()} and {expected.tolist()}"


def hooks(model: nn.Module) -> int:
    """Count every hook on every module."""
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in HOOKS)


class Core(nn.Module):
    """Attention written by hand, of given query and key; subclasses spoil one of its steps."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def probs(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.probs(self.logits(q, k)) @ v


class SelfAttention(nn.Module):
    """Projects, attends by hand, projects; of any width and number of heads."""

    def __init__(self, dim: int, heads: int, core: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.core = core
        self.out = nn.Linear(dim, dim)

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def heads_of(self, x: Tensor) -> list[Tensor]:
        """Return query, key and value [B, H, T, D], detached."""
        return [part.detach() for part in self.split(x)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        out = F.scaled_dot_product_attention(q, k, v) if self.core is None else self.core(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


class Thermostat(nn.Module):
    """Attention whose logits have, in every head, the mean and the population std it is told."""

    H, Q, K, D = 2, 5, 6, 7
    pattern: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        logits = torch.randn(self.H, self.Q, self.K, generator=generator)
        self.register_buffer(
            "pattern", (logits - logits.mean((1, 2), True)) / logits.std((1, 2), correction=0, keepdim=True)
        )
        self.weight = nn.Parameter(torch.ones(self.D))
        self.std, self.mean = 1.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        query = F.pad(self.pattern * self.std + self.mean, (0, self.D - self.K))[
            None
        ]  # D >= K: the keys are unit vectors
        key = torch.eye(self.K, self.D).expand(1, self.H, -1, -1)
        attended = F.scaled_dot_product_attention(query.to(x.dtype), key.to(x.dtype), key.to(x.dtype), scale=1.0)
        return x.sum() * 0 + attended * self.weight.to(x.dtype)


class Trained(pl.LightningModule):
    """Trains any network to put out zeros; `script` is called with the step before each batch."""

    def __init__(self, net: nn.Module, script: Callable[[int], None] | None = None, lr: float = 0.1) -> None:
        super().__init__()
        self.net = net
        self.script = script
        self.lr = lr

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.script is not None:
            self.script(self.global_step)
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def serve(data: Tensor, batch_size: int = 1) -> DataLoader[Any]:
    """Return a loader over the first axis of the data, in its order."""
    return DataLoader(TensorDataset(data), batch_size=batch_size)


def fit(model: Any, monitors: Any, data: Any, validation: Any = None, **settings: Any) -> tuple[Any, list[str]]:
    """Train; return the trainer and the monitor's warnings, those about a missing logger left out."""
    callbacks = monitors if isinstance(monitors, list) else [monitors]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AttentionWarning)
        checkpoint = settings.pop("ckpt_path", None)
        trainer = quiet(callbacks=callbacks, **settings)
        trainer.fit(model, data, validation, ckpt_path=checkpoint)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]
    return trainer, [text for text in said if "no logger" not in text and "scale audit" not in text]


def curve(monitor: AttentionMonitor, layer: str, name: str) -> list[float]:
    """Return the largest head of a statistic, record by record."""
    return [float(value(record[layer], name).max()) for _, record in monitor.history]


def tb_tags(folder: str | Path) -> set[str]:
    """Return the tags of every kind in a TensorBoard run."""
    return {tag for tags in read_events(folder).Tags().values() if isinstance(tags, list) for tag in tags}


def entropy(probs: Tensor) -> Tensor:
    """Return -sum p ln p over the last axis."""
    return -torch.special.xlogy(probs, probs).sum(-1)


def normal(*shape: int, seed: int = 5) -> Tensor:
    """Return the same random numbers every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
