"""QK-Clip: rescale the query and key weights of heads whose logits grow too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from attn_monitor.head_weights import HeadWeights, weight_refusal
from attn_monitor.linear_outputs import Slice
from attn_monitor.probe import AttentionProbe
from attn_monitor.projections import ProjectionFinder
from attn_monitor.records import AttentionStatistics
from attn_monitor.unseen import unseen

_CLEAR = 0.9
"""A factor from here on is too near 1 for the next logits to tell whether it had an effect."""
_FAILURES = 3
"""After this many clear clips of a head in a row without lasting effect the user is told."""
_LOOKS = 2
"""How many observations are to show the effect: a copy of the weights may come back with the optimizer's next step."""
_SAMPLED = "its largest logit is not known, since only a sample of rows is looked at; set max_queries=None"
_ALONE = "several processes train this model, and nothing makes sure that they rescale alike"
_UNALIKE = "its weights were not found alike on every process"
_NO_EFFECT = (
    "rescaled several times, and each time its logits were soon as large again: an optimizer with a copy of its own "
    "may put the weights back, or they grow faster than they are looked at (every_n_steps=1 observes every step)"
)


@dataclass(frozen=True, slots=True)
class QKClip:
    """Settings of QK-Clip: after the optimizer step, bring a head whose largest logit exceeds `tau` back to `tau`.

    For each head with S_max = max(scale * q.k + ...) > tau, the `logit_max` of the observed step,

        gamma = tau / S_max,    W_q <- gamma^alpha W_q,    W_k <- gamma^(1 - alpha) W_k,

    and the same for their biases, for the rows of that head alone. Its logits become gamma times what they were.

    Where a key head serves several query heads (grouped queries) W_q takes the whole of gamma: W_k is not that head's
    alone. The same where the keys have another part beside W_k (the rotary part that the heads of multi-head latent
    attention share), or are the values, too.

    A head is refused with a reason where its weights cannot be found or rescaling them would be wrong: queries that are
    normalised after the projection (QK-norm, cosine attention), adapters (LoRA), weights that are frozen, quantised,
    sharded, shared or computed. With an additive bias or a softcap only the part that is q.k shrinks.

    Nothing happens between observed steps, and the weights of a layer are looked for in the observed step after the one
    in which a head of it first exceeded `tau`. Whoever relies on it observes every step: `every_n_steps=1`.

    Source: Kimi Team, Kimi K2: Open Agentic Intelligence (2025), arXiv 2507.20534.

    Args:
        tau: The largest logit that is let be, scaled as the softmax sees it.
        alpha: The share of the queries in the factor; 0.5 treats both alike.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If `tau` is not positive and finite, or `alpha` not in [0, 1].

    Example:
        >>> QKClip(tau=50.0)
        QKClip(tau=50.0, alpha=0.5)
        >>> QKClip(tau=50.0).factors(logit_max=200.0)
        (0.5, 0.5)
    """

    tau: float = 100.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("tau", self.tau), ("alpha", self.alpha)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"`{name}` expects a number, got {value!r} of type {type(value).__name__}.")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"`tau` expects a positive finite number, got {self.tau!r}.")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"`alpha` expects a share in [0, 1], got {self.alpha!r}.")

    @property
    def requires(self) -> frozenset[str]:
        """The statistics that must be measured."""
        return frozenset({"logit_max"})

    def factors(self, logit_max: float) -> tuple[float, float]:
        """Return by what W_q and W_k of a head are multiplied."""
        gamma = self.tau / logit_max
        return gamma**self.alpha, gamma ** (1 - self.alpha)


@dataclass(frozen=True, slots=True)
class ClippedHead:
    """A head whose weights were rescaled.

    Attributes:
        layer: The layer.
        head: The query head.
        logit_max: Its largest logit before.
        gamma: By what its logits are multiplied from now on.
        queries_alone: Why W_q took the whole of gamma; empty where W_k took its part.
    """

    layer: str
    head: int
    logit_max: float
    gamma: float
    queries_alone: str = ""


@dataclass(frozen=True, slots=True)
class Clipped:
    """What one step of QK-Clip did.

    Attributes:
        heads: What was rescaled.
        refused: Layers with a head that was not rescaled though it should have been, with the reason.
        waiting: Layers with a head above tau whose weights are looked for in the next observed step.
        notes: Layers in which rescaling has no lasting effect.
    """

    heads: tuple[ClippedHead, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Effect:
    """What is known of the effect of rescaling one head: the logit and the factor of the last clear clip."""

    logit_max: float
    gamma: float
    looks: int = 0
    failures: int = 0


class Clipper:
    """Applies QK-Clip to one model that a probe watches.

    Around each observed step: `begin` once the probe is attached, `end` once it is detached, and `apply` after the
    optimizer's step, with the statistics of that step. On several processes these must be alike everywhere.

    Args:
        clip: The settings.
        probe: Watches the model.

    Example:
        >>> import torch
        >>> from attn_monitor import AttentionProbe
        >>> from attn_monitor.qk_clip import Clipper, QKClip
        >>> layer = torch.nn.MultiheadAttention(8, num_heads=2, batch_first=True)
        >>> probe = AttentionProbe(layer)
        >>> clipper = Clipper(QKClip(tau=0.01), probe)
        >>> x = torch.randn(3, 5, 8)
        >>> for step in range(2):
        ...     probe.reset()
        ...     with probe:
        ...         clipper.begin(layer)
        ...         loss = layer(x, x, x)[0].sum()
        ...     clipper.end()
        ...     clipped = clipper.apply(layer, probe.compute())
        ...     print(clipped.waiting, [head.head for head in clipped.heads])
        ('MultiheadAttention',) []
        () [0, 1]
    """

    def __init__(self, clip: QKClip, probe: AttentionProbe) -> None:
        self.clip = clip
        self._finder = ProjectionFinder(probe)
        self._waiting: dict[str, None] = {}
        self._weights: dict[str, list[HeadWeights | str]] = {}
        self._broken = ""
        self._effects: dict[tuple[str, int], _Effect] = {}

    def begin(self, model: nn.Module) -> None:
        """Look for the weights that are still to be found, until `end`; else do nothing."""
        if not self._waiting:
            return
        try:
            self._finder.begin(model, self._waiting)
        except Exception as error:
            self.end()
            self._broken = _told(error)

    def end(self) -> None:
        """Leave the model alone. Harmless at any time."""
        self._finder.end()

    def apply(
        self,
        model: nn.Module,
        statistics: Mapping[str, AttentionStatistics],
        agree: Callable[[bool], bool] | None = None,
    ) -> Clipped:
        """Rescale the weights of the heads above tau. If there is none, nothing is changed.

        Args:
            model: The model.
            statistics: Those of the step the optimizer has just taken.
            agree: Tells whether something holds on every process; to be given where there are several.

        Returns:
            What was done, and what was not.
        """
        self.end()
        largest = _largest(statistics)
        if self._broken:
            return Clipped(refused=dict.fromkeys(largest, self._broken))
        if agree is None and _processes() > 1:
            return Clipped(refused={layer: _ALONE for layer, values in largest.items() if self._above(values)})
        try:
            return self._apply(model, largest, agree)
        except Exception as error:
            self._broken = _told(error)
            return Clipped(refused=dict.fromkeys(largest, self._broken))

    def _apply(
        self, model: nn.Module, largest: Mapping[str, Sequence[float]], agree: Callable[[bool], bool] | None
    ) -> Clipped:
        above = {layer: self._above(values) for layer, values in largest.items()}
        above = {layer: heads for layer, heads in above.items() if heads}
        notes = self._judge(largest)
        self._settle(model, largest, agree)
        clipped: list[ClippedHead] = []
        refused = {layer: _SAMPLED for layer, values in largest.items() if not values}
        factors: dict[Slice, float] = {}
        for layer, heads in above.items():
            if layer not in self._weights:
                self._waiting[layer] = None
                continue
            done = self._plan(layer, heads, factors)
            clipped += done
            if rest := heads.keys() - {entry.head for entry in done}:
                refused[layer] = self._reason(layer, rest)
        with unseen(), torch.no_grad():
            for part, factor in factors.items():
                for view in part.views():
                    view.mul_(factor)
        return Clipped(tuple(clipped), refused, tuple(layer for layer in above if layer in self._waiting), notes)

    def _above(self, values: Sequence[float]) -> dict[int, float]:
        """Return the heads above tau. Logits that are inf or nan say nothing about how much is too much."""
        return {head: value for head, value in enumerate(values) if self.clip.tau < value < math.inf}

    def _plan(self, layer: str, heads: Mapping[int, float], factors: dict[Slice, float]) -> list[ClippedHead]:
        """Add the factors of the heads of a layer; where several ask for one weight the smallest counts."""
        done = []
        for head, logit_max in heads.items():
            found = self._checked(layer, head)
            if isinstance(found, str):
                continue
            gamma = self.clip.tau / logit_max
            query_factor, key_factor = self.clip.factors(logit_max)
            wanted = {found.query: gamma} if found.key is None else {found.query: query_factor, found.key: key_factor}
            factors.update({part: min(factor, factors.get(part, 1.0)) for part, factor in wanted.items()})
            done.append(ClippedHead(layer, head, logit_max, gamma, found.why))
            if gamma < _CLEAR:
                before = self._effects.get((layer, head))
                self._effects[layer, head] = _Effect(logit_max, gamma, failures=before.failures if before else 0)
        return done

    def _checked(self, layer: str, head: int) -> HeadWeights | str:
        """Return the weights of a head if they may be rescaled as they are now."""
        weights = self._weights[layer]
        found = weights[head] if head < len(weights) else "it has another number of heads than before"
        if isinstance(found, HeadWeights):
            for part in (found.query, found.key):
                if part is not None and (reason := weight_refusal(part)):
                    return reason
        return found

    def _reason(self, layer: str, heads: Collection[int]) -> str:
        """Return why some heads of a layer are left alone."""
        reasons: dict[str, list[int]] = {}
        for head in sorted(heads):
            reasons.setdefault(str(self._checked(layer, head)), []).append(head)
        return "; ".join(f"head {', '.join(map(str, named))}: {reason}" for reason, named in reasons.items())

    def _settle(
        self, model: nn.Module, largest: Mapping[str, Sequence[float]], agree: Callable[[bool], bool] | None
    ) -> None:
        """Decide about the layers whose weights were looked for in this step."""
        for layer in [layer for layer in self._waiting if layer in largest]:
            found = self._finder.weights(model, layer)
            if found is None and agree is None:
                continue  # it is looked for again
            if not isinstance(found, list):
                found = [found or "it did not run on every process"] * len(largest[layer])
            self._weights[layer] = found if agree is None else [_alike(entry, agree) for entry in found]
            del self._waiting[layer]

    def _judge(self, largest: Mapping[str, Sequence[float]]) -> dict[str, str]:
        """Return the layers with a head whose logits did not stay smaller, several times in a row.

        They go on to be rescaled: where the training is so fast that they grow again at once, to stop would let them
        run away, and where something puts the weights back it does no harm.
        """
        notes = {}
        for (layer, head), effect in self._effects.items():
            if effect.looks >= _LOOKS or head >= len(largest.get(layer, ())):
                continue
            effect.looks += 1
            if largest[layer][head] > effect.logit_max * math.sqrt(effect.gamma):  # half of the way, or less
                effect.looks = _LOOKS
                effect.failures += 1
            elif effect.looks == _LOOKS:
                effect.failures = 0
            if effect.failures >= _FAILURES:
                notes[layer] = f"head {head} was {_NO_EFFECT}"
        return notes


def _largest(statistics: Mapping[str, AttentionStatistics]) -> dict[str, list[float]]:
    """Return the largest logit of each head by layer, over all calls of a module; an empty list if it is not known."""
    found: dict[str, list[float]] = {}
    for record, stats in statistics.items():
        layer = record.partition("@")[0]
        values = [] if stats.logit_max is None else stats.logit_max.tolist()
        before = found.setdefault(layer, values)
        found[layer] = [max(pair) for pair in zip(before, values, strict=False)]
    return found


def _processes() -> int:
    """Return how many processes train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _told(error: Exception) -> str:
    return f"QK-Clip failed and is off from now on: {type(error).__name__}: {error}"


def _alike(entry: HeadWeights | str, agree: Callable[[bool], bool]) -> HeadWeights | str:
    """Return what every process may do with a head."""
    known = agree(isinstance(entry, HeadWeights))
    with_key = agree(isinstance(entry, HeadWeights) and entry.key is not None)
    if isinstance(entry, str):
        return entry
    if not known:
        return _UNALIKE
    return entry if with_key else HeadWeights(entry.query, None, entry.why or _UNALIKE)
