"""Memory for tiles, used again for every tile of every call: fresh pages cost more than the arithmetic in them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_MOST_SHRINK = 64
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class Workspace:
    """A few tiles of one dtype on one device.

    Args:
        device: Where it is.
        dtype: Of its tensors.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._memory: dict[int, Tensor] = {}

    def take(self, number: int, shape: Sequence[int]) -> Tensor:
        """Return one of the tiles in some shape; whatever it held is lost."""
        size = math.prod(shape)
        memory = self._memory.get(number)
        if memory is None or len(memory) < size:
            self._memory.pop(number, None)  # so that old and new are never there together
            with torch.inference_mode(False):  # or nothing could be written to it after inference mode
                memory = self._memory[number] = torch.empty(size, device=self._device, dtype=self._dtype)
        return memory[:size].view(tuple(shape))

    def second(self, like: Tensor) -> Tensor:
        """Return the second tile in the shape of another."""
        return self.take(2, like.shape)

    def third(self, like: Tensor) -> Tensor:
        """Return the third tile in the shape of another."""
        return self.take(3, like.shape)


class Workspaces:
    """The workspaces of an observed step, made when they are needed.

    Threads do not share one: a backward pass runs in threads of its own.

    Example:
        >>> import torch
        >>> spaces = Workspaces()
        >>> work = spaces.at(torch.device("cpu"), torch.float32)
        >>> work is spaces.at(torch.device("cpu"), torch.float32)
        True
    """

    def __init__(self) -> None:
        self._spaces: dict[tuple[torch.device, torch.dtype, int], Workspace] = {}

    def at(self, device: torch.device, dtype: torch.dtype) -> Workspace:
        """Return this thread's workspace on a device."""
        place = device, dtype, threading.get_ident()
        space = self._spaces.get(place)
        return space or self._spaces.setdefault(place, Workspace(device, dtype))

    def fitting(self, compute: Callable[[int], T]) -> T:
        """Return what a computation returns, with tiles that fit.

        Args:
            compute: Takes by how much tiles are to be made smaller. It is tried again with half the size each time that
                memory runs out.
        """
        shrink = 1
        while True:
            try:
                return compute(shrink)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error) or shrink >= _MOST_SHRINK:
                    raise
            shrink *= 2
            self.clear()

    def clear(self) -> None:
        """Give the memory back."""
        self._spaces.clear()


def _is_out_of_memory(error: Exception) -> bool:
    """Tell memory that has run out from other errors; on a CPU only the text does."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)
