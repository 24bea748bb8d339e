"""The callback for transformers' Trainer where the loss of a step is put together: ranks, micro-batches, a loss scale.

Whatever the parts, the record is that of one process that takes the whole batch at once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from attn_monitor.catalog import ALL
from attn_monitor.events import AttentionWarning
from attn_monitor.integrations.transformers import AttentionMonitorCallback
from tests.language_models import LAYERS, language_model
from tests.processes import run_ranks

BATCH, LENGTH, STEPS, RANKS = 3, 11, 2, 2


class Text(IterableDataset[dict[str, Tensor]]):
    """Random tokens; some rows have more to predict than others where the Trainer counts them."""

    def __init__(self, rows: int, *, uneven: bool) -> None:
        self.tokens = torch.randint(29, (rows, LENGTH), generator=torch.Generator().manual_seed(17))
        self.uneven = uneven

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, row in enumerate(self.tokens):
            unknown = 1 + 2 * (number % 5) if self.uneven else 1
            yield {"input_ids": row, "labels": torch.cat([torch.full((unknown,), -100), row[unknown:]])}


class Factors(TrainerCallback):
    """Notes what the loss is multiplied by in each step."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.scaler: torch.amp.GradScaler | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.scaler is not None:
            self.found.append(self.scaler.get_scale())


def train(
    folder: Path, batch: int, *, ranks: int = 1, accumulated: int = 1, counted: bool = True, scaled: bool = False
) -> dict[str, Any]:
    """Train and return the values of each step's record, and the weights at the end.

    Args:
        folder: Where the Trainer may write.
        batch: Rows that one process takes at once.
        ranks: How many processes there are.
        accumulated: Micro-batches of a step.
        counted: Whether the Trainer divides by the tokens of the whole step (`num_items_in_batch`), or takes the mean
            over micro-batches and ranks.
        scaled: Whether a `GradScaler` multiplies the loss, by more in each step.
    """
    model: Any = language_model()
    model.accepts_loss_kwargs = counted
    monitor, factors = AttentionMonitorCallback(statistics=sorted(ALL)), Factors()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        max_steps=STEPS,
        use_cpu=True,
        ddp_backend="gloo" if ranks > 1 else None,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        max_grad_norm=0.0,
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Text(STEPS * ranks * accumulated * batch, uneven=counted),
        callbacks=[monitor, factors],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    assert trainer.args.world_size == ranks
    if scaled:  # which the Trainer itself has on a GPU only
        factors.scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in caught if issubclass(one.category, AttentionWarning)]
    assert [text for text in said if "reports to nothing" not in text] == []
    assert [list(record) for _, record in monitor.history] == [LAYERS] * STEPS
    return {
        "values": [{layer: record[layer].measured() for layer in LAYERS} for _, record in monitor.history],
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "factors": factors.found,
        "events": [str(event) for event in monitor.events],
    }


def on_rank(rank: int, folder: str, accumulated: int, counted: bool, scaled: bool) -> Any:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost", MASTER_PORT="29519"
    )
    return train(Path(folder), BATCH, ranks=RANKS, accumulated=accumulated, counted=counted, scaled=scaled)


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare weights, events and every value of every record."""
    assert found["events"] == wanted["events"]
    for weight, other in zip(found["weights"], wanted["weights"], strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
    for record, expected in zip(found["values"], wanted["values"], strict=True):
        for layer in LAYERS:
            assert record[layer].keys() == expected[layer].keys()
            assert {"grad_logits_norm", "grad_probs_norm", "logit_std", "entropy"} <= record[layer].keys()
            ours, theirs = dict(record[layer]), dict(expected[layer])
            rounding = 1e-5 * float(theirs["logit_std"].max())
            torch.testing.assert_close(ours.pop("logit_mean"), theirs.pop("logit_mean"), rtol=1e-5, atol=rounding)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "means"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_ranks_have_the_record_of_one_process_with_the_whole_batch(
    tmp_path: Path, accumulated: int, counted: bool
) -> None:
    found = run_ranks(on_rank, RANKS, str(tmp_path / "ranks"), accumulated, counted, False)
    whole = train(tmp_path / "whole", RANKS * accumulated * BATCH, counted=counted)
    for record in found:
        assert_alike(record, whole)


@pytest.mark.slow
def test_ranks_with_a_loss_scale_have_the_record_of_one_process_without(tmp_path: Path) -> None:
    found = run_ranks(on_rank, RANKS, str(tmp_path / "ranks"), 2, True, True)
    whole = train(tmp_path / "whole", RANKS * 2 * BATCH)
    for record in found:
        assert record["factors"] == [4096.0, 8192.0]
        assert_alike(record, whole)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "means"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_scale_of_a_loss_is_divided_out(tmp_path: Path, accumulated: int, counted: bool) -> None:
    scaled = train(tmp_path / "scaled", BATCH, accumulated=accumulated, counted=counted, scaled=True)
    assert scaled["factors"] == [4096.0, 8192.0]  # the trap: the first step's is not that of the second
    assert_alike(scaled, train(tmp_path / "whole", accumulated * BATCH, counted=counted))
