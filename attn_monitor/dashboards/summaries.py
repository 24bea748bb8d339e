"""Values of TensorBoard's event files, with the metadata that lets every one of its readers show their descriptions.

Old-style values (`simple_value`, `image`, `histo`) are what most readers of event files understand. With a data class
in their metadata TensorBoard's fast data server keeps the description too, which it drops otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_monitor.tags import PLUGIN

FORMAT_VERSION = 1
"""The version of the per-head tensors."""
Description = str | Callable[[], str]
"""A text, or how to make it: it is needed for the first event of a tag only."""
_BUCKETS = 30  # as many as TensorBoard shows


class Summaries:
    """Collects the values of one step.

    The first event of a tag decides what TensorBoard knows about it, so later ones come without metadata.

    Args:
        described: The tags that have been described before; those of this step are added.
        prefix: Stands before every tag.
    """

    def __init__(self, described: set[str], prefix: str = "") -> None:
        from tensorboard.compat.proto import summary_pb2

        self._proto: Any = summary_pb2
        self._described = described
        self._prefix = prefix
        self.values: list[Any] = []

    def proto(self) -> Any:
        """Return all of it as one message."""
        return self._proto.Summary(value=self.values)

    def scalar(self, tag: str, value: float, description: Description) -> None:
        """Add a number."""
        self._add(tag, "scalars", self._proto.DATA_CLASS_SCALAR, description, simple_value=value)

    def image(self, tag: str, png: bytes, size: tuple[int, int], description: Description) -> None:
        """Add a PNG file of a height and width."""
        image = self._proto.Summary.Image(height=size[0], width=size[1], colorspace=3, encoded_image_string=png)
        self._add(tag, "images", self._proto.DATA_CLASS_BLOB_SEQUENCE, description, image=image)

    def histogram(self, tag: str, values: NDArray[np.floating], description: Description) -> None:
        """Add the distribution of some finite values; none of no values."""
        buckets = bucketed(values)
        if buckets is not None:
            self._add(
                tag,
                "histograms",
                self._proto.DATA_CLASS_TENSOR,
                description,
                histo=self._proto.HistogramProto(**buckets),
            )

    def text(self, tag: str, markdown: str, description: Description) -> None:
        """Add a page of Markdown."""
        tag = f"{tag}/text_summary"  # as SummaryWriter.add_text calls it
        tensor = _strings([markdown], [1])
        self._add(tag, "text", self._proto.DATA_CLASS_TENSOR, description, tensor=tensor)

    def table(
        self, tag: str, array: NDArray[np.float32], kind: str, description: Description, **content: object
    ) -> None:
        """Add an array for the Attention tab."""
        self._add_own(tag, kind, description, content, _tensor(array.shape, "DT_FLOAT", tensor_content=array.tobytes()))

    def strings(self, tag: str, texts: Sequence[str], kind: str, description: Description) -> None:
        """Add a vector of strings for the Attention tab."""
        self._add_own(tag, kind, description, {}, _strings(texts, [len(texts)]))

    def _add_own(
        self, tag: str, kind: str, description: Description, content: Mapping[str, object], tensor: Any
    ) -> None:
        packed = json.dumps({"version": FORMAT_VERSION, "kind": kind, **content}).encode()
        # Without a data class TensorBoard serves the tag to nobody.
        self._add(tag, PLUGIN, self._proto.DATA_CLASS_TENSOR, description, content=packed, tensor=tensor)

    def _add(
        self, tag: str, plugin: str, data_class: int, description: Description, content: bytes = b"", **value: Any
    ) -> None:
        tag = f"{self._prefix}{tag}"
        made = self._proto.Summary.Value(tag=tag, **value)
        if tag not in self._described:
            self._described.add(tag)
            made.metadata.summary_description = description() if callable(description) else description
            made.metadata.plugin_data.plugin_name = plugin
            made.metadata.plugin_data.content = content
            made.metadata.data_class = data_class
        self.values.append(made)


def bucketed(values: NDArray[np.floating]) -> dict[str, Any] | None:
    """Return the finite values as the fields of a histogram, in buckets of equal width; `None` for none."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        limits, counts = [high], [float(finite.size)]
    else:
        edges = np.linspace(low, high, _BUCKETS + 1)
        places = np.minimum((finite - low) / (high - low) * _BUCKETS, _BUCKETS - 1).astype(np.int64)
        limits, counts = edges[1:].tolist(), np.bincount(places, minlength=_BUCKETS).astype(np.float64).tolist()
    return {
        "min": low,
        "max": high,
        "num": float(finite.size),
        "sum": float(finite.sum()),
        "sum_squares": float(np.square(finite).sum()),
        "bucket_limit": limits,
        "bucket": counts,
    }


def _strings(texts: Sequence[str], shape: Sequence[int]) -> Any:
    return _tensor(shape, "DT_STRING", string_val=[text.encode(errors="replace") for text in texts])


def _tensor(shape: Sequence[int], kind: str, **content: Any) -> Any:
    from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2

    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in shape]
    return tensor_pb2.TensorProto(dtype=kind, tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=dims), **content)
