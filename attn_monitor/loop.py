"""What the monitor needs of the training loop it serves, whoever runs that loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_monitor.ranks import RankReduction


class Loop(Protocol):
    """A training loop: what is known of it, and what may be asked of it.

    Attributes:
        without_loggers: What to say where there are no loggers.
    """

    without_loggers: str

    @property
    def step(self) -> int:
        """The x value of what is logged now: the optimizer steps finished before this one."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the one that speaks and writes."""

    @property
    def loggers(self) -> Sequence[Any]:
        """Where numbers go: Lightning's loggers, or what has their methods."""

    @property
    def callbacks(self) -> Sequence[Any]:
        """The callbacks of the loop, this monitor's among them."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The live dictionary of the latest values, for whoever stops or saves by one."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers."""

    @property
    def root_directory(self) -> str:
        """Where to write what no logger has a folder for; may be an address. No rank waits for another."""

    @property
    def writes_nothing(self) -> bool:
        """Whether the loop is only tried out, so that no file is to be left."""

    @property
    def should_stop(self) -> bool:
        """Whether the training was asked to end."""

    def stop(self) -> str:
        """Ask the training to end after this step, and name what keeps it from that, empty if nothing does."""

    def save_checkpoint(self, name: str) -> str:
        """Save the training as it is and return where; every rank has to ask."""

    def call(self, action: Callable[[Any, Any, Any], None], model: Any, events: Any) -> None:
        """Call a function of the user's with what runs the loop, the model and events.

        Raises:
            UsersError: With what it raised.
        """

    def any_rank(self, flag: bool) -> bool:
        """Tell whether a flag is up on any rank; every rank has to ask."""

    def rank_reduction(self) -> RankReduction | None:
        """Return what pools the records of all processes, `None` on a single one."""
