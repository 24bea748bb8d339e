"""Gradient norms in loops that accumulate and scale: they are those of the whole batch, as docs/loops.md says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]  # ships no marker for its hints
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]  # the same
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionProbe, AttentionStatistics
from examples import accelerate_loop, fabric_loop

MICRO_BATCHES, SIZE, LENGTH, HEADS, HEAD_DIM = 3, 5, 7, 2, 11
SCALE = 1024.0
"""A power of two, so that scaling rounds nothing."""
Records = list[Mapping[str, AttentionStatistics]]


def whole_batch_norms(attention: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms of the gradients at logits and probabilities, by autograd and without the package."""
    projected = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    logits = (query @ key.mT / HEAD_DIM**0.5).detach().requires_grad_()
    probs = logits.softmax(-1)
    out = attention.out_proj((probs @ value).transpose(1, 2).flatten(2))
    gradients = torch.autograd.grad((out - x.flip(1)).square().mean(), [logits, probs])
    of_logits, of_probs = (gradient.square().sum((0, 2, 3)).sqrt() for gradient in gradients)
    return of_logits, of_probs


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_accumulated_norms_are_those_of_the_whole_batch(divided: bool, scaled: bool) -> None:
    attention = nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True).double()
    x = torch.randn(MICRO_BATCHES * SIZE, LENGTH, HEADS * HEAD_DIM, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    with AttentionProbe(attention, grad_scale=scaler.get_scale) as probe:
        for part in x.chunk(MICRO_BATCHES):
            loss = (attention(part, part, part)[0] - part.flip(1)).square().mean()
            scaler.scale(loss / MICRO_BATCHES if divided else loss).backward()
    [found] = probe.compute(losses=1 if divided else MICRO_BATCHES).values()
    assert (found.calls, found.head_dim) == (MICRO_BATCHES, HEAD_DIM)
    of_logits, of_probs = whole_batch_norms(attention, x)
    torch.testing.assert_close(found.grad_logits_norm, of_logits, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.grad_probs_norm, of_probs, rtol=1e-12, atol=0)
    if not divided:  # the gradient that an optimizer then sees is that of the sum
        [of_sum] = probe.compute().values()
        torch.testing.assert_close(of_sum.grad_logits_norm, MICRO_BATCHES * of_logits, rtol=1e-12, atol=0)


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let an `Accelerator` be made whatever was made before it in this process, and leave none behind."""
    for key in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(key, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def model_and_data(size: int, dtype: torch.dtype) -> tuple[nn.Module, DataLoader[tuple[Tensor, ...]]]:
    """Return the same weights and numbers each time, in batches of `size`."""
    torch.manual_seed(3)
    model = nn.TransformerEncoderLayer(22, HEADS, 13, dropout=0.0, batch_first=True).to(dtype)
    x = torch.randn(fabric_loop.STEPS * MICRO_BATCHES * SIZE, LENGTH, 22).to(dtype)
    return model, DataLoader(TensorDataset(x), size)


def by_fabric(micro_batches: int, scaled: bool) -> Records:
    if scaled:  # by its name Fabric gives this precision on a GPU only
        fp16 = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=SCALE))
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[fp16])
    else:
        fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    model, data = model_and_data(MICRO_BATCHES * SIZE // micro_batches, torch.float32 if scaled else torch.float64)
    return fabric_loop.observed(fabric, model, data, micro_batches=micro_batches)


def by_accelerate(micro_batches: int, scaled: bool) -> Records:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    if scaled:  # accelerate makes one of its own on a GPU only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    model, data = model_and_data(MICRO_BATCHES * SIZE // micro_batches, torch.float64)
    return accelerate_loop.observed(accelerator, model, data)


LOOPS = {"accelerate": by_accelerate, "fabric": by_fabric}


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("loop", LOOPS)
def test_norms_of_the_example_are_those_of_the_whole_batch(
    loop: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for example in (accelerate_loop, fabric_loop):
        monkeypatch.setattr(example, "STEPS", 3)
        monkeypatch.setattr(example, "EVERY", 2)
    in_parts, printed = LOOPS[loop](MICRO_BATCHES, False), capsys.readouterr().out
    whole, scaled = LOOPS[loop](1, False), LOOPS[loop](MICRO_BATCHES, True)
    assert len(in_parts) == len(whole) == len(scaled) == 2
    for parts, one, factor_removed in zip(in_parts, whole, scaled, strict=True):
        norm = parts["self_attn"].grad_logits_norm
        assert f"grad_logits_norm {norm}\n" in printed
        torch.testing.assert_close(norm, one["self_attn"].grad_logits_norm, rtol=1e-9, atol=0)
        # Fabric's scaler comes with half precision, so the numbers are rough; the factor would be thousands.
        rough = 0.02 if loop == "fabric" else 1e-9
        torch.testing.assert_close(factor_removed["self_attn"].grad_logits_norm, norm, rtol=rough, atol=0)
