"""Where an attention belongs: the module that owns it, the name of its record, and what of the model was looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from attn_monitor.capture.coverage import unseen_attention
from attn_monitor.capture.naming import CallSite, call_site, is_helper, is_selected, module_called_by_forward
from attn_monitor.capture.ownership import in_backward


class Placement:
    """Knows the modules in which attention was seen, over all attachments of a probe.

    Attributes:
        owners: The module of each record.
        places: Modules in which something was seen, and which stay hooked.
        unselected: Names under which attention was seen that was not selected.
        shown_in: Names of modules in which the user showed a call.
        missed: Whether something was seen in a module that may not be its place: all are to be hooked next time.
    """

    def __init__(self) -> None:
        self.owners: dict[str, nn.Module] = {}
        self.places: set[nn.Module] = set()
        self.unselected: set[str] = set()
        self.shown_in: set[str] = set()
        self.missed = False
        self._running: Callable[[], list[nn.Module]] = list
        self._names: Mapping[nn.Module, str] = {}
        self._selected: frozenset[str] | None = None
        self._explored: Collection[nn.Module] = ()
        self._root = ""
        self._sites: dict[str, list[CallSite]] = {}

    def begin(
        self,
        running: Callable[[], list[nn.Module]],
        names: Mapping[nn.Module, str],
        selected: frozenset[str] | None,
        root: str,
        *,
        explored: Collection[nn.Module],
    ) -> None:
        """Prepare for the hooks of one attachment.

        Args:
            running: Returns the running modules that are hooked, outermost first.
            names: The names of all modules.
            selected: The names of the selected modules.
            root: What the root is shown as.
            explored: Modules of which only the owners of attention are hooked. A new place in one of these may belong
                to a module inside it, and is left to the next time, when all are hooked.
        """
        self._running, self._names, self._selected, self._root = running, names, selected, root
        self._explored = explored

    def running(self) -> list[nn.Module]:
        """Return the running modules, outermost first."""
        return self._running()

    @property
    def root(self) -> str:
        """What the root is shown as."""
        return self._root

    def owner(self) -> tuple[str, nn.Module | None]:
        """Return the module an attention seen now belongs to, and what it is shown as."""
        modules = self._running()
        while len(modules) > 1 and is_helper(modules[-1]):
            modules = modules[:-1]
        owner = modules[-1] if modules else None
        inner = module_called_by_forward(owner, self._names)
        if inner is not None:
            if owner is not None:
                self.places.add(owner)  # whose hooks are those that run
            owner = inner
        return self._name(owner) or self._root, owner

    def is_selected(self, owner: nn.Module | None) -> bool:
        """Tell whether the user chose what a module owns."""
        return is_selected(self._name(owner), self._selected)

    def settled(self, owner: nn.Module | None) -> bool:
        """Keep a module in which something was seen among the hooked ones; say whether it is known to be the place."""
        if owner is None or owner in self.places:
            return True
        if owner in self._explored:
            self.missed = True
            return False
        self.places.add(owner)
        return True

    def place(self) -> tuple[str, CallSite] | None:
        """Return the record and the call site of an attention seen now, `None` if it is not selected."""
        name, owner = self.owner()
        if not self.is_selected(owner):
            self.unselected.add(name)
            return None
        site = call_site(owner)
        known = self._sites.setdefault(name, [])
        if site not in known:
            # A function recomputed outside of its module has the inner part of the call site only.
            inner = [full for full in known if full[: len(site)] == site] if in_backward() else []
            if inner:
                site = inner[0]
            elif owner in self._explored:
                self.missed = True
                return None
            else:
                known.append(site)
        if owner is not None:
            self.owners[name] = owner
            self.places.add(owner)
        index = known.index(site)
        return (f"{name}#{index}" if index else name), site

    def silent_attention(self, called: Collection[nn.Module], refused: Collection[str]) -> dict[str, str]:
        """Return the selected modules that are named like attention, have run, and in which nothing was seen.

        Args:
            called: The modules that have run.
            refused: What was not looked at, and is listed already.
        """
        places = {self._names[place] for place in self.places if place in self._names}
        seen = {"" if name == self._root else name for name in (*self.unselected, *self.shown_in, *refused)}
        found = unseen_attention(self._names, called, places | seen)
        return {
            name: reason
            for name, reason in found.items()
            if is_selected("" if name == self._root else name, self._selected)
        }

    def _name(self, module: nn.Module | None) -> str:
        return self._names.get(module, "") if module is not None else ""
