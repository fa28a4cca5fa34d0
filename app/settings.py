"""The service's settings: one struct, read from the environment."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

PREFIX = "KEEPWHOLE_"
# Scheme, host and port and nothing else, as browsers send it.
_ORIGIN = re.compile(
    r"https?://[a-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?|(chrome|moz)-extension://[a-z0-9-]+"
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, with its unit. Each is read from the environment variable KEEPWHOLE_<NAME>.

    host, port: where to listen. data_dir: where the databases live. model: the embedded model's name, an mlx-lm folder
    or a hub name. api_key: the bearer token that requests must carry; None asks for none. origins: other sites
    whose pages may call this server from their visitors' browsers, such as "https://chat.example:3000", with commas
    between; "*" for all, which needs an API key. budget_tokens: default KV
    budget of a session, in tokens per layer. prefill_step: most tokens of a forward pass. kv_memory_mb: most memory
    beside the model: the K/V of sessions, the bank, and a quarter for what comes and goes in a forward pass. Idle
    sessions beyond it go to disk, least recently used first, and come back when needed; turns whose sessions could
    grow beyond it wait for others to end, but for one that has nobody to wait for. snapshot_disk_mb: most idle
    sessions on disk; what does not fit is rebuilt by reading its blocks; 0 keeps none. bank_memory_mb, bank_disk_mb:
    K/V of passages and of exchanges that left, for reuse, in memory and then on disk; 0 turns a tier off, and both at
    0 make every session read its passages itself. The first is a part of kv_memory_mb: absent, a quarter of it, 512 at
    most. bank_recompute: first tokens of a passage from the bank that a session reads anew, behind what it holds.
    bank_ahead: 1 reads ingested passages into the bank, as long as it has room, while nothing is asked; 0 leaves them
    to the first question that needs them. draft_tokens: most tokens of an answer that are drafted from what the session
    holds and verified in one pass, 0 for none: answers are the same.
    embedder: "wordllama", "minilm", a sentence-transformers folder, or "none"
    for full-text search alone. passage_tokens: most tokens of a passage. max_upload_mb: most megabytes of one
    request's body. ingest_seconds: most seconds that one document may take to be read and cut. max_turns: turns at
    work or waiting at once; more are answered 503. quantize: 8 or 4 bits for the weights of a model that
    comes unquantised, 0 for as they are. blas: see `kv.cpu.blas`. log_level: debug, info, warning or error.
    log_format: auto (text on a terminal, else JSON), text or json.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    data_dir: Path = Path("~/.keepwhole")
    model: str = "smollm2-135m-instruct"
    api_key: str | None = None
    origins: str = ""
    budget_tokens: int = 2048
    prefill_step: int = 256
    kv_memory_mb: int = 2048
    snapshot_disk_mb: int = 4096
    bank_memory_mb: int | None = None
    bank_disk_mb: int = 4096
    bank_recompute: int = 0
    bank_ahead: int = 1
    draft_tokens: int = 7
    embedder: str = "wordllama"
    passage_tokens: int = 192
    max_upload_mb: int = 20
    ingest_seconds: int = 300
    max_turns: int = 16
    quantize: int = 0
    blas: str = "auto"
    log_level: str = "info"
    log_format: str = "auto"

    def __post_init__(self) -> None:
        limits = {
            "port": (0, 65535),
            "budget_tokens": (64, 1_000_000),
            "prefill_step": (1, 8192),
            "kv_memory_mb": (1, 1_000_000),
            "snapshot_disk_mb": (0, 10_000_000),
            "bank_memory_mb": (0, 1_000_000),
            "bank_disk_mb": (0, 10_000_000),
            "bank_recompute": (0, 2048),
            "bank_ahead": (0, 1),
            "draft_tokens": (0, 7),
            "passage_tokens": (16, 2048),
            "max_upload_mb": (1, 1024),
            "ingest_seconds": (1, 86_400),
            "max_turns": (1, 256),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{PREFIX}{name.upper()}: {value} is not between {least} and {most}")
        if self.bank_memory_mb is not None and self.bank_memory_mb > self.kv_memory_mb:
            raise ValueError(
                f"{PREFIX}BANK_MEMORY_MB: {self.bank_memory_mb} is more than {PREFIX}KV_MEMORY_MB, "
                f"{self.kv_memory_mb}, which it is a part of"
            )
        for name, allowed in (
            ("quantize", (0, 4, 8)),
            ("log_level", ("debug", "info", "warning", "error")),
            ("log_format", ("auto", "text", "json")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{PREFIX}{name.upper()}: {getattr(self, name)!r} is not one of {', '.join(map(str, allowed))}"
                )
        if (key := self.api_key) is not None and not (
            key.isascii() and key.isprintable() and key and key == key.strip()
        ):
            raise ValueError(f"{PREFIX}API_KEY: must be printable ASCII, not empty, with no space at either end")
        for origin in self.allowed_origins:
            if origin == "*" and self.api_key is None:
                raise ValueError(
                    f"{PREFIX}ORIGINS: '*' opens a server without a key to every site; set {PREFIX}API_KEY"
                )
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{PREFIX}ORIGINS: {origin!r} is not like https://chat.example or http://localhost:3000"
                )
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"{PREFIX}HOST: {self.host} is reachable from other machines; set {PREFIX}API_KEY or use 127.0.0.1"
            )

    @property
    def allowed_origins(self) -> list[str]:
        """`origins` as a list."""
        return [origin.strip() for origin in self.origins.split(",") if origin.strip()]

    @property
    def folder(self) -> Path:
        """`data_dir` with the home folder put in."""
        return self.data_dir.expanduser()

    @property
    def bank_memory_bytes(self) -> int:
        """The bank's part of the K/V in memory, in bytes."""
        if self.bank_memory_mb is not None:
            return self.bank_memory_mb * 1_000_000
        return min(self.kv_memory_mb * 1_000_000 // 4, 512_000_000)

    @property
    def session_memory_bytes(self) -> int:
        """The sessions' part of the K/V in memory, in bytes. A quarter is left for what forward passes need."""
        return max(0, self.kv_memory_mb * 1_000_000 * 3 // 4 - self.bank_memory_bytes)

    @property
    def url(self) -> str:
        """Where the server is, as its own machine reaches it."""
        return f"http://{self.host}:{self.port}"

    @property
    def max_upload_bytes(self) -> int:
        """`max_upload_mb` in bytes."""
        return self.max_upload_mb * 1_000_000


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from the environment, with the overrides that are not None put over them.

    Raises ValueError naming the variable, for a bad value and for a KEEPWHOLE_ variable that is no setting.
    """
    environ = os.environ if environ is None else environ
    names = {PREFIX + name.upper(): name for name in Settings.__struct_fields__}
    given: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in names:
            raise ValueError(f"{variable}: no such setting; there are {', '.join(names)}")
        given[names[variable]] = value
    given |= {name: value for name, value in overrides.items() if value is not None}
    hints = Settings.__annotations__
    for name, value in given.items():
        if hints[name].startswith("int") and isinstance(value, str):
            try:
                given[name] = int(value)
            except ValueError:
                raise ValueError(f"{PREFIX}{name.upper()}: {value!r} is not a whole number") from None
        elif hints[name] == "Path":
            if not str(value):
                raise ValueError(f"{PREFIX}{name.upper()}: must not be empty")
            given[name] = Path(value)
    return Settings(**given)
