"""Python functions that compute an attention, watched from inside for as long as a probe is attached.

No function mode sees a Python function that ends in an extension, and a name in a module may have been imported by
others long ago. So the code of the function is exchanged, and put back: everybody who holds the function is seen, and
nobody holds anything of ours.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch.overrides import _get_current_function_mode_stack

from attn_monitor.capture.kernels.registry import KERNELS, Adapter


class Watching(Protocol):
    """A function mode that looks at kernels."""

    muted: bool

    def kernel(self, adapter: Adapter, call: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a kernel and report it."""

    def unseen_kernel(
        self, adapter: Adapter, call: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function and report it unless something was seen inside it."""


Undo = Callable[[], None]
_holders: set[Hashable] = set()
_undo: list[Undo] = []
_patches: list[Callable[[], Undo | None]] = []
_originals: dict[str, Callable[..., Any]] = {}
_CODE = """
def relayed(*args, **kwargs):
    from attn_monitor.capture.kernels.relay import call
    return call({path!r}, args, kwargs)
"""


def add_patch(patch: Callable[[], Undo | None]) -> None:
    """Register something else to be put in place with the relays; it returns what takes it away."""
    _patches.append(patch)


def install_relays(holder: Hashable) -> None:
    """Watch every registered function whose module is imported, until each holder has let go."""
    if not _holders:
        _holders.add(holder)
        seen: set[int] = set()
        for path in KERNELS:
            module, _, name = path.partition(":")
            function = getattr(sys.modules.get(module), name, None)
            if function is not None and id(function) not in seen:
                seen.add(id(function))
                _undo.append(_relay(path, sys.modules[module], name, function))
        _undo.extend(undo for patch in _patches if (undo := patch()) is not None)
    _holders.add(holder)


def remove_relays(holder: Hashable) -> None:
    """Let go; the last holder puts everything back. Safe to call twice."""
    _holders.discard(holder)
    if not _holders:
        while _undo:
            _undo.pop()()
        _originals.clear()


def active_modes() -> list[Watching]:
    """Return the modes that watch in this thread now, outermost first."""
    return [mode for mode in _get_current_function_mode_stack() if hasattr(mode, "unseen_kernel") and not mode.muted]


def call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function that was called, and have it looked at."""
    original = run = _originals[path]
    for mode in active_modes():
        run = functools.partial(mode.kernel, KERNELS[path], run, original)
    return run(*args, **kwargs)


def _relay(path: str, module: types.ModuleType, name: str, function: Any) -> Undo:
    if not isinstance(function, types.FunctionType):  # an extension's own function: only its name can be exchanged
        _originals[path] = function
        replacement = functools.wraps(function)(lambda *args, **kwargs: call(path, args, kwargs))
        setattr(module, name, replacement)
        return lambda: setattr(module, name, function)
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    original.__dict__.update(function.__dict__)
    _originals[path] = original
    scope: dict[str, Any] = {}
    exec(compile(_CODE.format(path=path), __file__, "exec"), scope)
    code = scope["relayed"].__code__.replace(co_freevars=function.__code__.co_freevars, co_name=function.__name__)
    told = vars(function).get("__signature__")
    # Who asks for the signature meanwhile, and remembers it, must hear the truth.
    described: Any = function  # a function type has no such attribute; inspect looks for it all the same
    described.__signature__ = inspect.signature(function)
    before, function.__code__ = function.__code__, code

    def undo() -> None:
        function.__code__ = before
        if told is None:
            del described.__signature__
        else:
            described.__signature__ = told

    return undo
