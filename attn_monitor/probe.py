"""The probe: watch the attention of any torch model, for as long as one wants to."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from attn_monitor.capture.coverage import is_within
from attn_monitor.capture.eager import hold_eager, release_eager
from attn_monitor.capture.kernels.relay import install_relays, remove_relays
from attn_monitor.capture.mode import CaptureMode
from attn_monitor.capture.naming import Selection, canonical_names, is_selected
from attn_monitor.capture.observe import unwatch, watch
from attn_monitor.capture.ownership import ModuleTracker
from attn_monitor.capture.selection import checked_selection, select_modules
from attn_monitor.catalog import resolve_statistics
from attn_monitor.collector import Collector
from attn_monitor.looks import GradScale
from attn_monitor.metric import AttentionMetric
from attn_monitor.phrases import error_line
from attn_monitor.ranks import RankReduction, Record, Seen
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.settings import check_flag, check_max_queries

NOTHING_CALLED = (
    "only parts of it were called, and no attention in them; call the module itself, not its forward method, which "
    "runs without hooks"
)


class LayerStatistics(dict[str, AttentionStatistics]):
    """Statistics by layer. The root module, whose own name is empty, is shown by its class name and found by both.

    Args:
        root: The class name of the root.
        statistics: The statistics.
    """

    def __init__(self, root: str, statistics: Mapping[str, AttentionStatistics]) -> None:
        super().__init__(statistics)
        self.root = root

    def __missing__(self, key: str) -> AttentionStatistics:
        if self._alias(key) in self.keys():
            return self[self._alias(key)]
        raise KeyError(f"no attention was measured in {key!r}; measured: {', '.join(self) or 'none'}")

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and super().__contains__(self._alias(key)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, dict(self))

    def _alias(self, key: str) -> str:
        return self.root + key if not key or key[0] in "#@" else key


class AttentionProbe:
    """Measures every attention of a model while it is attached.

    As a context manager it is attached inside the block. It finds attention by what the model does, not by class
    names: `F.scaled_dot_product_attention`, and every softmax over the product of two activations. The model's
    results, gradients and random numbers stay the same to the bit.

    Args:
        model: Any module. Compiled parts run eagerly while the probe is attached.
        modules: Which modules' attention to measure: a name, a glob, a module type, a predicate `(name, module) ->
            bool`, or a list of these; each selects the attention inside it too. `None`: all that is found.
        statistics: Names from the table of statistics, `None` for all.
        max_queries: Look at that many query rows of a call, one at random from each of as many stretches; the
            statistics are then estimates with a `standard_error`, and the extrema absent. `None`: all rows, exact.
        gradients: Whether to measure the gradients in the backward pass.
        per_call: Whether a module that is called several times in one forward gets a record for each, `name@0`, ...
        grad_scale: What gradients are divided by: the loss scale, a number or a callable that is read in the
            backward pass.

    Gradients are measured where the backward pass runs while the probe is attached, so inside the block.

    Attributes:
        skipped: Attention that is not measured, with the reason and what to do: what was seen and cannot be measured,
            and modules that are named like attention, ran, and in which none was seen.
        notes: What to know about records that were measured.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a statistic is unknown, a number is not positive, or (on attaching) no module matches.

    Example:
        >>> import torch
        >>> from attn_monitor import AttentionProbe
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> with AttentionProbe(model) as probe:
        ...     model(torch.randn(3, 5, 16)).sum().backward()
        >>> statistics = probe.compute()
        >>> list(statistics), tuple(statistics["self_attn"].logit_std.shape)
        (['self_attn'], (2,))
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Selection = None,
        statistics: Iterable[str] | None = None,
        max_queries: int | None = None,
        gradients: bool = True,
        per_call: bool = False,
        grad_scale: GradScale = 1.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"AttentionProbe expects a torch.nn.Module, got {type(model).__name__}.")
        modules = checked_selection(modules)
        check_max_queries(max_queries)
        check_flag("gradients", gradients)
        check_flag("per_call", per_call)
        _check_grad_scale(grad_scale)
        self._model = model
        self._modules = modules
        self._statistics = resolve_statistics(statistics)
        self._collector = Collector(
            self._statistics,
            max_queries=max_queries,
            gradients=gradients,
            per_call=per_call,
            grad_scale=grad_scale,
        )
        self._placement = self._collector.placement
        self._mode = CaptureMode(self._collector)
        self._tracker = ModuleTracker(self._mode, self._collector.start, self._collector.broken)
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._refused: dict[str, str] = {}
        self._unseen: dict[str, str] = {}
        self._of_all_ranks: Record | None = None
        self._attached = False
        self._idle = False

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:  # what was interrupted has shown nothing yet: discover it anew
            self._tracker.called.clear()
            self._called.clear()
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self._attached else "detached"
        return f"AttentionProbe({type(self._model).__name__}, {state}, {len(self._collector.sums)} records)"

    @property
    def skipped(self) -> Mapping[str, str]:
        """Attention that is not measured, with the reason."""
        if self._of_all_ranks is None:
            return {**self._refused, **self._unseen, **self._collector.skipped}
        measured = self._of_all_ranks.statistics
        unseen = {name: reason for name, reason in self._unseen.items() if name not in measured}  # here, but elsewhere
        return {**self._of_all_ranks.skipped, **self._refused, **unseen, **self._collector.skipped}

    @property
    def notes(self) -> Mapping[str, str]:
        """What to know about the numbers of a record."""
        of_all = self._of_all_ranks.notes if self._of_all_ranks is not None else {}
        return {**of_all, **({self._root_name(): NOTHING_CALLED} if self._idle else {}), **self._collector.notes}

    @property
    def owners(self) -> tuple[str, ...]:
        """The names of the modules in which attention was found, also of those that are not selected."""
        return (*self._placement.owners, *sorted(self._placement.unselected))

    @property
    def paths(self) -> Mapping[str, str]:
        """By what the attention of a record is computed: `softmax`, `sdpa`, the name of a kernel, `observed`."""
        return dict(self._collector.paths)

    def owner(self, record: str) -> nn.Module | None:
        """Return the module a record belongs to; `None` for what the user showed.

        Args:
            record: The name of the record.
        """
        return self._placement.owners.get(record.partition("@")[0].partition("#")[0])

    def show_calls(self, to: Callable[[str | None, AttentionCall], None] | None) -> None:
        """Have every call shown with its record, in the forward pass; `None` ends that.

        Args:
            to: Takes the name of the record, `None` for a call that gets none, and the call. Must not raise.
        """
        self._collector.on_call = to

    def check_modules(self) -> None:
        """Check that the selection of modules matches some of the model's.

        Raises:
            ValueError: If it matches none.
        """
        select_modules(self._modules, canonical_names(self._model))

    def attach(self, methods: Iterable[str] = ()) -> None:
        """Start to watch.

        All modules are hooked until each has been called once; later only those that own attention.

        Args:
            methods: Methods of the model that are entered without calling it as a module, such as `training_step`.

        Raises:
            ValueError: If no module matches the selection.
        """
        if self._attached:
            return
        names = canonical_names(self._model)
        selected = select_modules(self._modules, names)
        places = self._placement.places
        if self._placement.missed:
            self._called.clear()
        hooked = [module for module in names if module is self._model or module in places or module not in self._called]
        self._placement.missed = False
        explored = set(self._called)
        self._placement.begin(self._tracker.stack, names, selected, self._root_name(), explored=explored)
        self._collector.begin()
        self._attached = True
        try:
            hold_eager(self)
            install_relays(self)
            self._tracker.attach(hooked, self._model, methods)
            watch(self._collector)
        except BaseException:
            self.detach()
            raise
        refused = {names[module]: reason for module, reason in self._tracker.refused.items()}
        self._refused = {name or self._root_name(): refused[name] for name in _outermost(refused, selected)}

    def detach(self) -> None:
        """Stop to watch and leave nothing behind; what was collected stays. Safe to call twice."""
        if not self._attached:
            return
        entered = self._tracker.entered
        self._idle = bool(entered) and self._model not in entered | set(self._called) and not self._collector.sums
        news = not self._tracker.called <= set(self._called)
        self._called.update(self._tracker.called)
        with ExitStack() as undo:  # each of them, whatever interrupts another; last in, first out
            undo.callback(release_eager, self)
            undo.callback(remove_relays, self)
            undo.callback(self._mode.tags.clear)
            undo.callback(self._collector.end)
            undo.callback(self._tracker.detach)
            undo.callback(unwatch, self._collector)
        self._attached = False  # not before: what an interrupt kept from being undone is left to the next call
        if news and not self._placement.missed:  # else the next attachment discovers anew
            self._unseen = self._placement.silent_attention(self._called, self._refused)

    def compute(self, losses: int = 1, ranks: RankReduction | None = None) -> Mapping[str, AttentionStatistics]:
        """Return the statistics of everything seen since the last reset, waiting for the device once.

        Args:
            losses: Over how many losses the mean is taken whose gradients were collected: micro-batches, and without
                `ranks` times ranks.
            ranks: Pools what all processes saw; every one of them has to call this. `None` for what this one saw.

        Returns:
            The statistics by record, each a tensor [H] on the CPU, in the units of `catalog.STATISTICS`.

        Raises:
            RankError: With `ranks`, on every process, if one of them failed.
        """
        if ranks is not None:
            return self.compute_with(ranks, losses)
        self._collector.settle()
        metric = AttentionMetric(statistics=self._statistics)
        metric.update(self._collector.sums)
        found = metric.compute(losses=losses)
        for name, reason in metric.failures.items():
            self._collector.drop(name, reason)
        return LayerStatistics(self._root_name(), found)

    def compute_with(
        self, ranks: RankReduction, losses: int = 1, failure: str = ""
    ) -> Mapping[str, AttentionStatistics]:
        """Do what `compute` does with `ranks`, where this process may have failed already.

        Args:
            ranks: Pools what all processes saw.
            losses: Over how many losses of this process the mean is taken.
            failure: What went wrong here, empty if nothing did. The others are told of it instead of waiting.

        Returns:
            The statistics by record, each a tensor [H] on the CPU, in the units of `catalog.STATISTICS`.

        Raises:
            RankError: On every process, if one of them failed.
        """
        seen = Seen(failure=failure)
        self._collector.gathered = True
        if not failure:
            try:
                self._collector.settle()
                seen = Seen(
                    sums=self._collector.sums,
                    shards={name: (shard.count, shard.index) for name, shard in self._collector.head_shards.items()},
                    skipped={**self._refused, **self._collector.skipped},
                    notes=self.notes,
                    losses=losses,
                    failure=self._collector.failure,
                )
            except Exception as error:
                seen = Seen(failure=error_line(error))
        self._of_all_ranks = ranks.reduce(seen, self._statistics)
        return LayerStatistics(self._root_name(), self._of_all_ranks.statistics)

    def reset(self) -> None:
        """Forget what was collected."""
        self._of_all_ranks = None
        self._collector.reset()

    def _root_name(self) -> str:
        kind = type(getattr(self._model, "_orig_mod", self._model))
        [first, *others] = kind.__bases__
        # `fully_shard` puts a class of its own in front of the model's.
        return others[0].__name__ if others and first.__name__ == "FSDPModule" else kind.__name__


def _outermost(names: Collection[str], selected: frozenset[str] | None) -> list[str]:
    """Return the names of modules that are selected and not inside another one of them."""
    return [
        name
        for name in names
        if is_selected(name, selected) and not any(other != name and is_within(name, other) for other in names)
    ]


def _check_grad_scale(grad_scale: float | Callable[[], float | Tensor]) -> None:
    if callable(grad_scale):
        return
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, (int, float)):
        raise TypeError(f"`grad_scale` expects a number or a callable without arguments, got {grad_scale!r}.")
    if not (math.isfinite(grad_scale) and grad_scale > 0):
        raise ValueError(f"`grad_scale` expects a positive finite number, got {grad_scale}.")
