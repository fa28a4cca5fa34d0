"""Clients that people have, unmodified, each in an environment of its own that uv makes: needs a package registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.service import Service, towns

pytestmark = [pytest.mark.slow, pytest.mark.registry, pytest.mark.service, pytest.mark.model]

MODEL = "smollm2-135m-instruct"
QUESTION = "When does the ferry to Narva leave?"

LANGCHAIN = """
import asyncio, os
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
url, model = os.environ["URL"], os.environ["MODEL"]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=16)
answer = chat.invoke([("system", "Answer briefly."), ("user", os.environ["QUESTION"])])
print("whole:", answer.content, answer.usage_metadata["total_tokens"])
print("stream:", "".join(piece.content for piece in chat.stream(os.environ["QUESTION"])))
print("async:", asyncio.run(chat.ainvoke(os.environ["QUESTION"])).content)
vectors = OpenAIEmbeddings(base_url=url, api_key="none", model="wordllama-256", check_embedding_ctx_length=False)
print("embedded:", len(vectors.embed_query("a ferry")))
"""

LLAMAINDEX = """
import os
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(api_base=os.environ["URL"], api_key="none", model=os.environ["MODEL"], is_chat_model=True,
                 context_window=2048, max_tokens=16, temperature=0)
talk = [ChatMessage(role="user", content=os.environ["QUESTION"])]
print("whole:", llm.chat(talk).message.content)
print("stream:", "".join(piece.delta or "" for piece in llm.stream_chat(talk)))
"""

DEEP_CHAT = """<!doctype html><meta charset="utf-8"><body>
<script type="module" src="/deepChat.bundle.js"></script>
<deep-chat id="chat" connect='{"url": "URL/chat/completions", "stream": true,
  "additionalBodyProps": {"model": "MODEL", "temperature": 0, "max_tokens": 16}}'
  directConnection='{"openAI": {"key": "none", "validateKeyProperty": false,
  "completions": {"model": "MODEL"}}}'></deep-chat>
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("data"), ORIGINS="http://127.0.0.1:8799")
    service.ingest(*towns())
    yield service
    service.stop()


def run(service: Service, packages: list[str], command: list[str], **environment: str) -> str:
    """What a command prints in an environment that has just these packages."""
    uv = Path(__file__).parents[3] / ".uv" / "bin" / "uv"
    program = str(uv) if uv.exists() else shutil.which("uv")
    if program is None:
        pytest.skip("no uv to make environments with")
    wanted = [option for package in packages for option in ("--with", package)]
    result = subprocess.run(
        [program, "run", "-q", "--no-project", "--isolated", "--python", sys.executable, *wanted, *command],
        env={**os.environ, "URL": f"{service.url}/v1", "MODEL": MODEL, "QUESTION": QUESTION, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_langchain(served: Service) -> None:
    told = run(served, ["langchain-openai"], ["python", "-c", LANGCHAIN])
    lines = dict(line.split(": ", 1) for line in told.splitlines() if ": " in line)
    assert "7:15" in lines["stream"]
    assert lines["async"] == lines["stream"]
    assert lines["whole"]
    assert lines["embedded"] == "256"


def test_llamaindex(served: Service) -> None:
    told = run(served, ["llama-index-llms-openai-like"], ["python", "-c", LLAMAINDEX])
    lines = dict(line.split(": ", 1) for line in told.splitlines() if ": " in line)
    assert "7:15" in lines["whole"]
    assert lines["whole"] == lines["stream"]


def test_llm(served: Service, tmp_path: Path) -> None:
    models = [{"model_id": "keepwhole", "model_name": MODEL, "api_base": f"{served.url}/v1"}]
    # JSON is YAML.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    options = ["-o", "temperature", "0", "-o", "max_tokens", "16"]
    for flags in ([], ["--no-stream"]):
        told = run(
            served,
            ["llm"],
            ["llm", "-m", "keepwhole", "--key", "none", *flags, *options, QUESTION],
            LLM_USER_PATH=str(tmp_path),
        )
        assert "7:15" in told
    again = run(
        served,
        ["llm"],
        ["llm", "-c", "--key", "none", *options, "What do tickets to Narva cost?"],
        LLM_USER_PATH=str(tmp_path),
    )
    assert again.strip()
    # The continued conversation is one session.
    assert max(session["turns"] for session in served.items("/v1/sessions")) >= 2


@pytest.mark.browser
def test_a_front_end_in_a_browser(served: Service, tmp_path: Path) -> None:
    """deep-chat, from npm, on a page of another site."""
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None or shutil.which("npm") is None:
        pytest.skip("no Chromium, or no npm")
    subprocess.run(["npm", "install", "-s", "--prefix", str(tmp_path), "deep-chat"], check=True, timeout=300)
    (bundle,) = (tmp_path / "node_modules" / "deep-chat" / "dist").glob("deepChat.bundle.js")
    (tmp_path / "deepChat.bundle.js").write_bytes(bundle.read_bytes())
    (tmp_path / "index.html").write_text(DEEP_CHAT.replace("URL", f"{served.url}/v1").replace("MODEL", MODEL))

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    site = ThreadingHTTPServer(("127.0.0.1", 8799), Handler)
    Thread(target=site.serve_forever, daemon=True).start()
    try:
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=chromium,
                args=[
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-quic",
                    "--no-first-run",
                    "--disable-background-networking",
                ],
            )
            page = browser.new_page()
            page.goto("http://127.0.0.1:8799/")
            box = page.locator("#text-input")
            box.click()
            box.type(QUESTION)
            box.press("Enter")
            page.locator(".ai-message-text", has_text="7:15").wait_for(timeout=60_000)
            browser.close()
    finally:
        site.shutdown()
