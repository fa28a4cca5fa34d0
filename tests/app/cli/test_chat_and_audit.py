"""`keepwhole chat` that goes on, `keepwhole audit`, and completion."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.app.cli.test_cli import run
from tests.app.service import COMMAND, Service, towns

pytestmark = [pytest.mark.service, pytest.mark.model]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server that may be stopped, with a session from which blocks have left."""
    service = Service(tmp_path_factory.mktemp("data"))
    service.ingest(*towns())
    session = service.session(budget_tokens=160, title="small")
    for town in ("Narva", "Lecce", "Piran"):
        assert service.tell(session, f"When does the ferry to {town} leave?", max_tokens=8, top_k=2).status_code == 200
    assert service.items(f"/v1/sessions/{session}/evictions")
    yield service
    service.stop()


def test_chat_goes_on_with_the_last_session(own: Service) -> None:
    own.run("chat", input="When does the ferry to Galway leave?\n")
    chat = own.run("chat", "--last", input="And what does a ticket cost?\n")
    assert chat.returncode == 0, chat.stderr
    assert "> When does the ferry to Galway leave?" in chat.stderr
    session = own.items("/v1/sessions")[0]
    assert session["id"] in chat.stderr
    assert session["turns"] == 2
    both = own.run("chat", "--last", "--session", session["id"], input="")
    assert both.returncode == 1
    assert "--last" in both.stderr
    assert own.run("chat", "--session", "ses_none", input="").returncode == 1


def test_an_answer_survives_a_restart_of_the_server(own: Service) -> None:
    port = own.url.rsplit(":", 1)[1]
    chat = subprocess.Popen(
        [*COMMAND, "chat", "--url", own.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own.environment,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Tell me a long story about a dragon who lives in a castle by the sea.\n")
    chat.stdin.flush()
    chat.stdout.read(12)
    own.process.kill()
    own.process.wait(30)
    own.environment["KEEPWHOLE_PORT"] = port
    own.start("--port", port)
    rest, told = chat.communicate("When does the ferry to Narva leave?\n", timeout=90)
    assert chat.returncode == 0, told
    assert "lost the server; waiting" in told
    # A turn that was cut off is rolled back, and says so; the session goes on.
    assert "The process stopped during this turn" in told
    session = own.items("/v1/sessions")[0]
    (answer,) = [m["content"] for m in own.items(f"/v1/sessions/{session['id']}/messages") if m["role"] == "assistant"]
    assert rest.endswith(f"{answer}\n")


def test_audit_is_a_table_a_file_and_goes_on(own: Service) -> None:
    rows = own.items("/v1/audit/evictions")
    table = own.run("audit", "--limit", "3")
    assert table.returncode == 0, table.stderr
    assert [line.split()[0] for line in table.stdout.splitlines()[1:]] == [row["created_at"] for row in rows[-3:]]
    lines = own.run("audit", "--export", "jsonl").stdout
    assert [json.loads(line) for line in lines.splitlines()] == rows
    assert json.loads(own.run("audit", "--export", "json").stdout) == rows
    written = list(csv.DictReader(io.StringIO(own.run("audit", "--export", "csv").stdout)))
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert {int(row["tokens"]) for row in written} == {row["tokens"] for row in rows}
    some = own.run("audit", "--export", "jsonl", "--kind", "prose", "--reason", rows[0]["reason"]).stdout
    assert len(some.splitlines()) == sum(r["kind"] == "prose" and r["reason"] == rows[0]["reason"] for r in rows)
    for form, kind in (("csv", "text/csv"), ("jsonl", "application/x-ndjson"), ("json", "application/json")):
        answer = own.http.get("/v1/audit/evictions", params={"format": form})
        assert answer.headers.get_list("Content-Type")[0].startswith(kind)
        assert len(answer.headers.get_list("Content-Type")) == 1
    wrong = own.run("audit", "--kind", "poetry")
    assert wrong.returncode == 1
    assert "kind" in wrong.stderr
    assert own.http.get("/v1/audit/evictions", params={"format": "xml"}).json()["field"] == "format"


def test_audit_follows(own: Service) -> None:
    session = own.session(budget_tokens=160)
    command = [*COMMAND, "audit", "--url", own.url, "--follow", "--session", session]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own.environment) as following:
        assert following.stdout is not None
        for town in ("Narva", "Lecce", "Piran"):
            own.tell(session, f"When does the ferry to {town} leave?", max_tokens=8, top_k=2)
        first = following.stdout.readline()
        following.send_signal(signal.SIGINT)
    assert session in first
    assert first.split()[0] in [row["created_at"] for row in own.items(f"/v1/sessions/{session}/evictions")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_what_the_shell_reads(shell: str) -> None:
    script = run("completion", shell)
    assert script.returncode == 0, script.stderr
    assert "_KEEPWHOLE_COMPLETE" in script.stdout
    if shell == "bash":
        checked = subprocess.run(["bash", "-n"], input=script.stdout, text=True, check=False, capture_output=True)
        assert checked.returncode == 0, checked.stderr
        asked = {**os.environ, "_KEEPWHOLE_COMPLETE": "bash_complete", "COMP_WORDS": "keepwhole au", "COMP_CWORD": "1"}
        program = "from app.cli.commands import main; main(prog_name='keepwhole')"
        found = subprocess.run([sys.executable, "-c", program], env=asked, text=True, capture_output=True, check=False)
        assert "audit" in found.stdout
