"""Small things wait until they are worth working on together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")


class WaitingQueue(Generic[KeyT, ItemT, FoundT]):
    """Keeps items until they are worth working on together.

    Args:
        work: Returns what becomes of several items, in their order.
        deliver: Takes the key of an item, and what became of it.
        failed: Takes the key of an item, and the error if nothing becomes of it.
        most: How large all that waits may be.
    """

    def __init__(
        self,
        work: Callable[[Sequence[ItemT]], Sequence[FoundT]],
        deliver: Callable[[KeyT, FoundT], None],
        failed: Callable[[KeyT, Exception], None],
        most: int,
    ) -> None:
        self._work = work
        self._deliver = deliver
        self._failed = failed
        self._most = most
        self._waiting: list[tuple[KeyT, ItemT]] = []
        self._size = 0
        # Held while it works: who asks for what is being worked on waits for it.
        self._lock = threading.RLock()

    def put(self, key: KeyT, item: ItemT, size: int) -> None:
        """Take an item."""
        with self._lock:
            self._waiting.append((key, item))
            self._size += size
            if self._size > self._most:
                self.empty()

    def empty(self) -> None:
        """Work on all that waits, and deliver it."""
        with self._lock:
            waiting, self._waiting, self._size = self._waiting, [], 0
            if not waiting:
                return
            try:
                found = self._work([item for _, item in waiting])
            except Exception:  # which of them it was will show
                found = []
            for number, (key, item) in enumerate(waiting):
                self._hand_over(key, item, found[number : number + 1])

    def clear(self) -> None:
        """Forget what waits."""
        with self._lock:
            self._waiting, self._size = [], 0

    def _hand_over(self, key: KeyT, item: ItemT, found: Sequence[FoundT]) -> None:
        try:
            [result] = found or self._work([item])
            self._deliver(key, result)
        except Exception as error:
            self._failed(key, error)
