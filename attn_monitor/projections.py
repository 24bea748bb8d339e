"""Finds the weights that make queries and keys, by what a forward pass does and never by names.

For one observed step the linear maps around an attention are hooked, and what they put out is compared with the queries
and keys that the probe sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from attn_monitor.head_weights import Evidence, HeadWeights, evidence, head_weights
from attn_monitor.linear_outputs import Output, has_matrix, is_candidate, own_output, packed_outputs
from attn_monitor.probe import AttentionProbe
from attn_monitor.records import AttentionCall
from attn_monitor.unseen import unseen

_SHOWN = "it was shown by observe_attention or observe_logits, and what made its queries and keys was not seen"


class ProjectionFinder:
    """Looks for the weights of some layers during one observed step.

    Args:
        probe: Sees their attention.
    """

    def __init__(self, probe: AttentionProbe) -> None:
        self._probe = probe
        self._handles: list[RemovableHandle] = []
        self._outputs: dict[nn.Module, list[Output]] = {}
        self._wanted: set[str] = set()
        self._found: dict[str, Evidence | str] = {}

    def begin(self, model: nn.Module, records: Iterable[str]) -> None:
        """Hook what is around these layers, until `end`.

        Args:
            model: All of it.
            records: The records of the layers, as the probe names them.
        """
        self.end()
        self._wanted = set(records) - self._found.keys()
        if not self._wanted:
            return
        parents = {child: module for module in model.modules() for child in module.children()}
        owners = {record: self._probe.owner(record) for record in self._wanted}
        self._found.update({record: _SHOWN for record, owner in owners.items() if owner is None})
        around = {module: None for owner in owners.values() for module in _around(owner, parents)}
        for module in around:
            if isinstance(module, nn.MultiheadAttention):
                hook = _Hook(partial(self._keep, packed_outputs))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            elif is_candidate(module) and not isinstance(module, torch.jit.ScriptModule):
                hook = _Hook(partial(self._keep, own_output))
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._probe.show_calls(self._compare)

    def end(self) -> None:
        """Remove every hook and let go of every output; what was found stays. Harmless at any time."""
        self._probe.show_calls(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for found in self._found.values():
            for output, _ in found.blocks if isinstance(found, Evidence) else ():
                output.forget()
        self._outputs.clear()
        self._wanted.clear()

    def weights(self, model: nn.Module, record: str) -> list[HeadWeights | str] | str | None:
        """Return the weights of each head of a layer, or why not; `None` if it did not run. It waits for the device."""
        found = self._found.pop(record, None)
        if not isinstance(found, Evidence):
            return found
        try:
            with unseen(), torch.no_grad():
                return head_weights(found, model)
        except Exception as error:
            return _told(error)

    def _keep(self, read: Callable[..., list[Output]], module: nn.Module, *call: Any) -> None:
        self._outputs.pop(module, None)  # the order is that of the calls
        try:
            with unseen(), torch.no_grad():
                self._outputs[module] = read(module, *call)
        except Exception:  # whatever it is, it is none of the maps that are known
            return

    def _compare(self, record: str, call: AttentionCall) -> None:
        if record not in self._wanted or record in self._found:
            return
        try:
            with unseen(), torch.no_grad():
                outputs = [output for found in self._outputs.values() for output in found]
                self._found[record] = evidence(outputs, call)
        except Exception as error:
            self._found[record] = _told(error)


def _told(error: Exception) -> str:
    return f"looking for its weights failed: {type(error).__name__}: {error}"


def _around(owner: nn.Module | None, parents: dict[nn.Module, nn.Module]) -> list[nn.Module]:
    """Return the modules in the smallest part of the model around an attention that has linear maps."""
    while owner is not None:
        inside = list(owner.modules())
        if any(has_matrix(module) or isinstance(module, nn.MultiheadAttention) for module in inside):
            return inside
        owner = parents.get(owner)
    return []


def _nothing(*_: Any) -> None:
    """What becomes of a hook in a copied or unpickled model."""


def _inert() -> Callable[..., None]:
    return _nothing


class _Hook:
    """A hook that is inert in copies of the model."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *call: Any) -> None:
        self.function(*call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()
