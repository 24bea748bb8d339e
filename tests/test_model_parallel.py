"""Lightning's ModelParallelStrategy: tensor parallelism, sharded data parallelism, and both, on real gloo processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor, AttentionProbe
from tests.models import LIGHTNING_ADVICE, quiet
from tests.parallel_models import Transformer, sample, spread
from tests.processes import run_ranks

pytestmark = [pytest.mark.slow, *LIGHTNING_ADVICE]

LAYERS = ["net.blocks.0.attn", "net.blocks.1.attn"]


class Parallel(pl.LightningModule):
    """Spreads its heads and its weights as the strategy's mesh says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Transformer(4, 2)

    def configure_model(self) -> None:
        """Cut the model; a no-op without a mesh."""
        mesh = self.device_mesh
        if mesh is None:
            return
        if mesh["tensor_parallel"].size() > 1:
            spread(self.net, mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1:
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, the same on every rank."""
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Take small steps."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def _fit(rank: int, data: int, tensor: int) -> list[Any]:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(data * tensor))
    monitor = AttentionMonitor(every_n_steps=1)
    strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo")
    # Both halves of the data parallel group get the same batches, so that one process is the reference.
    trainer = quiet(strategy=strategy, devices=data * tensor, callbacks=[monitor], use_distributed_sampler=False)
    trainer.fit(Parallel(), DataLoader(TensorDataset(torch.cat([sample()] * 3)), batch_size=4))
    return [
        (step, {name: {k: v.tolist() for k, v in record.measured().items()} for name, record in layers.items()})
        for step, layers in monitor.history
    ]


def by_one_process() -> list[Any]:
    """Return the same of a plain loop."""
    model = Parallel()
    optimizer = model.configure_optimizers()
    probe = AttentionProbe(model, statistics=sorted(AttentionMonitor()._recorded))
    found = []
    for step in range(3):
        with probe:
            model.training_step([sample()], step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((step, {name: record.measured() for name, record in probe.compute().items()}))
        probe.reset()
    return found


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_every_head_is_measured_at_its_place(data: int, tensor: int) -> None:
    expected = by_one_process()
    for found in run_ranks(_fit, data * tensor, data, tensor):
        assert [step for step, _ in found] == [0, 1, 2]
        for (step, layers), (_, wanted) in zip(found, expected, strict=True):
            assert list(layers) == LAYERS
            for layer, values in wanted.items():
                assert set(layers[layer]) == set(values)
                for name, value in values.items():
                    # Counts add up over batches, and the norm of a mean of losses adds squares.
                    factor = data if name in {"rows", "masked_rows", "nonfinite"} else 1.0
                    factor = data**-0.5 if name in {"grad_logits_norm", "grad_probs_norm"} else factor
                    wanted_value = (value * factor).tolist()
                    assert layers[layer][name] == pytest.approx(wanted_value, rel=2e-6), (step, layer, name)
