"""The command line against a real server, and how a server refuses to start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from kv.methods import METHODS
from tests.app.service import COMMAND, Service

pytestmark = [pytest.mark.service, pytest.mark.model]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KEEPWHOLE_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_ingest_search_and_chat(service: Service, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "deep" / "er" / "axolotl.md").write_text("# Axolotl\n\nThe axolotl of lake Xochimilco has 3 gills.\n")
    (tmp_path / "code.py").write_text("def axolotl():\n    return 'gills'\n")
    (tmp_path / ".hidden" / "secret.md").write_text("axolotl secret")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")

    ingested = service.run("ingest", str(tmp_path))
    assert ingested.returncode == 1
    assert "2 of 4 files indexed" in ingested.stderr
    assert "empty.txt" in ingested.stderr
    assert "picture.png" in ingested.stderr
    assert "secret" not in ingested.stderr

    found = service.run("search", "axolotl gills", "--top-k", "1")
    assert found.returncode == 0
    assert found.stdout.startswith("1. ")
    assert "axolotl" in found.stdout

    chat = service.run(
        "chat", "--top-k", "1", "--budget-tokens", "400", input="How many gills has the axolotl of lake Xochimilco?\n"
    )
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    assert "deep/er/axolotl.md > Axolotl" in chat.stderr
    assert "cache " in chat.stderr
    session = next(word for word in chat.stderr.split() if word.startswith("ses_"))
    history = service.items(f"/v1/sessions/{session}/messages")
    assert history[1]["content"].strip() == chat.stdout.strip()
    again = service.run("chat", "--session", session, input="Where?\n")
    assert again.returncode == 0, again.stderr
    assert len(service.items(f"/v1/sessions/{session}/messages")) == 4


def test_ctrl_c_stops_the_answer_and_not_the_chat(service: Service) -> None:
    chat = subprocess.Popen(
        [*COMMAND, "chat", "--url", service.url, "--top-k", "0"],
        env=service.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Write a long story about a cat who sails around the world.\n")
    chat.stdin.flush()
    assert chat.stdout.read(20)
    chat.send_signal(signal.SIGINT)
    time.sleep(1.0)
    rest, errors = chat.communicate("What is a dog?\n", timeout=60)
    assert chat.returncode == 0, errors
    assert "stopped" in errors
    session = next(word for word in errors.split() if word.startswith("ses_"))
    history = service.items(f"/v1/sessions/{session}/messages")
    assert next(m["finish_reason"] for m in history if m["role"] == "assistant") == "cancelled"
    assert history[-1]["content"].strip() in rest


def test_bytes_that_are_no_text_do_not_end_in_a_traceback(service: Service, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff.md")
    (tmp_path / name).write_text("# Ibex\n\nThe ibex climbs.\n")
    assert service.run("ingest", str(tmp_path)).returncode == 0
    assert service.run("search", os.fsdecode(b"ibex \xff")).stdout.startswith("1. bad\ufffd.md")
    ascii_only = {**service.environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for arguments, typed in (
        (("search", "日本 ibex"), b""),
        (("chat", "--top-k", "0"), b"\xff\xfe hello \xf0\x9f\x98\x80\n"),
    ):
        command = [*COMMAND, arguments[0], "--url", service.url, *arguments[1:]]
        answer = subprocess.run(command, env=ascii_only, input=typed, capture_output=True, timeout=60, check=False)
        assert answer.returncode == 0, answer.stderr
    for bad in (("--url", "http://[::1"), ("--url", service.url, "--api-key", "é")):
        answer = run("search", "x", *bad)
        assert answer.returncode == 1
        assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("arguments", [("ingest", "README.md"), ("search", "x"), ("chat",)])
def test_without_a_server_the_reason_is_said_once(arguments: tuple[str, ...]) -> None:
    answer = run(*arguments, "--url", "http://127.0.0.1:9")
    assert answer.returncode == 1
    assert answer.stderr.count("is `keepwhole serve` running?") == 1
    assert "Traceback" not in answer.stderr


def test_a_wrong_session_and_a_wrong_budget_are_said(service: Service) -> None:
    for arguments, reason in (
        (("--session", "ses_none"), "ses_none"),
        (("--session", "../documents"), "Not Found"),
        (("--budget-tokens", "3"), "budget_tokens"),
    ):
        answer = service.run("chat", *arguments, input="")
        assert answer.returncode == 1
        assert reason in answer.stderr


def test_doctor_prints_every_setting_and_no_secret() -> None:
    answer = run("doctor", KEEPWHOLE_API_KEY="hush", KEEPWHOLE_PORT="9999")
    assert answer.returncode == 0, answer.stderr
    for word in ("device", "blas", "GFLOP/s", "model file", "KEEPWHOLE_BUDGET_TOKENS", "9999"):
        assert word in answer.stdout
    assert "hush" not in answer.stdout + answer.stderr
    for wrong in ({"KEEPWHOLE_MODEL": "/nope"}, {"KEEPWHOLE_DATA_DIR": "/dev/null/x"}, {"KEEPWHOLE_EMBEDDER": "/no"}):
        answer = run("doctor", **wrong)
        assert answer.returncode == 1
        assert next(iter(wrong.values())).split("/x")[0] in answer.stderr
    slow = run("doctor", KEEPWHOLE_BLAS="reference")
    assert "reference BLAS" in slow.stdout
    if "cpu" in slow.stdout:
        assert slow.returncode == 1
        assert "warning" in slow.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"KEEPWHOLE_PORT": "many"}, "KEEPWHOLE_PORT: 'many'"),
        ({"KEEPWHOLE_HOST": "0.0.0.0"}, "KEEPWHOLE_API_KEY"),
        ({"KEEPWHOLE_BUDGET_TOKENS": "3"}, "KEEPWHOLE_BUDGET_TOKENS: 3"),
        ({"KEEPWHOLE_BUGDET_TOKENS": "300"}, "no such setting"),
        ({"KEEPWHOLE_BLAS": "/no/such.so"}, "KEEPWHOLE_BLAS"),
        ({"KEEPWHOLE_DATA_DIR": "/dev/null/data"}, "/dev/null"),
        ({"KEEPWHOLE_EMBEDDER": "/no/such"}, "KEEPWHOLE_EMBEDDER: embedder '/no/such' is neither wordllama"),
    ],
)
def test_serve_refuses_bad_settings(tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    answer = run("serve", **{"KEEPWHOLE_DATA_DIR": str(tmp_path), **environment})
    assert answer.returncode == 1
    assert reason in answer.stderr
    assert "Traceback" not in answer.stderr


def test_serve_says_that_the_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = run("serve", "--port", str(taken.getsockname()[1]), KEEPWHOLE_DATA_DIR=str(tmp_path))
    assert answer.returncode == 1
    assert "another server" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_serve_says_that_the_model_is_missing(tmp_path: Path) -> None:
    answer = run(
        "serve", "--port", "0", "--model", str(tmp_path / "none"), KEEPWHOLE_DATA_DIR=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert answer.returncode == 1
    assert "the model could not be loaded" in answer.stderr


def test_an_api_key_guards_everything_but_probes_and_the_page(tmp_path: Path) -> None:
    service = Service(tmp_path, API_KEY="open sesame")
    for key in (None, "Bearer", "Bearer wrong", "open sesame", "Basic open sesame"):
        headers = {} if key is None else {"Authorization": key}
        answer = httpx.get(f"{service.url}/v1/sessions", headers=headers)
        assert answer.status_code == 401, key
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["status"] == 401
        posted = httpx.post(f"{service.url}/v1/documents", headers=headers, json={"name": "a", "text": "b"})
        assert posted.status_code == 401
    assert (
        httpx.get(f"{service.url}/v1/sessions", headers={"Authorization": "Bearer open sesame"}).json()["items"] == []
    )
    for path in ("/health", "/ready", "/schema/openapi.json"):
        assert httpx.get(f"{service.url}{path}").status_code == 200
    assert httpx.get(f"{service.url}/v1/sessions", headers={"Authorization": "bearer open sesame"}).status_code == 200
    # Nothing that a request carries is in the log, whatever went wrong with it.
    nested = '{"query":' + "[" * 5000
    headers = {"Authorization": "Bearer open sesame", "content-type": "application/json"}
    httpx.post(f"{service.url}/v1/search", content=nested, headers=headers)
    assert "sesame" not in service.log_path.read_text()
    # The command line takes the key from the environment.
    assert service.run("search", "x").returncode == 0
    assert "Authorization" in run("search", "x", "--url", service.url).stderr
    service.stop()


def test_bench_methods_shows_every_option_in_a_narrow_terminal() -> None:
    shown = run("bench", "methods", COLUMNS="80")
    assert shown.returncode == 0, shown.stderr
    assert "…" not in shown.stdout
    for name, options in METHODS.items():
        for field in fields(options):
            assert f"  {name}_{field.name}={field.default!r}\n" in shown.stdout
