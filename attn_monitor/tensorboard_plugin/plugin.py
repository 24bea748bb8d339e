"""The server side of the tab: a few files and a few JSON routes. Errors are answers, never exceptions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from functools import partial

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug.wrappers import Request, Response

from attn_monitor import views
from attn_monitor.phrases import error_line
from attn_monitor.tags import PLUGIN as NAME
from attn_monitor.tensorboard_plugin.page import FILES, page_file
from attn_monitor.tensorboard_plugin.store import Store

_LARGEST_COUNT = 1000
_log = logging.getLogger(__name__)

_App = Callable[..., object]


class BadRequestError(ValueError):
    """The request names something that is not there; the message is for whoever sent it."""


class AttentionPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # tensorboard has no hints
    """Serves the per-head tensors that were written under the name of the plugin.

    Args:
        context: TensorBoard's, for its data provider.
    """

    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._store = Store(context.data_provider)

    def is_active(self) -> bool:
        """Leave the question to TensorBoard, which looks for data of this plugin's name itself."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and its module."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Attention")

    def get_plugin_apps(self) -> dict[str, _App]:
        """Return the routes."""
        routes: dict[str, Callable[[Request], object]] = {
            "/runs": self._runs,
            "/meta": self._meta,
            "/frames": self._frames,
            "/line": self._line,
            "/events": self._events,
            "/scalar": self._scalar,
        }
        files = {f"/{name}": _application(partial(_file, name)) for name in FILES}
        return {**files, **{path: _application(partial(_answer, route)) for path, route in routes.items()}}

    def _runs(self, request: Request) -> object:
        return self._store.names(plugin_util.context(request.environ), plugin_util.experiment_id(request.environ))

    def _meta(self, request: Request) -> object:
        return views.run_meta(self._run(request))

    def _frames(self, request: Request) -> object:
        run = self._run(request)
        statistic = _choice(request, "statistic", run.tables)
        first, count = _whole(request, "first"), _whole(request, "count")
        if not 1 <= count <= _LARGEST_COUNT:
            raise BadRequestError(f"`count` expects 1 to {_LARGEST_COUNT} steps, got {count}.")
        if first >= len(run.steps):
            raise BadRequestError(f"`first` expects an index below {len(run.steps)}, the number of steps, got {first}.")
        return views.frames(run, statistic, slice(first, first + count))

    def _line(self, request: Request) -> object:
        run = self._run(request)
        layer, head = _whole(request, "layer"), _whole(request, "head")
        chosen = [_one_of("statistic", name, run.tables) for name in request.args.getlist("statistic")]
        try:
            return views.line(run, layer, head, chosen or None)
        except IndexError as error:
            raise BadRequestError(f"`layer` and `head` expect indices of a head, got {error}.") from error

    def _events(self, request: Request) -> object:
        return views.events(self._run(request))

    def _scalar(self, request: Request) -> object:
        run = self._run(request)
        return views.scalar(run, _choice(request, "tag", run.scalars))

    def _run(self, request: Request) -> views.RunData:
        context, experiment = plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)
        return self._store.run(context, experiment, _choice(request, "run", self._store.names(context, experiment)))


def _application(respond: Callable[[Request], Response]) -> _App:
    application: _App = Request.application(respond)
    return application


def _file(name: str, request: Request) -> Response:
    try:
        content = page_file(name)
    except OSError as error:
        return _json(request, {"error": f"attn_monitor is not installed completely: {error}"}, 500)
    return _respond(request, content, FILES[name])


def _answer(route: Callable[[Request], object], request: Request) -> Response:
    """Return what a route returns as JSON, and what it raises as JSON with a status."""
    if request.method not in ("GET", "HEAD"):
        return _json(request, {"error": f"GET expected, got {request.method}."}, 405)
    try:
        return _json(request, route(request), 200)
    except BadRequestError as error:
        return _json(request, {"error": str(error)}, 400)
    except Exception as error:
        _log.warning("The Attention tab could not answer %s.", request.path, exc_info=True)
        return _json(request, {"error": _explain(error)}, 500)


def _json(request: Request, content: object, code: int) -> Response:
    # As text: of a dictionary, TensorBoard would copy every value before it writes it.
    return _respond(request, json.dumps(content, allow_nan=False, separators=(",", ":")), "application/json", code)


def _respond(request: Request, content: str, kind: str, code: int = 200) -> Response:
    response: Response = http_util.Respond(request, content, kind, code=code)
    return response


def _explain(error: Exception) -> str:
    if "RESOURCE_EXHAUSTED" in str(error):
        return (
            "There are more steps than TensorBoard hands out in one piece. "
            f"Start it with --samples_per_plugin {NAME}=1000 to see a sample of them."
        )
    return f"{error_line(error)}. TensorBoard's log has more."


def _argument(request: Request, name: str) -> str:
    value: str | None = request.args.get(name)
    if value is None:
        raise BadRequestError(f"`{name}` is missing from the query.")
    return value


def _choice(request: Request, name: str, choices: Iterable[str]) -> str:
    return _one_of(name, _argument(request, name), choices)


def _one_of(name: str, value: str, choices: Iterable[str]) -> str:
    known = list(choices)
    if value not in known:
        shown = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
        raise BadRequestError(f"`{name}` expects one of [{shown}], got {value!r}.")
    return value


def _whole(request: Request, name: str) -> int:
    value = _argument(request, name)
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise BadRequestError(f"`{name}` expects a whole number from 0, got {value!r}.")
    return int(value)
