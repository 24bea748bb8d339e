"""The store of tags: for as long as a tensor lives, and not for what comes after it at its address."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch

from attn_monitor.capture.layout import fresh
from attn_monitor.capture.tags import Tag, TagStore
from tests.reliability.sweeps import PACKAGE


def store() -> TagStore:
    """Return a store that nobody complains to."""
    return TagStore(lambda reason: None)


def test_a_tensor_at_the_address_of_a_dead_one_has_no_tag() -> None:
    tags, addresses, again = store(), set[int](), 0
    for _ in range(100):
        tensor = torch.zeros(3, 5)
        again += id(tensor) in addresses
        addresses.add(id(tensor))
        assert tags.get(tensor) is None
        assert tensor not in tags
        assert not tags.any_known([[tensor]])
        assert not tags.is_weight(tensor)
        tags.weigh([tensor])
        assert tags.is_weight(tensor)
    assert again > 0


def test_a_tag_set_anew_outlives_the_first() -> None:
    tags, tensor = store(), torch.zeros(3, 5)
    tags.weigh([tensor])
    tags.put(tensor, Tag("activation", fresh(tensor.shape)))
    found = tags.get(tensor)
    assert found is not None
    assert found.kind == "activation"


def test_what_a_tag_holds_ends_with_the_next_question() -> None:
    tags, tensor, held = store(), torch.zeros(3, 5), torch.zeros(7)
    tags.put(tensor, Tag("activation", fresh(tensor.shape), held=held))
    kept = weakref.ref(held)
    del tensor, held
    tags.any_known([])
    assert kept() is None


def test_the_death_of_a_tensor_runs_no_line_of_ours() -> None:
    # Python prints and drops what is raised there, so that a Ctrl-C in such a line would be lost.
    tags, tensor, lines = store(), torch.zeros(3, 5), list[str]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.startswith(PACKAGE):
            lines.append(frame.f_code.co_name)

    tags.weigh([tensor])
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        del tensor
    finally:
        sys.settrace(before)
    assert lines == []
