"""`keepwhole ingest` and `search`: with a server and without, again and again, and watching."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.app.cli.test_cli import run
from tests.app.cli.test_walk import tree
from tests.app.service import COMMAND, Service

pytestmark = [pytest.mark.service, pytest.mark.model]


def names(service: Service, folder: Path) -> set[str]:
    """What the server has of a folder."""
    return {
        document["name"]
        for document in service.items("/v1/documents", limit=200)
        if document["metadata"].get("folder") == str(folder.resolve()) and document["status"] == "done"
    }


def test_the_same_folder_again_is_unchanged_and_changes_replace(service: Service, tmp_path: Path) -> None:
    folder = tree(tmp_path / "books", "one.md", "in/two.md", "in/[red].md", "no.log", root="*.log\n")
    (folder / "large.txt").write_text("A large book.\n" * 50_000)
    (folder / "scan.pdf").write_text("%PDF-\n%%EOF")
    first = service.run("ingest", str(folder))
    assert first.returncode == 1
    assert "4 of 5 files indexed: 4 new; 2 hidden or ignored entries skipped" in first.stderr
    assert "scan.pdf" in first.stderr
    (folder / "scan.pdf").unlink()
    again = service.run("ingest", str(folder))
    assert (again.returncode, "4 of 4 files indexed: 4 unchanged" in again.stderr) == (0, True)
    # From elsewhere in the file system it is the same folder.
    (tmp_path / "link").symlink_to(folder)
    assert "4 unchanged" in service.run("ingest", str(tmp_path / "link")).stderr
    (folder / "one.md").write_text("changed")
    changed = service.run("ingest", str(folder))
    assert "4 of 4 files indexed: 1 replaced, 3 unchanged" in changed.stderr
    assert names(service, folder) == {"one.md", "in/two.md", "in/[red].md", "large.txt"}


def test_files_that_cannot_be_sent_are_in_the_table(service: Service, tmp_path: Path) -> None:
    folder = tree(tmp_path / "mixed", "good.md", "line\nbreak.md")
    (folder / "broken.md").symlink_to(folder / "nowhere")
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(21_000_000)
    answer = run("ingest", str(folder), "--url", service.url, COLUMNS="250")
    assert answer.returncode == 1
    assert "1 of 4 files indexed" in answer.stderr
    for reason in ("No such file", "control character", "20000000 bytes"):
        assert reason in answer.stderr
    assert "Traceback" not in answer.stderr


@contextmanager
def watching(service: Service, *folders: Path) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, "ingest", "--url", service.url, "--watch", *map(str, folders)]
    process = subprocess.Popen(command, env=service.environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "watching" in line:
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def test_watching_keeps_a_folder_in_step(service: Service, tmp_path: Path) -> None:
    folder = tree(tmp_path / "watched", "stays.md", "goes.md", "changes.md")
    other = tree(tmp_path / "other", "goes.md other", "else.md")
    service.run("ingest", str(folder))
    service.run("ingest", str(other))
    # While nobody watched.
    (folder / "goes.md").unlink()
    with watching(service, folder) as process:
        until(lambda: names(service, folder) == {"stays.md", "changes.md"})
        tree(folder, "new/one.md", ".hidden.md")
        (folder / "changes.md").write_text("The curlew changed.")
        until(lambda: names(service, folder) == {"stays.md", "changes.md", "new/one.md"})
        until(lambda: "curlew" in str(service.http.post("/v1/search", json={"query": "curlew"}).json()["items"]))
        (folder / "new" / "one.md").rename(folder / "new" / "two.md")
        until(lambda: names(service, folder) == {"stays.md", "changes.md", "new/two.md"})
        (folder / ".gitignore").write_text("new\n")
        until(lambda: names(service, folder) == {"stays.md", "changes.md"})
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    assert names(service, other) == {"goes.md other", "else.md"}
    refused = service.run("ingest", "--watch", str(folder / "stays.md"))
    assert (refused.returncode, "is not a folder" in refused.stderr) == (1, True)


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_server_is_found_by_its_data_folder(service: Service) -> None:
    # It listens on a port of its own, and nobody on port 9.
    found = run("search", "ferry Bodo", "--top-k", "1", KEEPWHOLE_DATA_DIR=str(service.folder), KEEPWHOLE_PORT="9")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("1. Bodo.md > Bodo")


def test_without_a_server_the_data_folder_is_used(tmp_path: Path) -> None:
    folder = tree(tmp_path / "docs", "kiwi.md", "fig.md")
    (folder / "kiwi.md").write_text("# Kiwi\n\nThe kiwi has no tail.\n")
    # Nobody listens on port 9.
    environment = {"KEEPWHOLE_DATA_DIR": str(tmp_path / "data"), "KEEPWHOLE_PORT": "9"}
    first = run("ingest", str(folder), **environment)
    assert first.returncode == 0, first.stderr
    assert "no server runs" in first.stderr
    assert "2 of 2 files indexed: 2 new" in first.stderr
    found = run("search", "kiwi tail", "--top-k", "1", **environment)
    assert found.stdout.startswith("1. kiwi.md > Kiwi  (")
    refused = run("search", "kiwi", "--top-k", "99", **environment)
    assert (refused.returncode, "top_k" in refused.stderr) == (1, True)
    with (tmp_path / "data" / "library.db-lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        busy = run("ingest", str(folder), **environment)
        assert busy.returncode == 1
        assert "is in use by process" in busy.stderr
        assert "wait until it is done" in busy.stderr
        assert "Traceback" not in busy.stderr
    assert not (tmp_path / "data" / "library.db-uploads").exists()
