"""The command line: `keepwhole serve`, `ingest`, `search`, `chat`, `audit`, `doctor`, `bench` and `completion`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Column, Table

from app.cli.walk import printable
from app.memory.allocator import return_freed_memory
from app.settings import Settings, read_settings
from kv import blas

if TYPE_CHECKING:
    from app.cli.client import Client
    from app.cli.libraries import AnyLibrary

console = Console(stderr=True, highlight=False)
_LOADING_SECONDS = 120.0


def _settings(**overrides: Any) -> Settings:
    try:
        return read_settings(**overrides)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _load_blas(settings: Settings) -> blas.Blas:
    """Must come before anything imports MLX."""
    try:
        return blas.load(settings.blas)
    except ValueError as error:
        raise click.ClickException(f"KEEPWHOLE_BLAS: {error}") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="keepwhole")
def main() -> None:
    """Long chats over your own documents, with a KV cache that evicts whole blocks and logs every eviction."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # What a terminal cannot show or send is shown as a question mark, rather than ending in a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@main.command()
@click.option("--host", help="Address to listen on. Another than 127.0.0.1 needs KEEPWHOLE_API_KEY.")
@click.option("--port", type=int, help="Port to listen on.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Folder of the databases.")
@click.option("--model", help="The embedded model's name, an mlx-lm folder, or a hub name.")
def serve(host: str | None, port: int | None, data_dir: Path | None, model: str | None) -> None:
    """Run the service."""
    settings = _settings(host=host, port=port, data_dir=data_dir, model=model)
    from app.logs import configure_logging

    configure_logging(settings)
    return_freed_memory()
    chosen = _load_blas(settings)
    import structlog

    log = structlog.get_logger()
    if chosen.tuned:
        log.info("BLAS chosen", blas=chosen.name)
    else:
        log.warning("MLX uses reference BLAS: expect a tenth of the speed", blas=chosen.name, note=chosen.note)
    from app.folder import InUse, lock_folder

    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        # With port 0 the address is known only when it listens.
        lock = lock_folder(settings.folder, settings.url if settings.port else None)
    except (InUse, OSError) as error:
        raise click.ClickException(str(error)) from error
    log.info("importing MLX, a few seconds")

    from app.web.server import make_server
    from ingest.database import CannotOpen
    from ingest.embedder import EmbedderError

    try:
        server = make_server(settings, lock)
    except CannotOpen as error:
        raise click.ClickException(str(error)) from error
    except EmbedderError as error:
        raise click.ClickException(f"KEEPWHOLE_EMBEDDER: {error}") from error
    server.on_ready = lambda port: _welcome(settings, port)
    server.run()
    if server.failure is not None:
        raise click.ClickException(server.failure)


def _welcome(settings: Settings, port: int) -> None:
    url = f"http://{settings.host}:{port}"
    header = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key else ""
    click.echo(
        f"\nKeepwhole is ready: {url}\n\n"
        f"Try:\n  curl {url}/v1/documents{header} -F files=@README.md\n"
        f"  curl {url}/v1/sessions{header} -H 'Content-Type: application/json' -d '{{}}'\n"
        f"or, in another terminal:\n  {_program()} chat --url {url}\n"
        f"The API, on a page: {url}/schema\n"
    )
    sys.stdout.flush()


def _program() -> str:
    """This program as a person in the same folder would call it."""
    path = os.path.relpath(sys.argv[0])
    return sys.argv[0] if path.startswith("..") else path


def _server_options(function: Any) -> Any:
    function = click.option("--url", help="Address of the server.")(function)
    return click.option("--api-key", help="Its API key; KEEPWHOLE_API_KEY by default.")(function)


def _client(url: str | None, api_key: str | None) -> Client:
    from app.cli.client import Client

    host, port = os.environ.get("KEEPWHOLE_HOST", "127.0.0.1"), os.environ.get("KEEPWHOLE_PORT", "8765")
    return Client(url or f"http://{host}:{port}", api_key or os.environ.get("KEEPWHOLE_API_KEY"))


def _running(url: str | None, api_key: str | None) -> Client | None:
    """The server at `url`, or where it is by default; None if none answers there."""
    from app.cli.client import Unreachable

    client = _client(url, api_key)
    try:
        client.wait_until_ready(_LOADING_SECONDS)
    except Unreachable:
        if url is not None:
            raise
        return None
    return client


def _library(url: str | None, api_key: str | None, *, to_ingest: bool) -> AnyLibrary:
    """The server at `url`; without one the server where it is by default, else the data folder, or the server whose
    folder it is.
    """
    from app.cli.libraries import FolderLibrary, ServerLibrary
    from app.folder import InUse

    if (client := _running(url, api_key)) is not None:
        return ServerLibrary(client)
    settings = _settings()

    def count_tokens() -> Callable[[str], int]:
        console.print(f"no server runs; using {settings.folder} and loading the tokenizer of {settings.model}")
        _load_blas(settings)
        from app.library import counter_of
        from kv.model.loading import load_model

        return counter_of(load_model(settings.model))

    try:
        return FolderLibrary(settings, count_tokens if to_ingest else None)
    except InUse as error:
        if error.url is None:
            raise click.ClickException(f"{error}, which is no server; wait until it is done") from error
        server = _client(error.url, api_key)
    server.wait_until_ready(_LOADING_SECONDS, is_starting=True)
    return ServerLibrary(server)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--watch", is_flag=True, help="Go on: ingest what is new or changed, delete what is gone. Folders only.")
@_server_options
def ingest(paths: tuple[Path, ...], watch: bool, url: str | None, api_key: str | None) -> None:
    """Ingest files, or every file in folders but for hidden ones and what .gitignore says.

    Through the running server, or into the data folder itself if there is none. A document's name is its path inside
    the folder, so the same command again finds most files unchanged, and puts changed ones in the place of the old.
    """
    from app.cli.ingesting import ingest as ingest_files
    from app.cli.ingesting import keep_in_step
    from app.cli.walk import walk

    if watch and (file := next((path for path in paths if not path.is_dir()), None)):
        raise click.ClickException(f"--watch: {file} is not a folder")
    found = walk(paths)
    if not found.files and not found.failed and not watch:
        raise click.ClickException("no files there")
    with closing(_library(url, api_key, to_ingest=True)) as library:
        try:
            outcome = ingest_files(library, found, console)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        outcome.show(console, found.skipped)
        if watch:
            keep_in_step(library, paths, found, console)
        elif outcome.failed:
            raise SystemExit(1)


@main.command()
@click.argument("query")
@click.option("--top-k", default=5, show_default=True, help="Passages to show.")
@_server_options
def search(query: str, top_k: int, url: str | None, api_key: str | None) -> None:
    """Show the passages that match QUERY best, from the running server, or from the data folder if there is none."""
    with closing(_library(url, api_key, to_ingest=False)) as library:
        found = library.search(printable(query), top_k)
    for number, passage in enumerate(found, start=1):
        place = " > ".join(part for part in (passage.name, passage.heading) if part)
        ranks = {} if passage.ranks is None else msgspec.structs.asdict(passage.ranks)
        why = "".join(f"; {name} {rank}" for name, rank in ranks.items() if rank is not None)
        click.secho(f"{number}. {place}  ({passage.score or 0:.2f}{why})", bold=True)
        click.echo(passage.text.strip() + "\n")


@main.command()
@click.option("--session", "session_id", help="Go on with this session instead of starting one.")
@click.option("--last", is_flag=True, help="Go on with the session that was used last.")
@click.option("--budget-tokens", type=int, help="KV budget of a new session.")
@click.option("--top-k", default=4, show_default=True, help="Passages to retrieve for each question.")
@_server_options
def chat(
    session_id: str | None, last: bool, budget_tokens: int | None, top_k: int, url: str | None, api_key: str | None
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer; Ctrl-D leaves."""
    from app.cli import chatting

    if sum(option is not None for option in (session_id, last or None, budget_tokens)) > 1:
        raise click.ClickException(
            "--session, --last and --budget-tokens do not go together: the budget is a new session's"
        )
    client = _client(url, api_key)
    session = chatting.open_session(client, session_id, last=last, budget_tokens=budget_tokens)
    chatting.chat(client, session, top_k, console)


@main.command()
@click.option("--session", "session_id", help="Of this session only.")
@click.option("--kind", help="Of this kind of block only: prose, code, table, list, question, answer.")
@click.option("--reason", help="For this reason only: not_relevant, room_for_turn, room_for_answer, document_deleted.")
@click.option("--document", "document_id", help="Of this document only, by its id.")
@click.option("--since", help="From this time on, ISO 8601.")
@click.option("--until", help="Up to this time, ISO 8601.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="The newest so many, as a table.")
@click.option("--follow", is_flag=True, help="Go on, a line for each block that leaves.")
@click.option("--export", "form", type=click.Choice(["csv", "jsonl", "json"]), help="All of them, in this form.")
@_server_options
def audit(
    limit: int, follow: bool, form: str | None, url: str | None, api_key: str | None, **given: str | None
) -> None:
    """Show what left the caches, when and why."""
    from app.cli import auditing

    if follow and form:
        raise click.ClickException("--follow and --export do not go together")
    client = _client(url, api_key)
    conditions = {name: value for name, value in given.items() if value is not None}
    if form is not None:
        for piece in auditing.export(client, conditions, form):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    elif follow:
        auditing.follow(client, conditions)
    else:
        auditing.show(client, conditions, limit)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete this command; `eval "$(keepwhole completion bash)"` in its start file."""
    from click.shell_completion import get_completion_class

    name = "keepwhole"
    completes = get_completion_class(shell)
    assert completes is not None
    click.echo(completes(main, {}, name, f"_{name.upper()}_COMPLETE").source())


@main.command()
def doctor() -> None:
    """Say what this installation runs on, every setting, and what is missing."""
    settings = _settings()
    chosen = _load_blas(settings)
    from app.cli.doctor import report

    facts, warnings = report(settings, chosen)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name:{width}}  {value}")
    for warning in warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    if warnings:
        raise SystemExit(1)


@main.group()
def bench() -> None:
    """What the cache's methods are, side by side."""


@bench.command()
def methods() -> None:
    """Print the eviction methods on their four axes, and the options of each."""
    _load_blas(_settings())
    from dataclasses import fields

    from kv.methods import METHODS

    headings = ("granularity", "trigger", "score", "budget")
    table = Table(Column("method", no_wrap=True), *(Column(heading, overflow="fold") for heading in headings))
    for name, options in METHODS.items():
        axes = options.axes
        table.add_row(name, axes.granularity, axes.trigger, axes.score, axes.budget)
    console = Console(highlight=False)
    console.print(table)
    # Options go below, a line each: a column of them would be cut off in most terminals.
    console.print("\nOptions and their defaults, as KVCacheConfig takes them:")
    for name, options in METHODS.items():
        for field in fields(options):
            console.print(f"  {name}_{field.name}={field.default!r}", soft_wrap=True)
