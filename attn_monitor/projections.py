"""Finds the weights that make queries and keys, by what a forward pass does and never by names.

In an observed step the linear maps around an attention are hooked, and what they put out is compared with the queries
and keys that the probe sees. Nothing is kept for later steps: what a weight makes may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_monitor.call_evidence import Evidence, call_lengths, evidence
from attn_monitor.capture.hooks import Hook
from attn_monitor.capture.ownership import in_backward
from attn_monitor.head_weights import HeadWeights, head_weights
from attn_monitor.linear_outputs import Output, has_matrix, is_candidate, own_output, packed_outputs
from attn_monitor.phrases import error_line
from attn_monitor.probe import AttentionProbe
from attn_monitor.records import AttentionCall
from attn_monitor.unseen import unseen
from attn_monitor.weight_uses import Step, exclusive, memory_users

_SHOWN = "it was shown by observe_attention or observe_logits, and what made its queries and keys was not seen"
_LEFT_OUT = "`modules` leaves out attention of the model, which may use the same weights or keys; watch all of it"
_MOST_CALLS = 64
_OFTEN = f"its attention ran more than {_MOST_CALLS} times in the step in which its weights were looked for"


@dataclass(slots=True, eq=False)
class _Found:
    """What was found about a record in one step: the evidence of each of its calls, or why there is none."""

    step: Step
    calls: list[Evidence] = field(default_factory=list)
    reason: str = ""


class ProjectionFinder:
    """Looks for the weights of some layers during one observed step.

    Args:
        probe: Sees their attention.
    """

    def __init__(self, probe: AttentionProbe) -> None:
        self._probe = probe
        self._handles: list[RemovableHandle] = []
        self._outputs: dict[nn.Module, list[Output]] = {}
        self._around: dict[str, list[nn.Module]] = {}
        self._step = Step()
        self._found: dict[str, _Found] = {}
        self._hidden = False
        self._is_shared: Callable[[Tensor], bool] | None = None

    def begin(self, model: nn.Module, records: Iterable[str]) -> None:
        """Hook what is around these layers, until `end`.

        Args:
            model: All of it.
            records: The records of the layers, as the probe names them.
        """
        self.end()
        wanted = set(records) - self._found.keys()
        if not wanted:
            return
        parents = {child: module for module in model.modules() for child in module.children()}
        owners = {record: self._probe.owner(record) for record in wanted}
        self._step = Step()
        self._found.update(
            {record: _Found(self._step, reason=_SHOWN) for record, owner in owners.items() if owner is None}
        )
        self._around = {record: _around(owner, parents) for record, owner in owners.items() if owner is not None}
        for module in {module: None for around in self._around.values() for module in around}:
            if isinstance(module, nn.MultiheadAttention):
                hook = Hook(partial(self._keep, packed_outputs))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            elif is_candidate(module) and not isinstance(module, torch.jit.ScriptModule):
                hook = Hook(partial(self._keep, own_output))
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._hidden = any(self._probe.owner(name) is None for name in self._probe.owners)
        self._probe.show_calls(self._compare)

    def end(self) -> None:
        """Remove every hook and let go of every output; what was found stays. Harmless at any time."""
        self._probe.show_calls(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in list(self._outputs):
            self._forget(module)
        self._around.clear()

    def forget(self) -> None:
        """Forget what was found, since the weights may be others from now on."""
        self._found.clear()
        self._step = Step()
        self._is_shared = None

    def weights(self, model: nn.Module, record: str) -> list[HeadWeights | str] | str | None:
        """Return the weights of each head of a layer, or why not; `None` if it did not run. It waits for the device."""
        found = self._found.get(record)
        if found is None or not (found.reason or found.step.unsure or found.calls):
            return None
        if reason := found.reason or found.step.unsure or self._left_out(found.step):
            return reason
        try:
            with unseen(), torch.no_grad():
                if self._is_shared is None:
                    self._is_shared = memory_users(model)
                calls = [head_weights(call, model, self._is_shared) for call in found.calls]
                return exclusive(calls, found.calls, record, found.step)
        except Exception as error:
            return _told(error)

    def _left_out(self, step: Step) -> str:
        """Return what is wrong if there is attention that is not watched, and none of it was shown."""
        shown = any(record is None for record, _ in step.attention)
        return _LEFT_OUT if self._hidden and not shown else ""

    def _keep(self, read: Callable[..., list[Output]], module: nn.Module, *call: Any) -> None:
        if in_backward():
            return  # a recomputation may end before it reaches the attention
        self._forget(module)  # the order is that of the calls
        number = self._step.runs[module]
        self._step.runs[module] += 1
        try:
            with unseen(), torch.no_grad():
                self._outputs[module] = read(module, *call)
        except Exception:  # whatever it is, it is none of the maps that are known
            return
        for output in self._outputs[module]:
            output.call = number

    def _forget(self, module: nn.Module) -> None:
        for output in self._outputs.pop(module, ()):
            output.forget()

    def _compare(self, record: str | None, call: AttentionCall) -> None:
        """Take a call of an attention; `None` is the record of one that is not watched."""
        if in_backward():
            return
        wanted = record in self._around
        found = self._found.setdefault(record, _Found(self._step)) if record is not None and wanted else None
        try:
            with unseen(), torch.no_grad():
                self._step.note(record, call_lengths(call))
                if record is not None and found is not None and not found.reason:
                    self._take(record, found, call)
        except Exception as error:
            self._step.unsure = _told(error)

    def _take(self, record: str, found: _Found, call: AttentionCall) -> None:
        around = set(self._around[record])
        outputs = [output for module, made in self._outputs.items() if module in around for output in made]
        result = evidence(outputs, call)
        if isinstance(result, str):
            found.reason = result
        elif len(found.calls) == _MOST_CALLS:
            found.reason = _OFTEN
        else:
            found.calls.append(result)


def _told(error: Exception) -> str:
    return f"looking for its weights failed: {error_line(error)}"


def _around(owner: nn.Module | None, parents: dict[nn.Module, nn.Module]) -> list[nn.Module]:
    """Return the modules in the smallest part of the model around an attention that has linear maps."""
    while owner is not None:
        inside = list(owner.modules())
        if any(has_matrix(module) or isinstance(module, nn.MultiheadAttention) for module in inside):
            return inside
        owner = parents.get(owner)
    return []
