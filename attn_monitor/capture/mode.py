"""The function mode: sees every torch function of the watched modules, and reports attention calls."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.adapters import from_sdpa
from attn_monitor.capture.dataflow import follow
from attn_monitor.capture.kernels.nested import from_nested, is_nested
from attn_monitor.capture.kernels.registry import OPERATORS, Adapter, operator_adapter, read_kernel
from attn_monitor.capture.layout import fresh
from attn_monitor.capture.observe import shown
from attn_monitor.capture.ownership import WatchingMode, in_backward
from attn_monitor.capture.sighting import Sighting, Sink, UnmeasurableError
from attn_monitor.capture.softmax import from_softmax
from attn_monitor.capture.tags import Tag, TagStore
from attn_monitor.unseen import unseen

UNKNOWN_ORIGIN = (
    "a softmax weighs values here, and where its logits come from was not seen (a function compiled by torch.jit, a "
    "kernel, scores that are no product); call observe_logits on them"
)
NOISE = "the noise of gumbel_softmax is part of the logits"
TRACED = "torch.jit.trace records this forward, and what the monitor would do in it"
REPLACED = (
    "F.multi_head_attention_forward has been replaced by a function that is not torch's own, and what it does inside "
    "is not seen; call observe_attention in it"
)


def _without_override_check(original: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function of torch in a form whose inner calls a mode can see; `None` if it is not torch's own.

    The original hands itself to the active mode as a whole and runs with the mode switched off.
    """
    if not isinstance(original, types.FunctionType) or original.__module__ != F.__name__:
        return None
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**original.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    function = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    function.__kwdefaults__ = original.__kwdefaults__
    return function


class _Here(threading.local):
    """What a thread is in.

    Attributes:
        muted: A kernel that is reported as a whole.
        note: What to know about every attention seen now.
        withheld: Reasons why attention inside a function is not measured that may yet be reported as a whole.
    """

    muted = False
    note = ""
    withheld: list[str] | None = None


class CaptureMode(WatchingMode):
    """Reports every attention call to a sink. The model's own results pass through untouched."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink
        self.tags = TagStore(self._unnormalised)
        self._here = _Here()
        self._reports = 0
        self._blind: set[Any] = set()

    def __torch_function__(
        self, func: fn.Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and look at it."""
        kwargs = kwargs or {}
        handler = None
        try:
            handler = self._handler(func, args, kwargs)
        except Exception as error:  # of ours: the function runs as it would
            self._failed(error)
        if handler is not None:
            return handler(func, args, kwargs)
        out = func(*args, **kwargs)
        if type(out) is torch.Size or self._here.muted:  # the first is asked for all the time, and nothing to follow
            return out
        if isinstance(out, (Tensor, tuple, list)) or func in fn.SET_ITEM:
            self._follow(func, args, kwargs, out)
        return out

    def _handler(
        self, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[fn.Function, tuple[Any, ...], dict[str, Any]], Any] | None:
        """Return what runs a function that is not only followed."""
        if self._here.muted:
            return None
        if torch._C._is_tracing():
            return self._traced
        if func is fn.MULTI_HEAD or func is F.multi_head_attention_forward or func in fn.OPENED:
            return self._opened
        known = fn.known_as(func)
        if known is fn.SDPA:
            read = from_nested if is_nested(args, kwargs) else partial(from_sdpa, self.tags)
            sighting = self._guard(read, args, kwargs)
            return partial(self._watched, sighting)
        if known in fn.SOFTMAX:
            return self._softmax
        if isinstance(func, OPERATORS) and (adapter := operator_adapter(func)) is not None:
            return lambda func, args, kwargs: self.kernel(adapter, func, func, *args, **kwargs)
        return None

    def _opened(self, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch that is written in Python, and look at what is inside."""
        function = self._guard(_without_override_check, func)
        if function is None:
            self._guard(self._sink.unmeasured, REPLACED)
            return func(*args, **kwargs)
        self._here.note = NOISE if func is F.gumbel_softmax else ""
        try:
            with self:
                return function(*args, **kwargs)
        finally:
            self._here.note = ""

    def starts(self, tensors: Iterable[Tensor]) -> None:
        """Take note of the tensors a module has that starts to run."""
        self._guard(self.tags.weigh, tensors)

    def _traced(self, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is being recorded: whatever we do beside it would be recorded, too."""
        self._guard(self._lost_in_trace, func, args, kwargs)
        return func(*args, **kwargs)

    def _lost_in_trace(self, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        softmax = func in fn.SOFTMAX and fn.argument(args, kwargs, 0, "input", "self").dim() > 2
        if softmax or func is fn.SDPA or func is fn.MULTI_HEAD:
            self._sink.lost(UnmeasurableError(TRACED))

    def _follow(self, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        try:
            follow(self.tags, func, args, kwargs, out)
        except Exception as error:
            self._guard(self._trail_ends, args, kwargs, error)

    def _trail_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """Tell of scores that can't be followed any further; of other tensors that does not matter."""
        given = fn.tensors((*args, *kwargs.values()))
        if any((tag := self.tags.get(t)) is not None and tag.kind == "scores" for t in given):
            self._sink.lost(error)

    def _softmax(self, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._guard(from_softmax, self.tags, args, kwargs)
        if found is None:
            out = func(*args, **kwargs)
            self._guard(self._unknown, args, kwargs, out)
            return out
        sighting, tag = found
        if self._here.note:
            sighting = replace(sighting, note="; ".join(filter(None, (sighting.note, self._here.note))))
        if len(tag.layout) > 2 and tag.assured and not tag.bent and not tag.doubted:
            out = self._watched(sighting, func, args, kwargs)
            self._guard(lambda: self.tags.put(out, Tag("probabilities", tag.layout)))
            return out
        # Two dimensions may be one head's attention or a classifier's similarities, and who knows what the scores were
        # through: attention goes on to weigh values.
        out = func(*args, **kwargs)
        self._guard(self._report_on_use, sighting, tag, out)
        return out

    def _report_on_use(self, sighting: Sighting, tag: Tag, out: Tensor) -> None:
        """Prepare to report a softmax once it weighs values."""
        origin = weakref.ref(out)  # the tag lives as long as the tensor, and must not keep it alive
        waiting = [sighting]

        def use() -> None:
            while waiting:  # once, however many values are weighed
                seen = waiting.pop()
                if (probabilities := origin()) is not None:
                    self._reports += 1
                    self._sink.before(seen)
                    self._sink.after(seen, probabilities)

        self.tags.put(out, Tag("probabilities", tag.layout, on_use=use, origin=origin))

    def _unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Prepare to report that a softmax of unknown origin weighs values.

        In three dimensions it may be a router, whose logits a weight makes, or whose entries each have a value.
        """
        logits, dim = fn.argument(args, kwargs, 0, "input", "self"), fn.argument(args, kwargs, 1, "dim")
        tag = self.tags.get(logits)
        if logits.dim() < 3 or not (tag is None or tag.kind == "activation"):
            return
        three = logits.dim() == 3
        if three and tag is not None and any(axis.channels for axis in tag.layout[0 if dim is None else dim]):
            return

        def use() -> None:
            self._reports += 1
            self._sink.unmeasured(UNKNOWN_ORIGIN)

        self.tags.put(out, Tag("probabilities", fresh(out.shape), on_use=use, waits_for_rows=three, assured=False))

    def _watched(
        self, sighting: Sighting | None, func: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if sighting is None:
            return func(*args, **kwargs)
        self._reports += 1
        self._guard(self._sink.before, sighting)
        out = func(*args, **kwargs)
        self._guard(self._report, sighting, out)
        return out

    def _report(self, sighting: Sighting, out: Any) -> None:
        """Report a call that has run; without its gradients where its output is not the tensor that was expected."""
        tensor = out[0] if isinstance(out, (tuple, list)) and out else out
        if sighting.make is None or (isinstance(tensor, Tensor) and _fits(sighting, tensor)):
            self._sink.after(sighting, tensor)
        else:
            note = "gradients not measured: the output of the kernel has another shape than expected"
            self._sink.after(replace(sighting, differentiable=False, note=note), tensor)

    @property
    def muted(self) -> bool:
        """Whether this thread is inside a kernel that is reported as a whole."""
        return self._here.muted

    def kernel(self, adapter: Adapter, call: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a kernel and report it as a whole, whatever it is made of."""
        sighting = self._guard(read_kernel, adapter, function, args, kwargs)
        self._here.muted = sighting is not None
        try:
            return self._watched(sighting, call, args, kwargs)
        finally:
            self._here.muted = False

    def unseen_kernel(
        self, adapter: Adapter, call: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function and report it as a whole unless something was seen, or shown, inside it."""
        if function in self._blind and in_backward():
            # A recomputation may get no further than the kernel, and wants the call before.
            return self.kernel(adapter, call, function, *args, **kwargs)
        before = self._reports, shown()
        around, self._here.withheld = self._here.withheld, []
        try:
            out = call(*args, **kwargs)
        finally:
            withheld, self._here.withheld = self._here.withheld, around
        sighting = None
        if (self._reports, shown()) == before:
            sighting = self._guard(read_kernel, adapter, function, args, kwargs)
        if sighting is not None:
            self._blind.add(function)
            self._guard(self._report, sighting, out)
        else:
            for reason in withheld or ():
                self._guard(self._unnormalised, reason)
        return out

    def _unnormalised(self, reason: str) -> None:
        """Report scores that weigh values without a softmax, unless a function around them may be reported itself."""
        if self._here.withheld is None:
            self._sink.unmeasured(reason)
        else:
            self._here.withheld.append(reason)

    def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run code of ours: whatever goes wrong in it must not reach the model."""
        try:
            with unseen():
                return function(*args)
        except UnmeasurableError as error:
            self._reports += 1
            self._failed(error)
        except Exception as error:
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        """Tell of an error, and of one in telling it."""
        try:
            if isinstance(error, UnmeasurableError):
                self._sink.unmeasured(str(error))
            else:
                self._sink.failed(error)
        except Exception as another:
            self._sink.broken(another)


def _fits(sighting: Sighting, out: Tensor) -> bool:
    """Tell whether the output of a kernel becomes [B, H, Q, V]."""
    query, value = sighting.call.query, sighting.call.value
    if query is None or value is None:
        return False
    return tuple(sighting.canonical(out.detach()).shape) == (*query.shape[:3], value.shape[-1])
