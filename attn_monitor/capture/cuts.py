"""How a distributed tensor (DTensor) is cut, and which part of another one belongs to the part of it that is here.

Nothing here communicates, and nothing computes with a distributed tensor: only its part is looked at, its placements
and its mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture.sighting import UnmeasurableError
from attn_monitor.tensor_parallel import UNEVEN, HeadShard, is_distributed, local_of, part_of_mesh

PARTIAL = "its tensors are partial sums that are still to be added over the processes (DTensor, Partial)"
SEQUENCE = (
    "its {what} are spread over processes (DTensor, Shard({dim})), so that no process sees whole rows with their "
    "places; it is measured where samples or heads are spread"
)
DIFFERENT = (
    "its query, key, value or mask are spread over processes in different ways (DTensor placements {placements})"
)
OF_GRADIENT = "they are spread over the processes in another way than the attention is"


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension of a tensor that is cut in equal parts.

    Attributes:
        dim: The dimension.
        part: The part that is here.
    """

    dim: int
    part: HeadShard


def cuts(tensor: Any) -> tuple[Cut, ...]:
    """Return along which dimensions a distributed tensor is cut.

    Raises:
        UnmeasurableError: If the parts are not equal, hold partial sums, or are none of this process.
    """
    from torch.distributed.tensor import Replicate, Shard

    by_dim: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            by_dim.setdefault(placement.dim % tensor.dim(), []).append(mesh_dim)
        elif not isinstance(placement, Replicate):
            raise UnmeasurableError(PARTIAL if placement.is_partial() else different([tensor]))
    found = []
    for dim, mesh_dims in sorted(by_dim.items()):
        part = part_of_mesh(tensor.device_mesh, mesh_dims)
        if part is None or tensor.shape[dim] % part.count or not tensor.shape[dim]:
            raise UnmeasurableError(UNEVEN)
        if part.count > 1:
            found.append(Cut(dim, part))
    return tuple(found)


def different(tensors: Sequence[Any]) -> str:
    """Return the reason why tensors that are cut in different ways can't be measured together."""
    return DIFFERENT.format(placements=", ".join(str(tuple(x.placements)) for x in tensors if is_distributed(x)))


def local_gradient(wanted: tuple[Cut, ...], shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return what gives the part of a gradient that belongs to the part of a tensor of this shape."""

    def local(gradient: Any) -> Tensor:
        if not is_distributed(gradient):
            return torch.as_tensor(gradient)
        try:
            return aligned(gradient, wanted, shape)
        except UnmeasurableError:
            raise UnmeasurableError(OF_GRADIENT) from None

    return local


def aligned(tensor: Any, wanted: Sequence[Cut], shape: Sequence[int]) -> Tensor:
    """Return the part of a tensor that belongs to the part of another one, of this shape, that it broadcasts to."""
    missing = len(shape) - tensor.dim()
    own = {cut.dim + missing: cut.part for cut in cuts(tensor)} if is_distributed(tensor) else {}
    part = local_of(tensor) if is_distributed(tensor) else tensor
    for cut in wanted:
        dim = cut.dim - missing
        if own.pop(cut.dim, cut.part) != cut.part:
            raise UnmeasurableError(different([tensor]))
        if dim >= 0 and part.shape[dim] not in (1, size := shape[cut.dim] // cut.part.count):
            part = part.narrow(dim, cut.part.index * size, size)
    if own:
        raise UnmeasurableError(different([tensor]))
    return part
