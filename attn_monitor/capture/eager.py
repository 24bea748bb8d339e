"""Compiled code runs eagerly while it is watched: hooks do not reach inside a compiled graph."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_holders: set[object] = set()
_stances: list[Any] = []


def hold_eager(holder: object) -> None:
    """Run compiled code eagerly until every holder has let go; nothing is compiled again afterwards."""
    if not _holders:
        # Without dynamo nothing can be compiled, and importing it takes seconds.
        if _COMPILER in sys.modules:
            _stances.append(torch.compiler.set_stance("force_eager"))
        else:
            sys.meta_path.insert(0, _arrival)
    _holders.add(holder)


def release_eager(holder: object) -> None:
    """Let go; the last holder brings back the stance there was before, which may be the user's own."""
    _holders.discard(holder)
    if not _holders:
        _arrival.leave()
        if _stances:
            _stances.pop().__exit__(None, None, None)


class _Arrival(MetaPathFinder):
    """Notices the first import of dynamo: a forward may compile something, or call `flex_attention`, which does.

    It is asked for modules that are not imported yet, and only while something is watched.
    """

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Have dynamo found by whoever finds it, and be told when it is there; find nothing else."""
        if fullname != _COMPILER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        with suppress(Exception):  # the import is the model's: it goes on whatever fails here
            if spec is not None:
                self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Act once the loader has run the module."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # it is itself again
            run(module)
            self.leave()
            with suppress(Exception):
                _hold_now()

        loader.exec_module = exec_module

    def leave(self) -> None:
        """Be asked no more. Safe to call twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _hold_now() -> None:
    """Run compiled code eagerly from now on if anything is watched."""
    if _holders and not _stances:
        _stances.append(torch.compiler.set_stance("force_eager"))


_arrival = _Arrival()
