"""Hooks that tell which module is running, and that keep the function mode active while one is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from attn_monitor.capture.hooks import Hook, nothing


def in_backward() -> bool:
    """Tell whether this thread is executing a backward pass: a forward seen now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class WatchingMode(TorchFunctionMode):
    """A function mode that is told which tensors the running modules have."""

    def starts(self, tensors: Iterable[Tensor]) -> None:
        """Take note of the tensors a module has that starts to run."""


class _Running(threading.local):
    """The modules running in this thread, outermost first, each with whether it brought the mode."""

    def __init__(self) -> None:
        self.frames: list[tuple[nn.Module, bool]] = []


class _Hook(Hook):
    """A hook that is told the module alone, and that does not raise."""

    __slots__ = ("failed",)

    def __init__(self, function: Callable[[nn.Module], None], failed: Callable[[Exception], None]) -> None:
        super().__init__(function)
        self.failed = failed

    def __call__(self, module: nn.Module, *_: Any) -> None:
        try:
            self.function(module)
        except Exception as error:  # of ours, and not the model's
            self.failed(error)


class _EntryPoint:
    """A method such as `training_step`, wrapped for as long as the hooks are attached.

    Args:
        tracker: Is told when the method starts and ends.
        root: The module whose method it is.
        name: The name of the method.
    """

    def __init__(self, tracker: ModuleTracker, root: nn.Module, name: str) -> None:
        self.tracker, self.root = tracker, root
        self.own = name in vars(root)
        self.method: Callable[..., Any] = getattr(root, name)
        self.__name__ = name
        self.__wrapped__ = self.method
        object.__setattr__(root, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_entry_point(args, kwargs)

    def call_entry_point(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        enter, leave = self.tracker.hooks(self.tracker.enter)
        enter(self.root)
        try:
            return self.method(*args, **kwargs)
        finally:
            leave(self.root)

    def remove(self) -> None:
        """Take the wrapper away, also from under one that another monitor put on top of it."""
        outer = vars(self.root).get(self.__name__)
        if outer is self:
            if self.own:
                object.__setattr__(self.root, self.__name__, self.method)
            else:
                vars(self.root).pop(self.__name__, None)
        while isinstance(outer, _EntryPoint):
            if outer.method is self:
                outer.method, outer.own = self.method, self.own
                return
            outer = outer.method

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.method, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.root, self.__name__)


class _Aside(_EntryPoint):
    """The forward of a module that runs without the mode."""

    def call_entry_point(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.tracker.paused():
            return self.method(*args, **kwargs)


_INFERENCE_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
LEFT_ALONE = (
    "is in eval mode inside a model that trains: torch's fast path for inference is left alone, since being watched "
    "would switch it off and change its outputs"
)


def left_alone(root: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose fast path for inference a training step may take (a frozen teacher)."""
    if not root.training:
        return []
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, _INFERENCE_PATHS) and not module.training and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _parts(root: nn.Module, hooked: Collection[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return, for each hooked module, itself and what is inside it and not hooked, as far as it may have tensors."""
    parts: dict[nn.Module, list[nn.Module]] = {module: [] for module in hooked}
    seen: set[nn.Module] = set()

    def collect(module: nn.Module, outer: nn.Module) -> None:
        if module in seen or isinstance(module, torch.jit.ScriptModule):
            return
        seen.add(module)
        outer = module if module in parts else outer
        if module._parameters or module._buffers:
            parts[outer].append(module)
        for child in module.children():
            collect(child, outer)

    collect(root, root)
    return parts


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return what a module has for weights and is no parameter: buffers, and what takes a parameter's place.

    `torch.func.functional_call` puts plain tensors where the parameters were, and sharded modules of torch keep views.
    """
    found = [tensor for tensor in module._buffers.values() if tensor is not None]
    own = vars(module)
    plain = (*module._parameters.values(), own.get("weight"), own.get("bias"))
    # Asked by type: to ask whether something is a parameter is slow, and this is asked for every parameter there is.
    return found + [tensor for tensor in plain if type(tensor) is Tensor]


class ModuleTracker:
    """Knows the running modules, and enters the mode with the outermost one.

    Args:
        mode: The function mode that sees the calls.
        on_start: Called when an outermost module starts outside the backward pass.
        on_error: Called with an error of ours, after which nothing more is seen of this forward pass.
    """

    def __init__(
        self, mode: WatchingMode, on_start: Callable[[], None], on_error: Callable[[Exception], None] = nothing
    ) -> None:
        self._mode: TorchFunctionMode = mode
        self._starts = mode.starts
        self._on_start = on_start
        self._on_error = on_error
        self._running = _Running()
        self._handles: list[RemovableHandle] = []
        self._entry_points: list[_EntryPoint] = []
        self._parts: dict[nn.Module, list[nn.Module]] = {}
        self.called: set[nn.Module] = set()
        self.entered: set[nn.Module] = set()
        self.refused: dict[nn.Module, str] = {}

    def attach(self, modules: Iterable[nn.Module], root: nn.Module, methods: Iterable[str] = ()) -> None:
        """Hook the modules, and wrap methods of the root that are not module calls."""
        self.refused.clear()
        aside = left_alone(root)
        untouched = {inner for module in aside for inner in module.modules()}
        for module in aside:
            self.refused[module] = LEFT_ALONE
            self._entry_points.append(_Aside(self, module, "forward"))
        modules = [module for module in modules if module not in untouched]
        self._parts = _parts(root, {root, *modules})
        enter, leave = self.hooks(self._enter_called)
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.refused[module] = "compiled by torch.jit, which accepts no hooks; watch it before it is compiled"
                continue
            # Ahead of the user's hooks, so that what they do is already seen; always, so that an exception in the
            # forward does not leave the mode behind.
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        for name in methods:
            self._entry_points.append(_EntryPoint(self, root, name))

    def detach(self) -> None:
        """Remove every hook, wrapper and mode; safe to call at any time, also twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for entry_point in self._entry_points:
            entry_point.remove()
        self._entry_points.clear()
        self._parts.clear()
        self._running.frames.clear()
        self._leave_mode()
        self.called.clear()
        self.entered.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the mode away for as long as something runs."""
        active = False
        try:
            active = self._mode in _get_current_function_mode_stack()
            self._leave_mode()
        except Exception as error:
            self._give_up(error)
        try:
            yield
        finally:
            if active:
                self._mode.__enter__()

    def owner(self) -> nn.Module | None:
        """Return the innermost running module."""
        return self._running.frames[-1][0] if self._running.frames else None

    def stack(self) -> list[nn.Module]:
        """Return the running modules, outermost first."""
        return [module for module, _ in self._running.frames]

    def hooks(self, enter: Callable[[nn.Module], None]) -> tuple[_Hook, _Hook]:
        """Return what is called before and after a module, none of which raises."""
        return _Hook(enter, self._give_up), _Hook(self.leave, self._give_up)

    def _give_up(self, error: Exception) -> None:
        """See nothing more of this forward pass, since it is no longer known what runs."""
        try:
            self._running.frames.clear()
            self._leave_mode()
        finally:
            self._on_error(error)

    def _enter_called(self, module: nn.Module) -> None:
        self.called.add(module)
        self.enter(module)

    def enter(self, module: nn.Module) -> None:
        """Note that a module starts."""
        self.entered.add(module)
        if not self._running.frames and not in_backward():
            self._on_start()
        # Asked of torch and not remembered: torch takes the mode away while a backward pass runs, and a forward
        # recomputed in there needs it again.
        brings_mode = self._mode not in _get_current_function_mode_stack()
        if brings_mode:
            self._mode.__enter__()
        self._running.frames.append((module, brings_mode))
        if tensors := [tensor for part in self._parts.get(module, ()) for tensor in _tensors(part)]:
            self._starts(tensors)

    def leave(self, module: nn.Module) -> None:
        """Note that a module ended, and with it whatever inside it was interrupted."""
        frames = self._running.frames
        innermost = bool(frames) and frames[-1][0] is module
        if not innermost and not any(running is module for running, _ in frames):
            return
        while frames:
            running, brought_mode = frames.pop()
            if brought_mode:
                self._leave_mode()
            if running is module:
                return

    def _leave_mode(self) -> None:
        """Take the mode off the stack wherever it is; modes of others above it stay."""
        modes = _get_current_function_mode_stack()
        if self._mode not in modes:
            return
        above: list[TorchFunctionMode] = []
        while (top := _get_current_function_mode_stack()[-1]) is not self._mode:
            torch._C._pop_torch_function_stack()
            above.append(top)
        torch._C._pop_torch_function_stack()
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)
