"""What a user would do instead of this package: by hand, with what transformers offers, with what Lightning offers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import grad_norm
from torch import Tensor, nn

from tests.benchmarks.model import GPT2, Core


def write(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Write scalars to the loggers at once, as the monitor does."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), trainer.global_step)


def per_head(values: Mapping[str, list[float]]) -> dict[str, float]:
    """Return one scalar for each head."""
    return {f"{tag}/{head}": value for tag, row in values.items() for head, value in enumerate(row)}


class NaiveHook(pl.Callback):
    """What one writes by hand: a forward hook that materialises the logits, masked right, three numbers per head."""

    def __init__(self) -> None:
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.measured: dict[str, list[float]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, module in pl_module.named_modules():
            if isinstance(module, Core):
                self.handles.append(module.register_forward_hook(self._hook(name)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        write(trainer, per_head(self.measured))

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            query, key = inputs[:2]
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            logits = query @ key.mT / query.shape[-1] ** 0.5
            allowed = logits[:, :, visible]
            probabilities = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            entropy = torch.special.entr(probabilities).sum(-1)
            self.measured[f"std/{name}"] = allowed.transpose(0, 1).flatten(1).std(1).tolist()
            self.measured[f"max/{name}"] = allowed.amax((0, 2)).tolist()
            self.measured[f"entropy/{name}"] = entropy.mean((0, 2)).tolist()

        return hook


class OutputAttentions(pl.Callback):
    """What transformers offers: its eager attention, which returns the probabilities; of them the entropy per head."""

    def __init__(self) -> None:
        self.measured: dict[str, list[float]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, GPT2), "a way to watch that model"
        pl_module.model.set_attn_implementation("eager")
        pl_module.reporting = True

    @torch.no_grad()
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, GPT2), "a way to watch that model"
        for layer, probabilities in enumerate(pl_module.attentions):
            entropy = torch.special.entr(probabilities).sum(-1)
            self.measured[f"entropy/{layer}"] = entropy.mean((0, 2)).tolist()
        pl_module.attentions = ()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, GPT2), "a way to watch that model"
        pl_module.model.set_attn_implementation("sdpa")
        pl_module.reporting = False
        write(trainer, per_head(self.measured))


class ActivationMonitor(pl.Callback):
    """A general monitor of activations: transformers' search for overflow, with hooks on every module."""

    def __init__(self) -> None:
        self._monitor: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._monitor = import_module("transformers.debug_utils").DebugUnderflowOverflow(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for module in pl_module.modules():  # it keeps no handles of its hooks
            hooks = module._forward_hooks
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self._monitor]:
                del hooks[key]
        self._monitor = None


class GradientNorms(pl.Callback):
    """What Lightning offers: the norm of the gradient of each parameter."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.measured = {name: float(norm) for name, norm in grad_norm(pl_module, norm_type=2).items()}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        write(trainer, self.measured)
