"""The history in a checkpoint: the same numbers to the bit, bounded, and never in the way of a training."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_monitor import AttentionMonitor
from attn_monitor.functional import attention_statistics
from attn_monitor.history import MOST_BYTES, MOST_TENSORS, history_from, history_state
from attn_monitor.records import AttentionStatistics
from tests.models import LIGHTNING_ADVICE, Lit, loader, make_record, quiet
from tests.scripted import fit

pytestmark = LIGHTNING_ADVICE


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it comes out of a file."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def alike(one: AttentionStatistics, other: AttentionStatistics) -> bool:
    """Tell whether two records are the same in every field, to the bit and the type."""

    def same(mine: Any, theirs: Any) -> bool:
        if isinstance(mine, torch.Tensor):
            return mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(nan=7.5), theirs.nan_to_num(nan=7.5))
        if isinstance(mine, Mapping):
            return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
        return bool(mine == theirs)

    return all(same(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(one))


def test_every_field_comes_back_to_the_bit() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 13, 7), torch.randn(2, 3, 11, 7)
    whole = attention_statistics(query, key)
    sampled = attention_statistics(query, key, max_queries=5)
    odd = make_record(2, head_dim=None, logit_max=[math.nan, math.inf], nonfinite=[1, 2**40])
    assert sampled.standard_error
    history: list[tuple[int, dict[str, AttentionStatistics]]] = [
        (0, {"a.1": whole, "b": odd}),
        (5, {}),
        (10, {"a.1": sampled, "b": odd}),
        (15, {"a.1": whole, "b": odd}),
    ]
    found = history_from(saved(history_state(history)))
    assert [step for step, _ in found] == [0, 5, 10, 15]
    for (_, before), (_, after) in zip(history, found, strict=True):
        assert list(before) == list(after)
        assert all(alike(before[layer], after[layer]) for layer in before)


def test_no_history_is_no_history() -> None:
    assert history_from(saved(history_state([]))) == []


def test_records_alike_share_what_is_no_number() -> None:
    records = [(step, {"a": replace(make_record(logit_max=[1.0, step]), keys=step + 2, calls=3)}) for step in range(97)]
    state = history_state(records)
    assert [(record["a"].keys, record["a"].calls) for _, record in history_from(state)] == [
        (step + 2, 3) for step in range(97)
    ]
    assert len(state["layouts"]) == 1
    assert sum(isinstance(value, torch.Tensor) for value in state.values()) == 1


def test_the_latest_are_kept_where_there_are_too_many() -> None:
    heads = 2**18
    one = make_record(heads, logit_max=[1.0] * heads)  # and three that count rows
    state = history_state([(step, {"a": one}) for step in range(7)])
    assert [step for step, _ in history_from(state)] == [3, 4, 5, 6]
    assert state["values"].nbytes == MOST_BYTES


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of everything within nested dictionaries and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


@pytest.mark.parametrize("junk", [None, "junk", -1, 10**9, [], {}, math.nan, torch.zeros(3)], ids=repr)
def test_a_damaged_state_is_refused_or_gives_records(junk: Any) -> None:
    whole = history_state([(5, {"a": make_record(2, logit_max=[1.0, 2.0])})])
    for place in places(whole)[1:]:
        damaged = copy.deepcopy(whole)
        inner: Any = damaged
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = junk
        try:
            found = history_from(damaged)
        except ValueError:
            continue
        assert all(statistics.measured() for _, record in found for statistics in record.values()), place


def test_no_more_tensors_are_kept_than_are_soon_saved() -> None:
    layers = {f"layers.{layer}": make_record(1, logit_max=[1.0]) for layer in range(503)}  # four tensors each
    found = history_from(history_state([(step, layers) for step in range(29)]))
    assert [step for step, _ in found] == list(range(5, 29))
    assert len(found) == MOST_TENSORS // (4 * 503)


def test_a_resumed_run_has_the_history_of_an_unbroken_one(tmp_path: Path) -> None:
    def lit() -> Lit:
        torch.manual_seed(0)
        return Lit("hand")

    unbroken, first, second = (AttentionMonitor(every_n_steps=1, history_size=5) for _ in range(3))
    quiet(callbacks=[unbroken], max_epochs=2).fit(lit(), loader(3))
    trainer = quiet(callbacks=[first], max_epochs=1)
    trainer.fit(lit(), loader(3))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    quiet(callbacks=[second], max_epochs=2).fit(lit(), loader(3), ckpt_path=tmp_path / "half.ckpt")
    assert [step for step, _ in second.history] == [step for step, _ in unbroken.history] == [1, 2, 3, 4, 5]
    for (_, one), (_, other) in zip(second.history, unbroken.history, strict=True):
        assert list(one) == ["net.blocks.0"]
        assert alike(one["net.blocks.0"], other["net.blocks.0"])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"version": 7}, "expected a history of version 1, got 7"),
        ({}, "its parts do not fit (KeyError: 'version')"),
        ([], "its parts do not fit (TypeError: "),
        ({"version": 1, "values": torch.zeros(3), "records": [], "layouts": []}, "expected 0 numbers, got 3"),
        (
            {"version": 1, "values": torch.zeros(3), "records": [[0, 1, []]], "layouts": []},
            "its parts do not fit (Index",
        ),
    ],
)
def test_a_history_that_does_not_fit_is_left_out_and_told(broken: Any, said: str) -> None:
    donor, heir = AttentionMonitor(every_n_steps=1), AttentionMonitor(every_n_steps=1)
    fit(Lit("hand"), donor, 1)
    heir.load_state_dict({**donor.state_dict(), "history": broken})
    _, told = fit(Lit("hand"), heir, 2)
    [text] = told
    assert text.startswith(f"the history in the checkpoint is ignored: {said}")
    assert [step for step, _ in heir.history] == [0, 1]
