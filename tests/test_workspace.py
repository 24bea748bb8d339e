"""Memory of our own: used again, given back, flat in the number of tokens, and never what ends a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, tiles
from attn_monitor.catalog import GRADIENTS, STATISTICS
from attn_monitor.functional import attention_statistics
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.softmax_gradients import qualifying_entries, softmax_gradient_sums
from attn_monitor.statistics import attention_sums
from attn_monitor.workspace import Workspace, Workspaces
from tests.reference import assert_matches, assert_same, attention_reference

ALL = frozenset(STATISTICS)
B, H, Q, K, D, V = 2, 3, 41, 43, 7, 5


class Attention(nn.Module):
    """SDPA, or the same by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value)
        probs = (query @ key.mT / D**0.5).softmax(-1)
        out: Tensor = probs @ value
        return out


def make_inputs() -> list[Tensor]:
    return [torch.randn(B, H, n, d, requires_grad=True) for n, d in ((Q, D), (K, D), (K, V))]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 4096)


def fail_beyond(limit: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let tiles of more entries than a limit find no memory, and return the sizes that did."""
    take, sizes = Workspace.take, []

    def scarce(self: Workspace, number: int, shape: Sequence[int]) -> Tensor:
        size = torch.Size(shape).numel()
        if size > limit:
            raise error
        sizes.append(size)
        return take(self, number, shape)

    monkeypatch.setattr(Workspace, "take", scarce)
    return sizes


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:125] . DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "softmax"])
def test_a_tile_that_does_not_fit_is_halved(
    error: Exception, fused: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs()
    attention = Attention(fused)

    def measure() -> Any:
        with AttentionProbe(attention) as probe:
            attention(*inputs).square().sum().backward()
        assert dict(probe.skipped) == {}
        return probe.compute()["Attention"]

    wanted = measure()
    sizes = fail_beyond(1000, error, monkeypatch)
    found = measure()
    assert 500 <= max(sizes) <= 1000
    assert_same(found, wanted, relative=1e-6)
    assert_matches(found, attention_reference(inputs[0].detach(), inputs[1].detach()), names=sorted(ALL - GRADIENTS))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "softmax"])
def test_without_any_memory_the_layer_is_skipped_and_the_model_goes_on(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, attention = make_inputs(), Attention(fused)
    alone = torch.autograd.grad(attention(*inputs).sum(), inputs)
    fail_beyond(0, ERRORS[0], monkeypatch)
    with AttentionProbe(attention) as probe:
        watched = torch.autograd.grad(attention(*inputs).sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(alone, watched, strict=True))
    assert dict(probe.compute()) == {}
    assert "OutOfMemoryError: CUDA out of memory" in probe.skipped["Attention"]


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def compute(shrink: int) -> int:
        tries.append(shrink)
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        Workspaces().fitting(compute)
    assert tries == [1]


def test_memory_is_used_again_and_not_shared_between_threads() -> None:
    spaces = Workspaces()
    work = spaces.at(torch.device("cpu"), torch.float32)
    first = work.take(1, (3, 5))
    assert work.take(1, (5, 3)).data_ptr() == work.take(1, (2,)).data_ptr() == first.data_ptr()
    assert work.take(2, (3, 5)).data_ptr() != first.data_ptr()
    assert spaces.at(torch.device("cpu"), torch.float64) is not work
    others: list[Workspace] = []
    thread = threading.Thread(target=lambda: others.append(spaces.at(torch.device("cpu"), torch.float32)))
    thread.start()
    thread.join()
    assert others[0] is not work
    spaces.clear()
    assert spaces.at(torch.device("cpu"), torch.float32) is not work


def test_memory_taken_in_inference_mode_can_be_written_to_afterwards() -> None:
    query, key, value = (tensor.detach() for tensor in make_inputs())
    call, spaces = AttentionCall(query=query, key=key, value=value), Workspaces()
    with torch.inference_mode():
        inside = attention_sums(call, ALL, spaces=spaces).finalize(ALL)
    outside = attention_sums(call, ALL, spaces=spaces).finalize(ALL)
    assert_same(outside, inside, relative=0.0)


def test_a_bit_an_entry_is_kept_for_the_gradients_of_a_softmax() -> None:
    entries = qualifying_entries(AttentionCall(query=torch.zeros(1, 2, 64, 4), key=torch.zeros(1, 2, 128, 4)))
    assert entries.bits.nbytes == 2 * 64 * 128 / 8
    sums = softmax_gradient_sums(entries, grad_probs=torch.ones(1, 2, 64, 128))
    assert sums.finalize(ALL).rows is not None


PEAK = """
import resource, torch
from attn_monitor.catalog import STATISTICS
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.statistics import attention_sums
torch.set_num_threads(1)
query, key, value, grad = torch.randn(4, 1, 2, {tokens}, 16).unbind(0)
call = AttentionCall(query=query, key=key, value=value, is_causal=True)
small = AttentionCall(query=query[:, :, :256], key=key[:, :, :256], value=value[:, :, :256], is_causal=True)
attention_sums(small, frozenset(STATISTICS), grad_output=grad[:, :, :256])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention_sums(call, frozenset(STATISTICS), 512, grad_output=grad)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_peak_memory_does_not_grow_with_the_square_of_the_length() -> None:
    # All logits of one head would be 1024 MiB. Rows are sampled, for all of them would take half a minute.
    code = PEAK.format(tokens=16384)
    extra = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert extra < 48


def test_statistics_of_many_tokens_are_exact_across_tiles() -> None:
    query, key = torch.randn(1, 1, 300, D), torch.randn(1, 1, 300, D)
    assert_matches(attention_statistics(query, key, is_causal=True), attention_reference(query, key, is_causal=True))


def largest(cut: tiles.Blocks, keys: int) -> int:
    items, heads, rows = (part[0].stop - part[0].start for part in cut)
    return int(items * heads * rows * keys)


@pytest.mark.parametrize(("heads", "groups", "keys"), [(64, 1, 256), (71, 1, 8192), (32, 8, 4096), (32, 1, 32768)])
def test_many_query_heads_on_one_key_head_make_no_larger_tiles(heads: int, groups: int, keys: int) -> None:
    shape = CallShape(2, heads, 256, keys)
    sizes = [largest(tiles.blocks(shape, groups, shrink=shrink), keys) for shrink in (1, 2, 4, 8, 16, 32, 64)]
    assert sizes[0] <= tiles.TILE_ELEMENTS
    assert all(small <= big for big, small in pairwise(sizes))
    assert sizes[-1] <= max(sizes[0] / 16, keys)
    for shrink in (1, 8):
        step = tiles.blocks(shape, groups, shrink=shrink).heads[0].stop
        assert step % (heads // groups) == 0 or (heads // groups) % step == 0


def test_heads_of_one_group_in_several_tiles_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(B, 12, Q, D), torch.randn(B, 2, K, D), torch.randn(B, 2, K, V)
    call, grad = AttentionCall(query=query, key=key, value=value, scale=D**-0.5), torch.randn(B, 12, Q, V)
    wanted = attention_sums(call, ALL, grad_output=grad).finalize(ALL)
    for elements in (300, 2000, 5000):
        monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
        assert_same(attention_sums(call, ALL, grad_output=grad).finalize(ALL), wanted, relative=1e-6)


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has one setting for all backends"
)
def test_threads_bring_the_precision_of_products_back_together() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with tiles.undisturbed(torch.zeros(1)):
            entered.set()
            leave.wait()

    torch.set_float32_matmul_precision("medium")
    try:
        before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined] # torch has no hints for it
        thread = threading.Thread(target=first)
        thread.start()
        entered.wait()
        with tiles.undisturbed(torch.zeros(1)):
            leave.set()
            thread.join()
            assert torch.backends.mkldnn.matmul.fp32_precision in {"ieee", "none"}  # type: ignore[attr-defined] # likewise
        assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined] # likewise
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has one setting for all backends"
)
def test_an_inherited_precision_stays_inherited() -> None:
    code = """
import torch
from attn_monitor.tiles import undisturbed
backends = torch.backends
backends.fp32_precision = "tf32"
with undisturbed(torch.zeros(1)):
    assert backends.cuda.matmul.fp32_precision == "ieee"
backends.fp32_precision = "ieee"
print(backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision)
"""
    wanted = code.replace("with undisturbed(torch.zeros(1)):", "if False:")
    found = [
        subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout
        for text in (code, wanted)
    ]
    assert found[0] == found[1]
