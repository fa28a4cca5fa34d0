"""`keepwhole ingest`: sending files, following their jobs, the table of what failed, and keeping folders in step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from app.cli.client import ServerError, Unreachable
from app.cli.libraries import TOGETHER, AnyLibrary
from app.cli.walk import RULES, SourceFile, Walk, walk
from ingest.records import Job

_POLL_SECONDS = 0.2
_SETTLING_MS = 1000
_FILES_TOGETHER = 50
_OVER = frozenset({"done", "failed", "cancelled"})


@dataclass
class Outcome:
    """What became of the files. counts: those that are indexed, as "new", "replaced" or "unchanged".

    incomplete: name of an indexed file and what of it is not.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)
    incomplete: list[tuple[str, str]] = field(default_factory=list)

    def add(self, job: Job) -> None:
        """Count a finished job."""
        for document in job.documents:
            if document.status == "done":
                self.counts["replaced" if document.replaces else "new"] += 1
            elif document.status == "unchanged":
                self.counts["unchanged"] += 1
            else:
                self.failed.append((document.name, document.error or document.status))
            if document.warnings:
                self.incomplete.append((document.name, "; ".join(document.warnings)))

    def show(self, console: Console, skipped: int) -> None:
        """The count of every kind, a table of what was left out of files, and one of what failed and why."""
        indexed = self.counts.total()
        kinds = ", ".join(
            f"{self.counts[kind]} {kind}" for kind in ("new", "replaced", "unchanged") if self.counts[kind]
        )
        console.print(
            f"{indexed} of {indexed + len(self.failed)} files indexed"
            + (f": {kinds}" if kinds else "")
            + (f"; {skipped} hidden or ignored entries skipped" if skipped else ""),
            soft_wrap=True,
        )
        _show_table(console, "not indexed as a whole", "what is left out", self.incomplete)
        _show_table(console, "not indexed", "why it failed", self.failed)


def ingest(library: AnyLibrary, found: Walk, console: Console) -> Outcome:
    """Send files and wait until each is indexed or failed. Ctrl-C cancels what is not done yet, and is passed on."""
    outcome = Outcome(failed=list(found.failed))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    jobs: list[str] = []
    with Progress(*columns, console=console) as progress:
        try:
            sending = progress.add_task("sending", total=len(found.files))
            for batch in _batches(found.files):
                job_id, failed = library.send(batch)
                outcome.failed += failed
                jobs += [job_id] if job_id else []
                progress.advance(sending, len(batch))
            indexing = progress.add_task("indexing", total=len(found.files) - len(outcome.failed) + len(found.failed))
            for job_id in jobs:
                outcome.add(_follow(library, job_id, progress, indexing))
        except Unreachable:
            progress.stop()
            console.print("the server is gone; when it starts again, it goes on with what it was sent")
            raise
        except KeyboardInterrupt:
            progress.stop()
            for job_id in jobs:
                library.cancel(job_id)
            console.print("stopped; what was indexed stays, the rest is cancelled")
            raise
    return outcome


def _show_table(console: Console, title: str, column: str, rows: Sequence[tuple[str, str]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column(column, overflow="fold")
    for name, reason in rows:
        # As text: a file may be called [red].
        table.add_row(Text(name), Text(reason.removeprefix(f"{name}: ")))
    console.print(table)


def _follow(library: AnyLibrary, job_id: str, progress: Progress, task: TaskID) -> Job:
    counted = 0
    while True:
        job = library.job(job_id)
        over = sum(document.status not in ("queued", "running") for document in job.documents)
        progress.advance(task, over - counted)
        counted = over
        if job.status in _OVER:
            return job
        time.sleep(_POLL_SECONDS)


def _batches(files: Iterable[SourceFile]) -> Iterator[list[SourceFile]]:
    """Small files of a folder go together, large ones alone."""
    batch: list[SourceFile] = []
    size = 0
    for file in files:
        length = _size(file.path)
        full = len(batch) == _FILES_TOGETHER or size + length > TOGETHER
        if batch and (full or file.folder != batch[0].folder):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += length
    if batch:
        yield batch


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # Opening it will say why.
        return 0


def keep_in_step(library: AnyLibrary, folders: Sequence[Path], found: Walk, console: Console) -> None:
    """Ingest what is new or changed in `folders`, and delete what is gone, until Ctrl-C. found: what was ingested."""
    import watchfiles

    seen = _states(found)
    _delete_gone(library, folders, found, console)
    console.print("watching; Ctrl-C ends it")
    caught_up = False
    try:
        for changes in watchfiles.watch(
            *folders,
            watch_filter=lambda _, path: _matters(Path(path), folders),
            rust_timeout=_SETTLING_MS,
            yield_on_timeout=True,
        ):
            if not changes and caught_up:
                continue
            # Once without being told: what changed before the watch began was seen by nobody.
            caught_up = True
            found = walk(folders)
            states = _states(found)
            changed = [file for file in found.files if seen.get(file.path) != states[file.path]]
            try:
                if changed:
                    ingest(library, Walk(changed), console).show(console, 0)
                if seen.keys() - states.keys():
                    _delete_gone(library, folders, found, console)
            except ServerError as error:
                # The next change tries again.
                console.print(str(error), style="red", markup=False)
                continue
            seen = states
    except KeyboardInterrupt:
        console.print("no longer watching")


def _matters(path: Path, folders: Sequence[Path]) -> bool:
    """Whether a change of `path` can change what is ingested. The data folder, say, may lie hidden in a folder."""
    inner = next((path.relative_to(folder) for folder in folders if path.is_relative_to(folder)), path)
    return inner.name == RULES or not any(part.startswith(".") for part in inner.parts)


def _states(found: Walk) -> dict[Path, tuple[int, int] | None]:
    states: dict[Path, tuple[int, int] | None] = {}
    for file in found.files:
        try:
            status = file.path.stat()
            states[file.path] = (status.st_mtime_ns, status.st_size)
        except OSError:
            states[file.path] = None
    return states


def _delete_gone(library: AnyLibrary, folders: Sequence[Path], found: Walk, console: Console) -> None:
    """Delete documents that came from these folders and whose files are no longer there, or are ignored by now."""
    watched = {str(folder.resolve()) for folder in folders}
    there = {file.name for file in found.files}
    gone = [
        document
        for document in library.documents()
        if document.metadata.get("folder") in watched and document.name not in there
    ]
    for document in gone:
        library.delete(document.id)
        console.print(f"deleted {document.name}", markup=False, soft_wrap=True)
