"""`mlx_lm.server` on our caches: a real process, a tiny random model with the real tokenizer, two clients."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from kv.model.loading import load_model

pytestmark = [pytest.mark.service, pytest.mark.model]

SERVER = """
import mlx_lm.server as server
from kv import KVCacheBuilder, KVCacheConfig

original = server.load

def load(*arguments, **options):
    model, *rest = original(*arguments, **options)
    model.make_cache = KVCacheBuilder.factory(model, KVCacheConfig(METHOD))
    return (model, *rest)

server.load = load
server.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as mlx-lm finds it on disk."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
    }
    mx.random.seed(0)
    model = Model(ModelArgs(**{name: value for name, value in config.items() if name != "eos_token_id"}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_model().tokenizer
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serve(folder: Path, options: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = SERVER.replace("METHOD", options)
    command = [sys.executable, "-c", code, "--model", str(folder), "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                break
        except httpx.HTTPError:
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
    try:
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["chunkkv_budget=96", 'method="pyramidkv", pyramidkv_budget=96, pyramidkv_recent=4'])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    with serve(folder, request.param) as url:
        yield url


def test_requests_that_share_a_system_prompt_learn_nothing_of_each_other(folder: Path) -> None:
    """The server keeps the system prompt's cache for the next request."""

    def ask(url: str, content: str) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": "You are a harbour master. " * 8},
            {"role": "user", "content": content},
        ]
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    with serve(folder, "chunkkv_budget=4096") as url:
        ask(url, "The password is swordfish. " * 10)
        second = ask(url, "When does the ferry leave?")
    with serve(folder, "chunkkv_budget=4096") as url:
        alone = ask(url, "When does the ferry leave?")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    assert second["choices"][0]["message"] == alone["choices"][0]["message"]


def test_ten_turns_of_two_clients(url: str) -> None:
    def chat(name: str) -> list[str]:
        messages: list[dict[str, Any]] = []
        answers = []
        with httpx.Client(base_url=url, timeout=60) as client:
            for turn in range(10):
                messages.append(
                    {"role": "user", "content": f"{name} asks about ferry {turn}. " + "The sea is wide. " * 12}
                )
                body = {"messages": messages, "max_tokens": 8, "temperature": 0}
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                choice = response.json()["choices"][0]
                assert choice["finish_reason"] in ("length", "stop")
                answers.append(choice["message"]["content"])
                messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(chat, ("Ada", "Ben"))
    assert len(first) == len(second) == 10
    assert any(first)
