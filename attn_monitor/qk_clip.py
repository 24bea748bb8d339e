"""QK-Clip: rescale the query and key weights of heads whose logits grow too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from attn_monitor.clip_effect import NOT_FOLLOWED, Effects, head_lengths, largest_logits
from attn_monitor.clip_records import Clipped, ClippedHead, first_clip, heads_by_reason
from attn_monitor.head_weights import HeadWeights, weight_refusal
from attn_monitor.linear_outputs import Slice
from attn_monitor.phrases import error_line
from attn_monitor.probe import AttentionProbe
from attn_monitor.projections import ProjectionFinder
from attn_monitor.records import AttentionStatistics
from attn_monitor.unseen import unseen

_STAY = 32
"""For how many observations after the last head above tau the weights of a layer go on to be looked for."""
_SAMPLED = "its largest logit is not known, since only a sample of rows is looked at; set max_queries=None"
_ALONE = "several processes train this model, and nothing makes sure that they rescale alike"
_UNALIKE = "its weights were not found alike on every process"
_OTHER_HEADS = "it has other heads than the statistics tell of: they may be spread over processes"
_DID_NOT_RUN = "it did not run on every process"
_ELSEWHERE = "QK-Clip failed on another process"


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
    sharded, computed, or shared with another layer, queries that serve other attention, queries or keys that serve
    outside of attention as well (a residual, a gate), as far as the gradients of the step tell, and logits that did not
    follow when it was rescaled before. With an additive bias or a softcap only the part that is q.k shrinks.

    Nothing happens between observed steps, and the weights of a layer are looked for from the observed step on that
    follows the one in which a head of it exceeded `tau`. Whoever relies on it observes every step: `every_n_steps=1`.

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
        self._watched: dict[str, int] = {}
        self._broken = ""
        self._effects = Effects()
        self._left: set[str] = set()
        self._first_told = False

    def begin(self, model: nn.Module) -> None:
        """Look, until `end`, for the weights of the layers that have had a head above tau; else do nothing."""
        if not self._watched or self._broken:
            return
        try:
            self._finder.begin(model, self._watched)
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
        step: int | None = None,
    ) -> Clipped:
        """Rescale the weights of the heads above tau. If there is none, nothing is changed.

        Args:
            model: The model.
            statistics: Those of the step the optimizer has just taken.
            agree: Tells whether something holds on every process; to be given where there are several. It is asked in
                the same order everywhere: once a record, and twice more for each head above tau.
            step: Its number, for the notice of the first clip.

        Returns:
            What was done, and what was not.
        """
        largest: Mapping[str, Sequence[float]] = {}
        above: dict[str, dict[int, float]] = {}
        try:
            self.end()
            largest = largest_logits(statistics)
            above = {layer: heads for layer, values in largest.items() if (heads := self._above(values))}
        except Exception as error:  # the other processes ask in any case
            self._broken = _told(error)
        if agree is None and _processes() > 1:
            return Clipped(refused=dict.fromkeys(above, _ALONE))
        if agree is not None and not agree(not self._broken):
            return Clipped(refused=dict.fromkeys(largest if self._broken else above, self._broken or _ELSEWHERE))
        if self._broken:
            return Clipped(refused=dict.fromkeys(largest, self._broken))
        try:
            return self._apply(model, statistics, largest, above, agree, step)
        except Exception as error:
            self._broken = _told(error)
            return Clipped(refused=dict.fromkeys(largest, self._broken))
        finally:
            self._finder.forget()

    def _apply(
        self,
        model: nn.Module,
        statistics: Mapping[str, AttentionStatistics],
        largest: Mapping[str, Sequence[float]],
        above: Mapping[str, Mapping[int, float]],
        agree: Callable[[bool], bool] | None,
        step: int | None,
    ) -> Clipped:
        entries, notes = self._entries(model, statistics, largest, above, several=agree is not None)
        if agree is not None:  # all of them before anything else: what raises must not leave the others waiting
            entries = {
                layer: {head: _alike(entry, agree) for head, entry in own.items()} for layer, own in entries.items()
            }
        clipped: list[ClippedHead] = []
        # With nan logits nothing is known either, but that is no matter of settings, and is told elsewhere.
        broken = {record.partition("@")[0] for record, stats in statistics.items() if bool(stats.nonfinite.any())}
        refused = {layer: _SAMPLED for layer, values in largest.items() if not values and layer not in broken}
        factors: dict[Slice, float] = {}
        lengths = head_lengths(statistics)
        for layer, heads in entries.items():
            for head, entry in heads.items():
                if isinstance(entry, HeadWeights):
                    done = self._plan(layer, head, above[layer][head], entry, factors)
                    clipped.append(done)
                    self._effects.expect(layer, head, done.logit_max, lengths[layer][head], entry.gains, done.factors)
            if reasons := {head: entry for head, entry in heads.items() if isinstance(entry, str)}:
                refused[layer] = heads_by_reason(reasons)
                notes.update(self._left_alone(layer, reasons))
        waiting = tuple(layer for layer in above if layer not in entries)
        self._watch(above, largest)
        with unseen(), torch.no_grad():
            for part, factor in factors.items():
                for view in part.views():
                    view.mul_(factor)
        if clipped and not self._first_told:
            self._first_told = True
            notes = {**first_clip(clipped, self.clip.tau, step), **notes}
        return Clipped(tuple(clipped), refused, waiting, notes)

    def _entries(
        self,
        model: nn.Module,
        statistics: Mapping[str, AttentionStatistics],
        largest: Mapping[str, Sequence[float]],
        above: Mapping[str, Mapping[int, float]],
        several: bool,
    ) -> tuple[dict[str, dict[int, HeadWeights | str]], dict[str, str]]:
        """Return the weights of the heads above tau, or why they are left alone, and what to say.

        Layers that were not looked at are not among them. It does not raise: other processes wait for the answer.
        """
        looked = [layer for layer in above if layer in self._watched]
        try:
            found = {layer: self._finder.weights(model, layer) for layer in looked}
            weights = {
                layer: _of_all_heads(entry, len(largest[layer]))
                for layer, entry in found.items()
                if entry is not None or several
            }
            notes = self._effects.judge(largest, head_lengths(statistics), weights)
            entries = {
                layer: {head: self._checked(layer, head, weights[layer]) for head in above[layer]} for layer in weights
            }
        except Exception as error:
            self._broken = _told(error)
            return {layer: dict.fromkeys(above[layer], self._broken) for layer in looked}, {}
        return entries, notes

    def _checked(self, layer: str, head: int, weights: Sequence[HeadWeights | str]) -> HeadWeights | str:
        """Return the weights of a head if they may be rescaled as they are now."""
        found = weights[head]
        if isinstance(found, str):
            return found
        for part in (found.query, found.key):
            if part is not None and (reason := weight_refusal(part)):
                return reason
        return self._effects.refused.get((layer, head), found)

    def _watch(self, above: Collection[str], largest: Collection[str]) -> None:
        """Go on to look for the weights of layers that have, or lately had, a head above tau."""
        watched = {layer: left - (layer in largest) for layer, left in self._watched.items()}
        watched.update(dict.fromkeys(above, _STAY))
        self._watched = {layer: left for layer, left in watched.items() if left > 0}

    def _above(self, values: Sequence[float]) -> dict[int, float]:
        """Return the heads above tau. Logits that are inf or nan say nothing about how much is too much."""
        return {head: value for head, value in enumerate(values) if self.clip.tau < value < math.inf}

    def _plan(
        self, layer: str, head: int, logit_max: float, found: HeadWeights, factors: dict[Slice, float]
    ) -> ClippedHead:
        """Add the factors of a head; where several ask for one weight the smallest counts."""
        gamma = self.clip.tau / logit_max
        query_factor, key_factor = (gamma, 1.0) if found.key is None else self.clip.factors(logit_max)
        for part, factor in ((found.query, query_factor), (found.key, key_factor)):
            if part is not None:
                factors[part] = min(factor, factors.get(part, 1.0))
        return ClippedHead(layer, head, logit_max, gamma, found.why, (query_factor, key_factor))

    def _left_alone(self, layer: str, reasons: Mapping[int, str]) -> dict[str, str]:
        """Return what to say of heads that had no effect, in a layer of which another refusal was said before."""
        before = layer in self._left
        self._left.add(layer)
        failed = [head for head, reason in reasons.items() if reason == NOT_FOLLOWED]
        return {f"{layer} head {head}": NOT_FOLLOWED for head in failed if before}


def _of_all_heads(found: list[HeadWeights | str] | str | None, heads: int) -> list[HeadWeights | str]:
    """Return an entry for each head of a layer, whatever was found."""
    if isinstance(found, list) and len(found) == heads:
        return found
    return [_OTHER_HEADS if isinstance(found, list) else found or _DID_NOT_RUN] * heads


def _processes() -> int:
    """Return how many processes train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _told(error: Exception) -> str:
    return f"QK-Clip failed and is off from now on: {error_line(error)}"


def _alike(entry: HeadWeights | str, agree: Callable[[bool], bool]) -> HeadWeights | str:
    """Return what every process may do with a head."""
    known = agree(isinstance(entry, HeadWeights))
    with_key = agree(isinstance(entry, HeadWeights) and entry.key is not None)
    if isinstance(entry, str):
        return entry
    if not known:
        return _UNALIKE
    return entry if with_key else replace(entry, key=None, why=entry.why or _UNALIKE)
