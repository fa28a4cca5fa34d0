"""`keepwhole chat`: a session in the terminal, which outlives a restart of its server."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console

from app.cli.client import Client, ServerError
from app.cli.walk import printable


def open_session(client: Client, session_id: str | None, *, last: bool, budget_tokens: int | None) -> dict[str, Any]:
    """The session to chat in: the one that is named, the one that was used last, or a new one. Raises ServerError."""
    session: dict[str, Any]
    if session_id is not None:
        session = client.call("GET", f"/v1/sessions/{client.quoted(session_id)}")
    elif last:
        sessions = list(client.items("/v1/sessions"))
        if not sessions:
            raise ServerError("there is no session to go on with; leave --last out to begin one")
        session = max(sessions, key=lambda one: str(one["updated_at"]))
    else:
        body = {} if budget_tokens is None else {"budget_tokens": budget_tokens}
        session = client.call("POST", "/v1/sessions", json=body)
    return session


def chat(client: Client, session: dict[str, Any], top_k: int, console: Console) -> None:
    """Ask what is typed until the input ends. Answers go to standard output, all else to `console`."""
    session_id = session["id"]
    console.print(f"[dim]session {session_id}[/dim]")
    if session["turns"]:
        _show_last_exchange(client, session_id, console)
    while True:
        try:
            question = click.prompt(">", prompt_suffix=" ", err=True)
        except click.Abort:
            console.print()
            return
        try:
            _show_answer(client, session_id, {"content": printable(question), "top_k": top_k}, console)
        except ServerError as error:
            console.print(str(error), style="red", markup=False)
        except KeyboardInterrupt:
            client.call("POST", f"/v1/sessions/{session_id}/cancel")
            console.print("\n[dim]stopped[/dim]")


def _show_last_exchange(client: Client, session_id: str, console: Console) -> None:
    *_, question, answer = client.items(f"/v1/sessions/{session_id}/messages")
    console.print(f"> {question['content']}", style="dim", markup=False)
    console.print(answer["content"], style="dim", markup=False)


def _show_answer(client: Client, session_id: str, body: dict[str, Any], console: Console) -> None:
    evicted: list[dict[str, Any]] = []
    for event, data in client.ask(
        session_id, body, on_lost=lambda: console.print("\n[dim]lost the server; waiting[/dim]")
    ):
        if event == "retrieval":
            _show_sources(data["sources"], console)
        elif event == "eviction":
            evicted.append(data)
        elif event == "token":
            click.echo(data["text"], nl=False)
            sys.stdout.flush()
        elif event == "error":
            console.print(f"\n{data['problem'].get('detail', 'the turn failed')}", style="red", markup=False)
        elif event == "done":
            click.echo()
            _show_end(data, evicted, console)


def _show_sources(sources: list[dict[str, Any]], console: Console) -> None:
    for source in sources:
        place = " > ".join(part for part in (source["name"], source["heading"]) if part)
        console.print(f"  {place} · {source['tokens']} tokens · {source['state']}", style="dim", markup=False)


def _show_end(done: dict[str, Any], evicted: list[dict[str, Any]], console: Console) -> None:
    cache, usage = done["cache"], done["usage"]
    parts = [
        f"{usage['prefilled_tokens']} tokens read, {usage['cached_tokens']} were there",
        f"cache {cache['resident_tokens']}/{cache['budget_tokens']}",
        f"{done['timings']['total']:.1f} s",
    ]
    if evicted:
        tokens = sum(row["tokens"] for row in evicted)
        parts.append(f"evicted {len(evicted)} blocks of {tokens} tokens")
    if done["finish_reason"] in ("length", "repetition"):
        parts.append({"length": "cut at max_tokens", "repetition": "ended: it repeated itself"}[done["finish_reason"]])
    console.print("  " + " · ".join(parts), style="dim", markup=False)
