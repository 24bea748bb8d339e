"""Which of a layer's heads this process has, where tensor parallelism spreads them over several."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attn_monitor.records import AttentionCall

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ONLY_SOME = "heads of tensor-parallel rank {index} of {count} only"
UNEVEN = (
    "its heads are spread unevenly over the tensor-parallel ranks, so that their places are not known; choose a number "
    "of ranks that divides the number of heads"
)
UNPLACED = (
    "its module has weights that are spread over processes, and nothing tells whether its heads are: keep the "
    "projection of its queries, the splitting into heads and the attention in one forward pass without functions of "
    "your own around them"
)


_COMMUNICATION = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor"})


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The part of a layer's heads that is in this process: of `count` equal parts the one number `index`.

    Attributes:
        index: Which part; local head h is head `index * local heads + h` of the layer.
        count: How many parts there are.
        ranks: The global ranks that have the parts, in their order.

    Example:
        >>> HeadShard(index=1, count=2, ranks=(2, 3)).place(4)
        slice(4, 8, None)
    """

    index: int
    count: int
    ranks: tuple[int, ...]

    def place(self, heads: int) -> slice:
        """Return where the heads of this process are among all of the layer.

        Args:
            heads: How many this process has.
        """
        return slice(self.index * heads, (self.index + 1) * heads)

    @property
    def note(self) -> str:
        """What to know about a record that holds this part alone."""
        return ONLY_SOME.format(index=self.index, count=self.count)


class Placed(Protocol):
    """A call, and what is known of where its heads belong."""

    @property
    def call(self) -> AttentionCall:
        """The call."""

    @property
    def shard(self) -> HeadShard | None:
        """Which part of the heads it has."""

    @property
    def placed(self) -> bool:
        """Whether that is known."""


class HeadPlaces:
    """Which heads the records of a model have.

    Attributes:
        parts: The part of each record, `None` where it has all heads.
    """

    def __init__(self) -> None:
        self.parts: dict[str, HeadShard | None] = {}
        # Kept: later, fewer modules are known to run than in the first step.
        self._by_weights: dict[str, HeadShard | str | None] = {}

    def misplaced(self, record: str, seen: Placed, modules: Sequence[nn.Module]) -> str:
        """Note which heads a call has.

        Args:
            record: Its record.
            seen: The call.
            modules: The running modules, outermost first.

        Returns:
            Why its heads have no place, empty if they have.
        """
        part: HeadShard | str | None = seen.shard
        if not seen.placed and dtensor_type() is not None:
            if record not in self._by_weights:
                self._by_weights[record] = shard_of_weights(modules, seen.call)
            part = self._by_weights[record]
        if isinstance(part, str):
            return part
        return "" if self.parts.setdefault(record, part) == part else UNPLACED


def dtensor_type() -> type[DTensor] | None:
    """Return the class of distributed tensors, `None` while nobody has imported it: it takes long to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_distributed(tensor: object) -> bool:
    """Tell whether a tensor is a distributed one."""
    # By type first: this is asked for the results of all functions that are followed.
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter or not isinstance(tensor, Tensor):
        return False
    distributed = dtensor_type()
    return distributed is not None and isinstance(tensor, distributed)


def part_of_mesh(mesh: Any, dims: Sequence[int]) -> HeadShard | None:
    """Return the part that a process has of what is cut along some dimensions of a mesh, `None` where it has none.

    Args:
        mesh: The device mesh.
        dims: The dimensions, in the order in which they cut.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    index = 0
    for dim in dims:
        index = index * mesh.size(dim) + coordinate[dim]
    own = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))
    kept = sorted(dims)
    ranks = mesh.mesh[own].permute([kept.index(dim) for dim in dims]).flatten().tolist()
    return HeadShard(index, math.prod(mesh.size(dim) for dim in dims), tuple(ranks))


def shard_of_weights(modules: Sequence[nn.Module], call: AttentionCall) -> HeadShard | str | None:
    """Return which heads there are by the weights of the module that has them, for want of better evidence.

    Args:
        modules: The running modules, outermost first; the innermost with weights is asked.
        call: An attention in it.

    Returns:
        The part; `None` where they are all; the reason where the weights do not tell.
    """
    module = next((module for module in reversed(modules) if next(module.parameters(), None) is not None), None)
    weights = [] if module is None else list(_matrices(module))
    heads, groups = call.shape.heads, call.shape.heads if call.key is None else call.key.shape[1]
    depth = call.head_dim if call.query is None else call.query.shape[-1]
    of_no_head = depth is None and heads == 1  # logits that were shown
    if of_no_head or not any(map(is_distributed, weights)):
        return None
    here: dict[int, set[HeadShard | str]] = {}
    for weight in weights:
        if is_distributed(weight) and (dims := _cut_rows(weight)):
            shard, rows = part_of_mesh(weight.device_mesh, dims), weight._local_tensor.shape[0]
            if shard is not None:
                even = rows * shard.count == weight.shape[0]
                here.setdefault(rows, set()).add(shard if even else UNEVEN)
    everywhere = {weight.shape[0] for weight in weights}
    query, key = (number * (depth or 0) for number in (heads, groups))
    # Queries and keys by a weight each, or side by side in one, with the values or without.
    for first, *others in ((query, key), (query + 2 * key,), (query + key,)):
        shards = here.get(first, set()) if everywhere.union(here).issuperset(others) else set()
        found = [*shards, *([None] if everywhere.issuperset((first, *others)) else [])]
        if found:
            return found[0] if len(found) == 1 else UNPLACED
    return UNPLACED


def _matrices(module: nn.Module) -> Iterator[Any]:
    """Yield the matrices of a module that are as its forward pass sees them: those FSDP has put away again are not."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    away: set[nn.Module] = set()
    for inner in module.modules():
        if fsdp is not None and inner is not module and isinstance(inner, fsdp):
            away.update(inner.modules())
        if inner not in away:
            yield from (weight for weight in inner._parameters.values() if weight is not None and weight.dim() == 2)


def _cut_rows(weight: Any) -> list[int]:
    """Return the dimensions of the mesh along which the rows of a weight are cut, none if it is cut otherwise too."""
    from torch.distributed.tensor import Replicate, Shard

    cut = [dim for dim, placement in enumerate(weight.placements) if not isinstance(placement, Replicate)]
    plain = all(type(weight.placements[dim]) is Shard and weight.placements[dim].dim == 0 for dim in cut)
    return cut if plain else []


def local_of(tensor: Any) -> Tensor:
    """Return the part of a distributed tensor that is in this process. It starts no communication."""
    local: Tensor = tensor._local_tensor
    wait = getattr(local, "trigger_wait", None)  # what is still on its way was asked for by the model itself
    if wait is not None:
        waited: Tensor = wait()
        return waited
    return local


class NoCommunication(TorchDispatchMode):
    """A mode in which starting to communicate raises: operations of ours must never wait for other processes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation unless it is a collective."""
        distributed = dtensor_type()
        # A distributed tensor turns into operations on its part first, and into communication between them.
        if distributed is not None and any(issubclass(kind, distributed) for kind in types):
            return NotImplemented
        if func.namespace in _COMMUNICATION and "wait_tensor" not in func.name():
            raise RuntimeError(f"it would take communication between processes ({func.name()})")
        return func(*args, **(kwargs or {}))
