"""What the public functions are given by mistake: wrong types, tensors without numbers, what logits cannot give.

Functions that are called on their own raise. What is shown inside of a training is listed in `skipped` instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe, observe_attention, observe_logits
from attn_monitor.capture import observe
from attn_monitor.functional import attention_statistics, softmax_statistics
from tests.reference import assert_matches, softmax_reference

Q4, K4, X2 = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 11, 7), torch.zeros(5, 11)
META = torch.zeros(2, 3, 5, 7, device="meta")
NESTED = torch.nested.nested_tensor([torch.zeros(3, 7), torch.zeros(2, 7)], layout=torch.jagged)

HEAD_DIMS: list[tuple[Any, type[Exception], str]] = [
    (-4, ValueError, r"`head_dim` expects .* a whole number of at least 1, or None .*, got -4\."),
    (0, ValueError, r"at least 1, or None where there are none, got 0\."),
    (math.nan, TypeError, r"`head_dim` expects .* a whole number .*, got nan of type float\."),
    (True, TypeError, r"got True of type bool\."),
    (2.5, TypeError, r"got 2.5 of type float\."),
    ("x", TypeError, r"got 'x' of type str\."),
    ([4], TypeError, r"got \[4\] of type list\."),
]
ATTENTION: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((Q4, "k"), {}, TypeError, r"`key` expects a tensor, got str"),
    (("q", K4), {}, TypeError, r"`query` expects a tensor, got str"),
    ((Q4, K4, "v"), {}, TypeError, r"`value` expects a tensor, got str"),
    ((Q4, K4, K4.int()), {}, TypeError, r"`value` expects a floating-point tensor, got torch.int32"),
    ((Q4, K4), {"attn_mask": "x"}, TypeError, r"`attn_mask` expects a tensor, got str"),
    ((Q4, K4), {"attn_mask": [[True]]}, TypeError, r"`attn_mask` expects a tensor, got list"),
    ((Q4, K4), {"softcap": "x"}, TypeError, r"`softcap` expects a number, or None for no cap, got 'x' of type str"),
    ((Q4, K4), {"softcap": True}, TypeError, r"`softcap` expects a number, .* got True of type bool"),
    ((Q4, K4), {"softcap": math.nan}, ValueError, r"`softcap` expects a positive finite number, .* got nan"),
    ((Q4, K4), {"scale": torch.tensor(True)}, TypeError, r"`scale` expects real numbers, got torch.bool"),
    ((Q4, K4), {"scale": torch.ones((), device="meta")}, ValueError, r"`scale` expects numbers, .* meta device"),
    ((Q4, K4, META), {}, ValueError, r"`value` expects numbers, got a tensor on the meta device, which holds none"),
    (
        (Q4.to_sparse(), K4),
        {},
        ValueError,
        r"`query` expects a dense tensor, got one of layout torch.sparse_coo.*to_de",
    ),
    ((Q4, K4, K4.to_sparse()), {}, ValueError, r"`value` expects a dense tensor, got one of layout torch.sparse_coo"),
    ((Q4, K4), {"attn_mask": X2.to_sparse()}, ValueError, r"`attn_mask` expects a dense tensor, got one of layout"),
    ((Q4, K4), {"attn_mask": X2.to("meta")}, ValueError, r"`attn_mask` expects numbers, .* meta device"),
]
LOGITS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([X2], {}, TypeError, r"`logits` expects a tensor, got list"),
    (X2, {"dim": "x"}, TypeError, r"`dim` expects the number of an axis of logits of shape \[5, 11\], got 'x' of type"),
    (X2, {"dim": True}, TypeError, r"`dim` expects the number of an axis .* got True of type bool"),
    (X2, {"dim": 1.0}, TypeError, r"`dim` expects the number of an axis .* got 1.0 of type float"),
    (X2.to_sparse(), {}, ValueError, r"`logits` expects a dense tensor, got one of layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("head_dim", "error", "message"), HEAD_DIMS)
def test_a_head_dimension_that_is_none_is_refused(head_dim: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        softmax_statistics(X2, head_dim=head_dim)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), ATTENTION)
def test_what_is_no_attention_is_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attention_statistics(*arguments, **options)


@pytest.mark.parametrize(
    ("logits", "options", "error", "message"),
    [
        *LOGITS,
        (META, {}, ValueError, r"`logits` expects numbers, got a tensor on the meta device, which holds none"),
        (NESTED, {}, ValueError, r"`logits` expects a dense tensor, got a nested one\. Pass it padded, with a mask"),
        (X2, {"head_axis": "x"}, TypeError, r"`head_axis` expects the number of an axis .* got 'x' of type str"),
        (X2, {"mask": "x"}, TypeError, r"`mask` expects a tensor, got str"),
        (X2, {"mask": X2.to_sparse()}, ValueError, r"`mask` expects a dense tensor, got one of layout"),
    ],
)
def test_what_is_no_softmax_is_refused(
    logits: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        softmax_statistics(logits, **options)


@pytest.mark.parametrize("tensor", [META, NESTED], ids=["meta", "nested"])
def test_query_and_key_without_numbers_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=r"`query` expects .*, got a"):
        attention_statistics(tensor, tensor)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (["q_rms"], r"got others: attention_statistics\(query, key\) measures \['q_rms'\]\."),
        (
            ["entropy", "qk_std", "alignment"],
            r"attention_statistics\(query, key\) measures \['alignment', 'qk_std'\]\.",
        ),
        (
            ["grad_logits_norm"],
            r"got others: AttentionProbe, around .* backward pass, measures \['grad_logits_norm'\]\.",
        ),
        (["gradient_gain", "k_rms"], r"measures \['k_rms'\]; AttentionProbe, .* measures \['gradient_gain'\]\."),
        (["q_rms", "entropi"], r"Unknown statistics \['entropi'\]"),
    ],
)
def test_what_logits_cannot_give_is_refused_with_who_measures_it(statistics: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        softmax_statistics(X2, statistics=statistics)


def test_numbers_of_numpy_are_numbers() -> None:
    logits = torch.randn(5, 11)
    given: Any = {"dim": np.int64(1), "head_dim": np.int32(7)}
    stats = softmax_statistics(logits, **given)
    assert (stats.head_dim, type(stats.head_dim)) == (7, int)
    assert_matches(stats, softmax_reference(logits[None, None], torch.ones(5, 11, dtype=torch.bool)))
    query, key = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7)
    cap: Any = np.float32(2.0)  # no subclass of float
    capped = attention_statistics(query, key, softcap=cap)
    wanted = attention_statistics(query, key, softcap=2.0)
    assert capped.logit_max is not None
    assert wanted.logit_max is not None
    torch.testing.assert_close(capped.logit_max, wanted.logit_max)


# -- inside of a training ---------------------------------------------------------------


class Showing(nn.Module):
    """Shows something in the middle of its forward pass, beside logits that are good."""

    def __init__(self, show: Callable[[], None]) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 3)
        self.show = show

    def forward(self, x: Tensor) -> Tensor:
        self.show()
        logits = self.gate(x)
        observe_logits("good", logits, head_dim=7)
        return logits.logsumexp(-1).sum()


def skipped_when_showing(show: Callable[[], None]) -> Mapping[str, str]:
    """Train one step in which something is shown; the good logits must be measured whatever that was."""
    model, x = Showing(show), torch.randn(5, 7)
    with AttentionProbe(model) as probe:
        model(x).backward()
    found = probe.compute()
    assert list(found) == ["good"]
    logits = model.gate(x).detach()
    assert_matches(found["good"], softmax_reference(logits[None, None], torch.ones(5, 3, dtype=torch.bool)))
    gradient = found["good"].grad_logits_norm
    assert gradient is not None
    torch.testing.assert_close(gradient, logits.double().softmax(-1).norm()[None], rtol=1e-5, atol=0)
    return probe.skipped


@pytest.mark.parametrize(("head_dim", "_", "message"), HEAD_DIMS)
def test_logits_shown_with_a_bad_head_dimension_cost_no_other_layer(head_dim: Any, _: Any, message: str) -> None:
    skipped = skipped_when_showing(lambda: observe_logits("bad", X2, head_dim=head_dim))
    assert list(skipped) == ["bad"]
    assert re.search(message, skipped["bad"])


@pytest.mark.parametrize(("arguments", "options", "_", "message"), ATTENTION)
def test_a_bad_attention_that_is_shown_is_skipped(
    arguments: tuple[Any, ...], options: dict[str, Any], _: Any, message: str
) -> None:
    skipped = skipped_when_showing(lambda: observe_attention("bad", *arguments, **options))
    assert list(skipped) == ["bad"]
    assert re.search(message, skipped["bad"])


@pytest.mark.parametrize(("logits", "options", "_", "message"), LOGITS)
def test_bad_logits_that_are_shown_are_skipped(logits: Any, options: dict[str, Any], _: Any, message: str) -> None:
    skipped = skipped_when_showing(lambda: observe_logits("bad", logits, **options))
    assert list(skipped) == ["bad"]
    assert re.search(message, skipped["bad"])


@pytest.mark.parametrize(
    ("tensor", "said"),
    [(META, "meta device"), (NESTED, "nested tensors are not measured")],
    ids=["meta", "nested"],
)
def test_tensors_without_numbers_that_are_shown_are_skipped(tensor: Tensor, said: str) -> None:
    def show() -> None:
        observe_logits("logits", tensor)
        observe_attention("attention", tensor, tensor)
        observe_attention("output", Q4, K4, K4, output="x")  # type: ignore[arg-type] # the mistake

    skipped = skipped_when_showing(show)
    assert list(skipped) == ["logits", "attention", "output"]
    assert said in skipped["logits"]
    assert said in skipped["attention"]
    assert "`output` expects a tensor, got str" in skipped["output"]


def test_no_error_of_ours_leaves_what_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone\nand much more")

    monkeypatch.setattr(observe, "check_measurable", broken)
    model = Showing(lambda: observe_attention("attention", Q4, K4))
    with AttentionProbe(model) as probe:
        model(torch.randn(5, 7)).backward()
    assert dict(probe.compute()) == {}
    assert probe.skipped == dict.fromkeys(("attention", "good"), "RuntimeError: the device is gone")
