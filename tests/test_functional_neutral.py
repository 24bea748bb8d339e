"""The functions wait for nothing, leave settings as they were, and refuse bad arguments."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_monitor.catalog import ALL
from attn_monitor.functional import attention_statistics, softmax_statistics
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_sums
from tests.attention_inputs import FORWARD, B, K, Q, make_inputs
from tests.surroundings import hostile_surroundings

# -- neutral ---------------------------------------------------------------


def calls() -> dict[str, AttentionCall]:
    query, key = make_inputs(heads=6, groups=2)
    mask = torch.rand(B, 1, Q, K) > 0.3
    return {
        "causal": AttentionCall(query=query, key=key, is_causal=True, scale=torch.tensor(0.3)),
        "masked": AttentionCall(query=query, key=key, masks=(mask, torch.randn(Q, K)), softcap=3.0),
        "sink": AttentionCall(query=query, key=key, sinks=torch.randn(6)),
        "logits": AttentionCall(query=query, key=key, logits=torch.randn(B, 6, Q, K), masks=(mask,)),
    }


@pytest.mark.parametrize("name", ["causal", "masked", "sink", "logits"])
@pytest.mark.parametrize("max_queries", [None, 5])
def test_nothing_waits_for_the_device_and_surroundings_change_nothing(name: str, max_queries: int | None) -> None:
    call = calls()[name]
    expected = attention_sums(call, ALL, max_queries)
    with hostile_surroundings():
        sums = attention_sums(call, ALL, max_queries)
    torch.testing.assert_close(sums.additive, expected.additive, rtol=0, atol=0)
    torch.testing.assert_close(sums.moments, expected.moments, rtol=0, atol=0)
    torch.testing.assert_close(sums.extrema, expected.extrema, rtol=0, atol=0)
    assert not sums.additive.requires_grad


def test_function_modes_of_others_see_nothing() -> None:
    query, key = make_inputs()
    call = AttentionCall(query=query, key=key)
    seen: list[str] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Recorder():
        attention_sums(call, ALL)
        attention_sums(call, ALL, 5)
    assert seen == []


def test_the_random_state_and_the_inputs_stay_as_they_are() -> None:
    query, key = make_inputs()
    mask = torch.randn(Q, K)
    query.requires_grad_()
    before = torch.get_rng_state(), query.detach().clone(), key.clone(), mask.clone()
    attention_statistics(query, key, attn_mask=mask, max_queries=5, is_causal=True)
    softmax_statistics(mask)
    after = torch.get_rng_state(), query.detach(), key, mask
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert query.grad_fn is None


def test_the_matmul_precision_is_restored() -> None:
    query, key = make_inputs()
    expected = attention_sums(AttentionCall(query=query, key=key), FORWARD)
    torch.set_float32_matmul_precision("medium")
    try:
        sums = attention_sums(AttentionCall(query=query, key=key), FORWARD)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(sums.additive, expected.additive, rtol=0, atol=0)


# -- errors ---------------------------------------------------------------


Q4, K4 = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 11, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(5, 7), K4), ValueError, r"`query` expects \[batch, heads.*got of shape \[5, 7\].*unsqueeze"),
        (
            (Q4, K4.mT),
            ValueError,
            r"`key` expects batch 2 and head dim 7.*\[2, 3, 5, 7\].*got of shape \[2, 3, 7, 11\]",
        ),
        ((Q4, K4[:1]), ValueError, r"`key` expects batch 2 .* got of shape \[1, 3, 11, 7\]"),
        ((Q4, K4[:, :1]), ValueError, r"expects 3 heads.*got of shape \[2, 1, 11, 7\].*enable_gqa=True"),
        ((Q4.int(), K4), TypeError, r"`query` expects a floating-point tensor, got torch.int32"),
        ((Q4, 3.0), TypeError, r"`key` expects a tensor, got float"),
        ((Q4, K4, K4[:, :, :4]), ValueError, r"`value` expects.*\[2, 3, 11, 7\], got of shape \[2, 3, 4, 7\]"),
    ],
)
def test_bad_inputs_get_a_clear_error(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_statistics(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"attn_mask": torch.zeros(2, 11)},
            ValueError,
            r"\[B, H, Q, K\] = \[2, 3, 5, 11\], got of shape \[2, 11\].*None",
        ),
        ({"attn_mask": torch.zeros(5, 11).int()}, TypeError, r"expects bool .* or float .*got torch.int32.*mask.bool"),
        ({"scale": torch.zeros(2)}, ValueError, r"one value per head \[3\], got of shape \[2\]"),
        ({"softcap": 0.0}, ValueError, r"`softcap` expects a positive finite number.*got 0.0"),
        ({"max_queries": 0}, ValueError, r"`max_queries` expects a positive integer or None, got 0"),
        ({"statistics": ["entropi"]}, ValueError, r"Unknown statistics \['entropi'\]"),
        ({"statistics": "entropy"}, TypeError, r"Write statistics=\['entropy'\]"),
    ],
)
def test_bad_options_get_a_clear_error(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_statistics(Q4, K4, **options)


def test_key_heads_that_do_not_divide_the_query_heads_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"not a multiple of the heads of key of shape \[2, 2, 11, 7\]"):
        attention_statistics(Q4, K4[:, :2], enable_gqa=True)


@pytest.mark.parametrize(
    ("logits", "options", "error", "message"),
    [
        (torch.tensor(1.0), {}, ValueError, "at least one axis"),
        (torch.zeros(2, 3).long(), {}, TypeError, "floating-point tensor, got torch.int64"),
        (torch.zeros(2, 3), {"dim": 2}, ValueError, r"`dim` expects an axis of logits of shape \[2, 3\], got 2"),
        (torch.zeros(2, 3), {"head_axis": -3}, ValueError, r"`head_axis` expects an axis.*got -3"),
        (torch.zeros(2, 3, 4, 5), {"dim": 1}, ValueError, r"both axis 1.*\[2, 3, 4, 5\].*head_axis=None"),
        (torch.zeros(2, 3), {"mask": torch.zeros(2)}, ValueError, r"broadcasts to the logits = \[2, 3\], got .*\[2\]"),
    ],
)
def test_bad_logits_get_a_clear_error(
    logits: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        softmax_statistics(logits, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": "a"}, TypeError, r"`scale` expects a number, a tensor or None .*, got 'a'"),
        ({"scale": math.nan}, ValueError, r"`scale` expects a finite number, .* got nan"),
        ({"max_queries": 1.5}, TypeError, r"`max_queries` expects a positive integer or None, got 1.5"),
        ({"softcap": math.inf}, ValueError, r"`softcap` expects a positive finite number"),
    ],
)
def test_numbers_that_are_none_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    query, key = make_inputs()
    with pytest.raises(error, match=message):
        attention_statistics(query, key, **options)


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has one setting for all backends"
)
def test_every_setting_of_the_precision_is_left_as_it_was() -> None:
    # Each in its own process, since these settings are global; what is forked has torch already.
    script = """
import os, sys, torch
from attn_monitor.functional import attention_statistics
def state():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
for setting in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(setting)
        before = state()
        attention_statistics(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4))
        print([setting, before, state()], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    settings = [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
        "torch.set_float32_matmul_precision('high'); torch.backends.mkldnn.matmul.fp32_precision = 'ieee'",
    ]
    run = subprocess.run([sys.executable, "-c", script, *settings], check=True, capture_output=True, text=True)
    found = [ast.literal_eval(line) for line in run.stdout.splitlines()]
    assert [setting for setting, _, _ in found] == settings
    assert [(setting, after) for setting, _, after in found] == [(setting, before) for setting, before, _ in found]
    assert len({before for _, before, _ in found}) == len(settings)  # they are settings, and different ones
