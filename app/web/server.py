"""The application, and the process that serves it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
import swagger_ui_bundle
import uvicorn
from litestar import Litestar, Request
from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import SwaggerRenderPlugin
from litestar.openapi.spec import OpenAPI, Parameter
from litestar.static_files import create_static_files_router

from app.folder import FolderLock
from app.problems import Problem, invalid
from app.services import Boot, Services
from app.settings import Settings
from app.web.openai.routes import OpenAIController
from app.web.page import page
from app.web.responses import to_response
from app.web.routes.audit import AuditController
from app.web.routes.documents import MAX_FILES, DocumentController
from app.web.routes.jobs import JobController
from app.web.routes.probes import health, ready
from app.web.routes.sessions import SessionController

log = structlog.get_logger()

_GRACE_SECONDS = 10


def create_app(settings: Settings, lock: FolderLock) -> Litestar:
    """The ASGI application. Opens the databases; the model is loaded when the application starts."""
    boot = Boot(settings, lock)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        boot.start()
        try:
            yield
        finally:
            await boot.stop()

    return Litestar(
        route_handlers=[
            DocumentController,
            JobController,
            SessionController,
            AuditController,
            OpenAIController,
            health,
            ready,
            page,
            create_static_files_router(path="/schema/assets", directories=[_swagger_files()], include_in_schema=False),
        ],
        dependencies={"services": Provide(_services, sync_to_thread=False)},
        guards=[_require_own_page, _require_key, _require_json, _require_known_query],
        exception_handlers={Exception: to_response},
        lifespan=[lifespan],
        state=State({"boot": boot, "settings": settings}),
        request_max_body_size=settings.max_upload_bytes,
        # One more for the metadata.
        multipart_form_part_limit=MAX_FILES + 1,
        cors_config=_cors(settings.allowed_origins),
        openapi_config=_openapi(),
        logging_config=None,
    )


def _cors(origins: list[str]) -> CORSConfig | None:
    """What lets pages of these sites call from a browser: preflights are answered, and answers may be read."""
    if not origins:
        return None
    return CORSConfig(
        allow_origins=origins,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
        max_age=600,
    )


def _services(request: Request[Any, Any, Any]) -> Services:
    services: Services = request.app.state.boot.services
    return services


def _require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    key = connection.app.state.settings.api_key
    if key is None or not connection.scope["path"].startswith("/v1"):
        return
    scheme, _separator, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), key.encode()):
        raise Problem(
            HTTPStatus.UNAUTHORIZED,
            "Authorization: the header must be 'Bearer ' and the server's API key",
            {"WWW-Authenticate": "Bearer"},
        )


def _require_own_page(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Refuse what a page of another site sends through its visitor's browser: a server without a key is open to it."""
    origin = connection.headers.get("origin")
    if origin is None or connection.scope.get("method") in ("GET", "HEAD"):
        return
    allowed = connection.app.state.settings.allowed_origins
    if urlsplit(origin).netloc != connection.headers.get("host") and not {origin, "*"} & set(allowed):
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"Origin: {origin[:80]!r} is another site; pages are answered of this server, and in KEEPWHOLE_ORIGINS",
        )


def _require_json(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuse a body of another type than the route reads; documents come in two, and are looked at there."""
    if "data" not in handler.parsed_fn_signature.parameters:
        return
    given = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not given.endswith("+json"):
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type: {given[:80] or 'none'!r} is not application/json",
            field="Content-Type",
        )


def _require_known_query(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Refuse query parameters that the route does not take: a misspelt filter would silently match everything."""
    state = connection.app.state
    if "query_names" not in state:
        state["query_names"] = _query_names(connection.app.openapi_schema)
    path, method = connection.scope["path_template"], connection.scope.get("method", "")
    known = state["query_names"].get((path, method))
    for name in connection.query_params if known is not None else ():
        if name not in known:
            raise invalid(name, f"no such query parameter; there are {', '.join(sorted(known)) or 'none'}")
        if len(connection.query_params.getall(name)) > 1:
            raise invalid(name, "given more than once")


def _query_names(schema: OpenAPI) -> dict[tuple[str, str], set[str]]:
    """The query parameters of each (path template, method), by the service's own schema."""
    return {
        (path, operation_name.upper()): {
            parameter.name
            for parameter in operation.parameters or []
            if isinstance(parameter, Parameter) and parameter.param_in == "query"
        }
        for path, item in (schema.paths or {}).items()
        for operation_name in ("get", "post", "patch", "delete")
        if (operation := getattr(item, operation_name)) is not None
    }


def _swagger_files() -> Path:
    return Path(swagger_ui_bundle.swagger_ui_path)


def _openapi() -> OpenAPIConfig:
    assets = "/schema/assets"
    swagger = SwaggerRenderPlugin(
        js_url=f"{assets}/swagger-ui-bundle.js",
        css_url=f"{assets}/swagger-ui.css",
        standalone_preset_js_url=f"{assets}/swagger-ui-standalone-preset.js",
        favicon=f"<link rel='icon' type='image/png' href='{assets}/favicon-32x32.png'>",
        path="/swagger",
    )
    return OpenAPIConfig(
        title="Keepwhole",
        version=version("keepwhole"),
        description="A streaming long-context RAG service whose KV cache evicts whole blocks, and logs every eviction.",
        path="/schema",
        render_plugins=[swagger],
        use_handler_docstrings=True,
    )


class Server(uvicorn.Server):
    """uvicorn, with streams ended at the first signal: they would hold the shutdown up until they were torn off.

    on_ready: called with the port once the model is loaded. failure: why the server ended, if it had to.
    """

    def __init__(self, config: uvicorn.Config, boot: Boot) -> None:
        super().__init__(config)
        self._boot = boot
        self._waiting: asyncio.Task[None] | None = None
        self.on_ready: Callable[[int], None] = lambda _: None
        self.failure: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then announce when the model is loaded."""
        try:
            await super().startup(sockets=sockets)
        except SystemExit:
            # uvicorn's way to say that the address is taken; its reason went to the log.
            self.failure = f"cannot listen on {self.config.host}:{self.config.port}; is another server running there?"
            self.should_exit = True
            return
        if not self.should_exit:
            self._waiting = asyncio.create_task(self._announce())

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop the turns, then the server."""
        self._boot.cancel_turns()
        super().handle_exit(sig, frame)

    async def _announce(self) -> None:
        try:
            await self._boot.wait()
        except Exception as error:
            self.failure = f"the model could not be loaded: {error}"
            self.should_exit = True
        else:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._boot.announce(f"http://{self.config.host}:{port}")
            self.on_ready(port)


def make_server(settings: Settings, lock: FolderLock) -> Server:
    """A server for `settings`, ready to run, which has the lock of their data folder.

    Raises ingest.database.CannotOpen if a database cannot be opened, ingest.embedder.EmbedderError if the embedder is
    not there.
    """
    app = create_app(settings, lock)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        server_header=False,
    )
    return Server(config, app.state.boot)
