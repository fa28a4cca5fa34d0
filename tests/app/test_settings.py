from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.settings import Settings, is_loopback, read_settings
from app.web.bodies import AskBody, DocumentBody, FilterBody, SearchBody, SessionBody
from ingest.records import Filter


def read(**variables: str) -> Settings:
    return read_settings({f"KEEPWHOLE_{name}": value for name, value in variables.items()})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("host", "127.0.0.2", "127.0.0.2"),
        ("port", "9000", 9000),
        ("data_dir", "/tmp/here", Path("/tmp/here")),
        ("model", "some/model", "some/model"),
        ("api_key", "s3cret!", "s3cret!"),
        ("budget_tokens", "512", 512),
        ("prefill_step", "128", 128),
        ("kv_memory_mb", "77", 77),
        ("embedder", "none", "none"),
        ("passage_tokens", "64", 64),
        ("max_upload_mb", "3", 3),
        ("ingest_seconds", "9", 9),
        ("max_turns", "5", 5),
        ("blas", "none", "none"),
        ("log_level", "debug", "debug"),
        ("log_format", "json", "json"),
    ],
)
def test_each_variable_sets_its_setting_and_no_other(name: str, text: str, value: object) -> None:
    settings = read(**{name.upper(): text})
    changed = {field for field in Settings.__struct_fields__ if getattr(settings, field) != getattr(Settings(), field)}
    assert changed == {name}
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is (type(value) if name != "data_dir" else type(Path()))


def test_no_variable_gives_the_defaults_that_the_readme_states() -> None:
    settings = read_settings({"PATH": "/bin", "keepwhole_port": "1", "XKEEPWHOLE_PORT": "2"})
    assert settings == Settings()
    assert (settings.host, settings.port, settings.api_key) == ("127.0.0.1", 8765, None)
    assert settings.folder == Path.home() / ".keepwhole"
    assert (settings.budget_tokens, settings.prefill_step, settings.kv_memory_mb) == (2048, 256, 2048)
    assert (settings.passage_tokens, settings.max_upload_mb, settings.max_turns) == (192, 20, 16)
    assert (settings.blas, settings.log_level, settings.log_format) == ("auto", "info", "auto")
    assert settings.max_upload_bytes == 20_000_000


def test_the_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWHOLE_PORT", "4321")
    assert read_settings().port == 4321
    assert read_settings({}).port == 8765


@pytest.mark.parametrize("variable", ["KEEPWHOLE_BOGUS", "KEEPWHOLE_", "KEEPWHOLE_port", "KEEPWHOLE_PORTS"])
def test_an_unknown_variable_is_refused_with_those_there_are(variable: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}: no such setting; .*KEEPWHOLE_PORT, .*KEEPWHOLE_LOG_FORMAT"):
        read_settings({variable: "1"})


NUMBERS = {
    "port": (0, 65535),
    "budget_tokens": (64, 1_000_000),
    "prefill_step": (1, 8192),
    "kv_memory_mb": (1, 1_000_000),
    "passage_tokens": (16, 2048),
    "max_upload_mb": (1, 1024),
    "ingest_seconds": (1, 86_400),
    "max_turns": (1, 256),
}


@pytest.mark.parametrize("text", ["", "many", "1.5", "0x10", "1e3", "--1", "8 0"])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_whole_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^KEEPWHOLE_{name.upper()}: '{text}' is not a whole number$"):
        read(**{name.upper(): text})


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_limits_at_both_ends(name: str) -> None:
    least, most = NUMBERS[name]
    for value in (least, most):
        assert getattr(read(**{name.upper(): str(value)}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"^KEEPWHOLE_{name.upper()}: {value} is not between {least} and {most}$"):
            read(**{name.upper(): str(value)})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("log_level", ["debug", "info", "warning", "error"]), ("log_format", ["auto", "text", "json"])],
)
def test_words_are_of_a_list(name: str, allowed: list[str]) -> None:
    for word in allowed:
        assert getattr(read(**{name.upper(): word}), name) == word
    for word in ("", "INFO", "verbose"):
        with pytest.raises(ValueError, match=f"^KEEPWHOLE_{name.upper()}: '{word}' is not one of {', '.join(allowed)}"):
            read(**{name.upper(): word})


LOCAL = ["127.0.0.1", "127.8.9.10", "::1", "localhost"]
REACHABLE = ["0.0.0.0", "::", "192.168.1.5", "example.org", "128.0.0.1", "localhost.example.org", ""]


@pytest.mark.parametrize("host", LOCAL)
def test_a_loopback_host_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert read(HOST=host).host == host


@pytest.mark.parametrize("host", REACHABLE)
def test_another_host_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ValueError, match=f"^KEEPWHOLE_HOST: {host} is reachable .* KEEPWHOLE_API_KEY"):
        read(HOST=host)
    assert read(HOST=host, API_KEY="key").host == host
    with pytest.raises(ValueError, match="KEEPWHOLE_HOST"):
        read_settings({}, host=host)


@pytest.mark.parametrize("key", ["", "clé", "a\nb", "a\0", "🔑", "key "])
def test_a_key_is_printable_ascii_and_is_not_repeated_in_the_refusal(key: str) -> None:
    with pytest.raises(
        ValueError, match=r"^KEEPWHOLE_API_KEY: must be printable ASCII, not empty, with no space at either end$"
    ):
        read(HOST="0.0.0.0", API_KEY=key)


def test_overrides_go_over_the_environment_unless_they_are_none() -> None:
    environ = {"KEEPWHOLE_PORT": "1111", "KEEPWHOLE_LOG_LEVEL": "error"}
    settings = read_settings(environ, port=0, log_level=None, data_dir="/data", budget_tokens="99")
    assert (settings.port, settings.log_level) == (0, "error")
    assert (settings.data_dir, settings.budget_tokens) == (Path("/data"), 99)
    assert environ == {"KEEPWHOLE_PORT": "1111", "KEEPWHOLE_LOG_LEVEL": "error"}


def test_an_override_hides_a_bad_variable_and_has_the_same_limits() -> None:
    assert read_settings({"KEEPWHOLE_PORT": "nonsense"}, port=5).port == 5
    with pytest.raises(ValueError, match=r"^KEEPWHOLE_PORT: 70000 is not between"):
        read_settings({}, port=70000)


@pytest.mark.parametrize(
    ("text", "folder"), [("~", ""), ("~/a/b", "a/b"), ("/x/~", None), ("rel/ative", None)], ids=lambda value: str(value)
)
def test_the_home_folder_is_put_into_data_dir(monkeypatch, tmp_path: Path, text: str, folder: str | None) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = read(DATA_DIR=text)
    assert settings.data_dir == Path(text)
    assert settings.folder == (Path(text) if folder is None else tmp_path / folder)


@pytest.mark.parametrize(("megabytes", "size"), [("1", 1_000_000), ("1024", 1_024_000_000)])
def test_the_upload_limit_in_bytes(megabytes: str, size: int) -> None:
    assert read(MAX_UPLOAD_MB=megabytes).max_upload_bytes == size


# Request bodies, as a client sends them.


def decode(kind: type[Any], body: Any) -> Any:
    return msgspec.json.decode(json.dumps(body), type=kind)


@pytest.mark.parametrize(
    ("field", "inside"),
    [
        ("content", ["x", " x ", "\n.", "x" * 100_000]),
        ("top_k", [0, 20]),
        ("max_tokens", [None, 1, 1_000_000]),
        ("temperature", [0, 0.0, 1e-9, 2, 2.0]),
        ("stop", [None, [], "a", "a" * 64, ["a"] * 4, ["a" * 64, "\n", "👩‍👩‍👧‍👦", "é"]]),
        ("stream", [True, False]),
        ("filter", [None, {}, {"document_id": "d"}, {"document_id": ["d", "e"], "kind": "code", "name": "n"}]),
    ],
)
def test_a_message_just_inside_the_limits(field: str, inside: list[Any]) -> None:
    for value in inside:
        got = getattr(decode(AskBody, {"content": "x", field: value}), field)
        assert got == (FilterBody(**value) if field == "filter" and value is not None else value)


@pytest.mark.parametrize(
    ("field", "value", "detail"),
    [
        ("content", "", "content: '' has no text; it needs at least one visible character"),
        ("content", " \t\n\u3000", r"content: ' \t\n\u3000' has no text; it needs at least one visible character"),
        ("content", " " * 90, f"content: '{' ' * 20}' has no text; it needs at least one visible character"),
        ("top_k", -1, "top_k: -1 is not between 0 and 20"),
        ("top_k", 21, "top_k: 21 is not between 0 and 20"),
        ("max_tokens", 0, "max_tokens: 0 is not between 1 and 1000000"),
        ("max_tokens", 1_000_001, "max_tokens: 1000001 is not between 1 and 1000000"),
        ("max_tokens", 10**30, f"max_tokens: {10**30} is not between 1 and 1000000"),
        ("temperature", -0.001, "temperature: -0.001 is not between 0 and 2"),
        ("temperature", 2.001, "temperature: 2.001 is not between 0 and 2"),
        ("stop", "", "stop: a string of 0 characters is not between 1 and 64"),
        ("stop", "a" * 65, "stop: a string of 65 characters is not between 1 and 64"),
        ("stop", ["a", ""], "stop: a string of 0 characters is not between 1 and 64"),
        ("stop", ["a", "a" * 65], "stop: a string of 65 characters is not between 1 and 64"),
        ("stop", ["a"] * 5, "stop: 5 strings, the limit is 4"),
    ],
)
def test_a_message_just_outside_a_limit_names_field_value_and_limit(field: str, value: Any, detail: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(AskBody, {"content": "x", field: value})
    assert str(caught.value) == detail


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -float("inf")])
def test_a_temperature_is_finite(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"^temperature: "):
        AskBody(content="x", temperature=temperature)


def test_a_message_has_defaults_and_its_stops_as_a_list() -> None:
    body = decode(AskBody, {"content": "x"})
    assert (body.top_k, body.filter, body.max_tokens, body.temperature, body.stream) == (4, None, None, None, True)
    assert [decode(AskBody, {"content": "x", "stop": stop}).stop_strings for stop in (None, "a", ["a", "b"])] == [
        [],
        ["a"],
        ["a", "b"],
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"title": "t" * 200},
        {"title": "👍" * 200},
        {"method": "chunkkv"},
        {"score": "attn_mass"},
        {"score": "key_norm"},
        {"budget_tokens": 1},
        {"budget_tokens": 1_000_000},
        {"budget_tokens": None, "system_prompt": None},
        {"system_prompt": ""},
    ],
)
def test_a_session_just_inside_the_limits(body: dict[str, Any]) -> None:
    got = decode(SessionBody, body)
    default = {"title": "", "system_prompt": None, "budget_tokens": None, "method": "chunkkv", "score": "attn_mass"}
    assert msgspec.to_builtins(got) == default | body


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"title": "t" * 201}, "title: 201 characters, the limit is 200"),
        ({"method": "magic"}, "method: 'magic' is not one of chunkkv"),
        ({"method": "m" * 99}, f"method: '{'m' * 40}' is not one of chunkkv"),
        ({"score": ""}, "score: '' is not one of attn_mass, key_norm"),
        ({"budget_tokens": 0}, "budget_tokens: 0 is not between 1 and 1000000"),
        ({"budget_tokens": 1_000_001}, "budget_tokens: 1000001 is not between 1 and 1000000"),
    ],
)
def test_a_session_just_outside_a_limit_names_field_value_and_limit(body: dict[str, Any], detail: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        decode(SessionBody, body)
    assert str(caught.value) == detail


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (AskBody, {"content": "x"}),
        (SessionBody, {}),
        (SearchBody, {"query": "x"}),
        (DocumentBody, {"name": "n", "text": "t"}),
        (FilterBody, {}),
    ],
)
def test_bodies_need_their_fields_and_take_no_others(kind: type[Any], least: dict[str, Any]) -> None:
    decode(kind, least)
    with pytest.raises(msgspec.ValidationError, match="unknown field `bogus`"):
        decode(kind, least | {"bogus": 1})
    for field in least:
        with pytest.raises(msgspec.ValidationError, match=f"required field `{field}`"):
            decode(kind, {name: value for name, value in least.items() if name != field})


def test_a_filter_becomes_the_librarys_own() -> None:
    body = decode(FilterBody, {"document_id": ["d"], "name": "n", "kind": "code", "metadata": {"a": 1}})
    assert body.to_filter() == Filter(document_id=["d"], name="n", kind="code", metadata={"a": 1})
    assert FilterBody().to_filter() == Filter()
    assert decode(SearchBody, {"query": "x"}) == SearchBody(query="x", top_k=5, filter=None)
