"""Runs as TensorBoard's data provider has them, read when asked for and kept while nothing was added to them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray
from tensorboard.context import RequestContext
from tensorboard.data import provider

from attn_monitor import views
from attn_monitor.scales import RATIO
from attn_monitor.tags import PLUGIN as NAME

_ALL = 2**31 - 1
"""As many points as there are: the provider wants a number."""
_CACHE_BYTES = 2**30
"""Room for every statistic of a head at 80 layers x 64 heads x 2,000 steps."""
_SCALARS = "scalars"

_Value = TypeVar("_Value")


class Lazy(Mapping[str, _Value]):
    """A mapping with known keys whose values are loaded when looked up."""

    def __init__(self, names: Iterable[str], load: Callable[[str], _Value]) -> None:
        self._names = dict.fromkeys(names)
        self._load = load

    def __getitem__(self, name: str) -> _Value:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Store:
    """Reads runs for one request after another; safe to use from several threads.

    Args:
        data_provider: TensorBoard's.
    """

    def __init__(self, data_provider: provider.DataProvider) -> None:
        self._provider = data_provider
        self._cache: OrderedDict[tuple[str, ...], tuple[object, Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._gates: dict[tuple[str, ...], threading.Lock] = {}

    def names(self, context: RequestContext, experiment: str) -> list[str]:
        """Return the runs that have tables, one name for each stage."""
        listed = self._provider.list_tensors(context, experiment_id=experiment, plugin_name=NAME)
        return [views.run_name(run, prefix) for run in sorted(listed) for prefix in views.stages(listed[run])]

    def run(self, context: RequestContext, experiment: str, name: str) -> views.RunData:
        """Return one of `names`; its tables and scalars are read when they are looked up.

        Raises:
            KeyError: If there is no such run.
        """
        listed = self._provider.list_tensors(context, experiment_id=experiment, plugin_name=NAME)
        places = {views.run_name(run, prefix): (run, prefix) for run in listed for prefix in views.stages(listed[run])}
        directory, prefix = places[name]
        tags = listed[directory]
        tables = {statistic: tag for tag in tags if (statistic := views.statistic_of(tag, prefix))}

        def read(tag: str, convert: Callable[[Sequence[provider.TensorDatum]], _Value]) -> _Value:
            def load() -> _Value:
                data = self._provider.read_tensors(
                    context,
                    experiment_id=experiment,
                    plugin_name=NAME,
                    downsample=_ALL,
                    run_tag_filter=provider.RunTagFilter(runs=[directory], tags=[tag]),
                )
                return convert(data.get(directory, {}).get(tag, ()))

            return self._kept((experiment, directory, tag), (tags[tag].max_step, tags[tag].max_wall_time), load)

        def load_table(statistic: str) -> views.Table:
            return read(tables[statistic], _Dated.of).table

        layers_tag, dims_tag, *told_tags = views.beside_tables(prefix)
        small = {tag: read(tag, _points) for tag in (layers_tag, dims_tag) if tag in tags}
        for tag in filter(tags.__contains__, told_tags):
            main = views.primary(tables)
            times = [] if main is None else read(tables[main], _Dated.of).times
            small[tag] = [
                (step, batch) for step, time, batch in read(tag, _timed) if not _taken_back(step, time, times)
            ]
        ratio = tables.get(RATIO)
        return views.assemble(
            directory,
            small,
            self._scalars(context, experiment, directory),
            threshold=None if ratio is None else views.threshold_of(tags[ratio].plugin_content or b""),
            prefix=prefix,
            tables=Lazy(views.sort_statistics(tables), load_table),
        )

    def _scalars(self, context: RequestContext, experiment: str, run: str) -> Mapping[str, views.Series]:
        only = provider.RunTagFilter(runs=[run])
        listed = self._provider.list_scalars(
            context, experiment_id=experiment, plugin_name=_SCALARS, run_tag_filter=only
        ).get(run, {})

        def load(tag: str) -> views.Series:
            data = self._provider.read_scalars(
                context,
                experiment_id=experiment,
                plugin_name=_SCALARS,
                downsample=_ALL,
                run_tag_filter=provider.RunTagFilter(runs=[run], tags=[tag]),
            )
            return views.series((datum.step, datum.value) for datum in data.get(run, {}).get(tag, ()))

        return Lazy(sorted(filter(views.is_users, listed)), load)

    def _kept(self, key: tuple[str, ...], version: object, load: Callable[[], _Value]) -> _Value:
        """Return what is stored under a key, loaded anew if it is not of this version; once, whoever else wants it."""
        with self._lock:
            gate = self._gates.setdefault(key, threading.Lock())
        with gate:
            with self._lock:
                if key in self._cache and self._cache[key][0] == version:
                    self._cache.move_to_end(key)
                    kept: _Value = self._cache[key][1]
                    return kept
            value = load()
            with self._lock:
                self._cache[key] = (version, value, value.table.values.nbytes if isinstance(value, _Dated) else 0)
                self._cache.move_to_end(key)
                while len(self._cache) > 1 and sum(size for _, _, size in self._cache.values()) > _CACHE_BYTES:
                    self._cache.popitem(last=False)
            return value


class _Dated(NamedTuple):
    """A table and when its steps were written."""

    table: views.Table
    times: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, data: Sequence[provider.TensorDatum]) -> _Dated:
        return cls(views.table(_points(data)), views.settle((datum.step, datum.wall_time) for datum in data))


def _points(data: Sequence[provider.TensorDatum]) -> list[tuple[int, NDArray[Any]]]:
    return [(datum.step, datum.numpy) for datum in data]


def _timed(data: Sequence[provider.TensorDatum]) -> list[tuple[int, float, NDArray[Any]]]:
    return [(datum.step, datum.wall_time, datum.numpy) for datum in data]


def _taken_back(step: int, time: float, times: Sequence[tuple[int, float]]) -> bool:
    """Tell whether a run that went back has written a step anew since: events are rare, and their tag does not show."""
    place = bisect_right(times, step, key=lambda point: point[0]) - 1
    return place >= 0 and times[place][1] > time
