"""OpenAI's API, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.app.service import Service

pytestmark = [pytest.mark.model, pytest.mark.service]

MODEL = "smollm2-135m-instruct"
NARVA = {"role": "user", "content": "When does the ferry to Narva leave?"}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **options}
    )


def said(answer: Any) -> dict[str, str]:
    return {"role": "assistant", "content": answer.choices[0].message.content}


def test_an_answer_has_its_sources_its_session_and_its_counts(service: Service, client: openai.OpenAI) -> None:
    answer = complete(client, [NARVA])
    about = answer.keepwhole
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert "Narva.md" in [source["name"] for source in about["sources"]]
    links = [note.url_citation for note in answer.choices[0].message.annotations]
    assert {link.title for link in links} == {f"{s['name']} > {s['heading']}" for s in about["sources"]}
    assert all(link.url.startswith(service.url) for link in links)
    history = service.items(f"/v1/sessions/{about['session_id']}/messages")
    assert [message["content"] for message in history] == [NARVA["content"], answer.choices[0].message.content]


def test_pieces_join_to_the_whole_and_end_with_usage(client: openai.OpenAI) -> None:
    whole = complete(client, [NARVA])
    stream = complete(client, [NARVA], stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"
    assert pieces[-1].usage == whole.usage
    assert pieces[0].keepwhole["sources"] == whole.keepwhole["sources"]
    assert not [p for p in complete(client, [NARVA], stream=True) if p.usage]


def test_a_history_that_is_sent_again_goes_on_in_its_session(service: Service, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Answer in five words."}, NARVA]
    sessions, cached = set(), []
    for question in ("What do tickets to Narva cost?", "From which pier does it leave?"):
        answer = complete(client, messages)
        sessions.add(answer.keepwhole["session_id"])
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        # Clients trim.
        messages += [
            {"role": "assistant", "content": f"  {said(answer)['content']}\n"},
            {"role": "user", "content": question},
        ]
    (session,) = sessions
    assert cached[1] > cached[0]
    assert service.http.get(f"/v1/sessions/{session}").json()["system_prompt"] == "Answer in five words."
    # Another system prompt is another conversation.
    other = complete(client, [{"role": "system", "content": "Answer in six words."}, *messages[1:]])
    assert other.keepwhole["session_id"] != session


def test_an_edited_history_forks_at_the_edit(service: Service, client: openai.OpenAI) -> None:
    first = complete(client, [{"role": "user", "content": "When does the ferry to Piran leave?"}])
    start = [{"role": "user", "content": "When does the ferry to Piran leave?"}, said(first)]
    second = complete(client, [*start, {"role": "user", "content": "What does a ticket cost?"}])
    edited = complete(client, [*start, {"role": "user", "content": "From which pier?"}])
    origin = first.keepwhole["session_id"]
    assert second.keepwhole["session_id"] == origin
    fork = edited.keepwhole["session_id"]
    assert service.http.get(f"/v1/sessions/{fork}").json()["forked_from"] == origin
    asked = [turn["question"] for turn in service.items(f"/v1/sessions/{fork}/turns")]
    assert asked == ["When does the ferry to Piran leave?", "From which pier?"]
    assert edited.usage.prompt_tokens_details.cached_tokens > 0
    # Each of the two goes on where it was.
    again = complete(client, [*start, {"role": "user", "content": "From which pier?"}, said(edited), NARVA])
    assert again.keepwhole["session_id"] == fork


def test_what_only_the_client_knows_is_told_to_the_session(service: Service, client: openai.OpenAI) -> None:
    greeting = [{"role": "assistant", "content": "Hello, I am Ines of the harbour office."}]
    past = [
        {"role": "user", "content": "My boat is called Marguerite."},
        {"role": "assistant", "content": "A fine name."},
    ]
    messages = [*greeting, *past, {"role": "user", "content": "What is my boat called?"}]
    answer = complete(client, messages, model=f"{MODEL}:no-retrieval")
    assert answer.keepwhole["sources"] == []
    assert "Marguerite" in answer.choices[0].message.content
    session = answer.keepwhole["session_id"]
    assert [turn["question"] for turn in service.items(f"/v1/sessions/{session}/turns")] == [
        "",
        "My boat is called Marguerite.",
        "What is my boat called?",
    ]
    kept = sum(block["tokens"] for block in service.blocks(session, state="resident"))
    assert kept == answer.keepwhole["cache"]["resident_tokens"]
    # A shared beginning and something else behind it: a fork that is told the rest.
    longer = [*messages, said(answer), *past, {"role": "user", "content": "And again?"}]
    forked = complete(client, longer, model=f"{MODEL}:no-retrieval")
    assert service.http.get(f"/v1/sessions/{forked.keepwhole['session_id']}").json()["forked_from"] == session
    assert forked.usage.prompt_tokens_details.cached_tokens >= kept


def test_a_history_longer_than_the_budget_is_answered_within_it(service: Service, client: openai.OpenAI) -> None:
    long = [
        {"role": role, "content": f"{role} {n}: " + "The tide turns at the outer buoy before noon. " * 12}
        for n in range(30)
        for role in ("user", "assistant")
    ]
    answer = complete(client, [*long, NARVA], max_tokens=4)
    cache = answer.keepwhole["cache"]
    assert cache["resident_tokens"] <= cache["budget_tokens"]
    turns = service.items(f"/v1/sessions/{answer.keepwhole['session_id']}/turns")
    assert [turn["question"] for turn in turns] == [m["content"] for m in long if m["role"] == "user"] + [
        NARVA["content"]
    ]


LONG = [
    {"role": role, "content": f"{role} {n}: " + "The tide turns at the outer buoy before noon. " * 12}
    for n in range(30)
    for role in ("user", "assistant")
]


def test_a_history_whose_beginning_was_never_read_goes_on_in_its_session(client: openai.OpenAI) -> None:
    plain = f"{MODEL}:no-retrieval"
    first = complete(client, [*LONG, {"role": "user", "content": "What turns?"}], model=plain, max_tokens=4)
    longer = [*LONG, {"role": "user", "content": "What turns?"}, said(first), {"role": "user", "content": "When?"}]
    second = complete(client, longer, model=plain, max_tokens=4)
    assert second.keepwhole["session_id"] == first.keepwhole["session_id"]
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_the_end_of_a_history_is_not_the_history(service: Service, client: openai.OpenAI) -> None:
    """Or who never sent its beginning would be let into a session that holds it."""
    plain = f"{MODEL}:no-retrieval"
    secret = [
        {"role": "user", "content": "My secret word is zanzibar. " + "Pad words stand here. " * 400},
        {"role": "assistant", "content": "Noted."},
    ]
    end = [
        {"role": "user", "content": "Hello there, friend of the harbour."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is up at the pier?"},
    ]
    theirs = complete(client, [*secret, *end], model=plain, max_tokens=4)
    ours = complete(client, [*end, said(theirs), {"role": "user", "content": "And you?"}], model=plain, max_tokens=4)
    session = ours.keepwhole["session_id"]
    assert session != theirs.keepwhole["session_id"]
    assert service.http.get(f"/v1/sessions/{session}").json()["forked_from"] is None
    assert "zanzibar" not in service.http.get(f"/v1/sessions/{session}/messages").text


def test_a_session_of_another_budget_is_not_gone_on_with(service: Service, client: openai.OpenAI) -> None:
    small = service.session(budget_tokens=64)
    asked = "Tiny budgets, hello."
    answer = service.tell(small, asked, top_k=0, max_tokens=4).json()["content"]
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    question = {"role": "user", "content": "Go on now, and tell me more of it. " * 12}
    gone_on = complete(client, [*talk, question], model=f"{MODEL}:no-retrieval", max_tokens=4)
    assert gone_on.keepwhole["session_id"] != small
    assert gone_on.keepwhole["cache"]["budget_tokens"] == 2048


def test_the_same_history_at_once_is_answered_to_each(service: Service) -> None:
    async def both() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            first = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "What is rain?"}], max_tokens=6
            )
            messages: list[Any] = [{"role": "user", "content": "What is rain?"}, said(first)]
            messages.append({"role": "user", "content": "And snow?"})
            ask = client.chat.completions.create
            return await asyncio.gather(*(ask(model=MODEL, messages=messages, max_tokens=12) for _ in range(3)))

    answers = asyncio.run(both())
    assert len({answer.keepwhole["session_id"] for answer in answers}) == 3
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_who_aborts_ends_the_turn(service: Service) -> None:
    async def abort() -> str:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Count to a thousand."}],
                stream=True,
                max_tokens=900,
                extra_body={"retrieval": False, "allow_repetition": True},
            )
            async for piece in stream:
                if piece.choices and piece.choices[0].delta.content:
                    await stream.close()
                    break
                session = str(getattr(piece, "keepwhole", {}).get("session_id"))
            return session

    session = asyncio.run(abort())
    deadline = time.monotonic() + 20
    while service.http.get("/ready").json()["turns"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert service.items(f"/v1/sessions/{session}/turns")[0]["finish_reason"] == "cancelled"


def test_log_probabilities_and_bias(client: openai.OpenAI) -> None:
    answer = complete(client, [NARVA], logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 16
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= token.top_logprobs[0].logprob <= 0
    streamed = [p for p in complete(client, [NARVA], stream=True, logprobs=True) if p.choices and p.choices[0].logprobs]
    assert [t.token for p in streamed for t in p.choices[0].logprobs.content] == [t.token for t in tokens]
    other = complete(client, [NARVA], logit_bias={str(n): -100 for n in range(2, 40_000)}, logprobs=True)
    assert other.choices[0].logprobs.content[0].token != tokens[0].token


def test_log_probabilities_are_there_whatever_the_answer(service: Service, client: openai.OpenAI) -> None:
    hit = complete(
        client, [NARVA], logprobs=True, stop=["The"], extra_body={"retrieval": False}, logit_bias={"504": 100}
    )
    assert hit.choices[0].logprobs is not None
    told = service.tell(service.session(), "Say hi.", top_k=0, max_tokens=2, logprobs=2).json()
    assert "".join(one["token"] for one in told["logprobs"]) == told["content"]
    assert "logprobs" not in service.tell(service.session(), "Say hi.", top_k=0, max_tokens=2).json()


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str:
        hot = complete(client, [NARVA], temperature=1.3, seed=seed, extra_body={"top_k": 50, "min_p": 0.01})
        return str(hot.choices[0].message.content)

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(1, 5)}) > 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"retrieval": {"top_k": 21}}}, "retrieval"),
        ({"messages": []}, "messages"),
        ({"messages": [NARVA, {"role": "assistant", "content": "x"}]}, "messages.1.role"),
        ({"messages": [NARVA, {"role": "system", "content": "x"}, NARVA]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "name": "y"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": " \u200b "}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **{"messages": [NARVA], **options})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


def test_parts_of_text_are_one_text_and_what_clients_send_along_is_taken(client: openai.OpenAI) -> None:
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "When does the ferry "}, {"type": "text", "text": "to Narva leave?"}],
        }
    ]
    plain, cut = (
        complete(client, [NARVA]),
        complete(client, parts, user="u", metadata={"a": "b"}, store=True, n=1, tools=[]),
    )
    assert said(cut) == said(plain)
    echoed = plain.choices[0].message.model_dump(exclude={"keepwhole"})
    assert complete(client, [NARVA, echoed, NARVA], max_completion_tokens=3).usage.completion_tokens == 3


def test_models_and_a_name_that_is_none(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == [MODEL, f"{MODEL}:no-retrieval", "wordllama-256"]
    assert client.models.retrieve(names[1]).id == names[1]
    for ask in (lambda: client.models.retrieve("gpt-4"), lambda: complete(client, [NARVA], model="gpt-4")):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"
        assert MODEL in caught.value.message


def test_embeddings_are_those_of_search_in_both_forms(client: openai.OpenAI) -> None:
    texts = ["A ferry to Narva.", "A boat across the bay.", "Tax law."]
    packed = client.embeddings.create(model="wordllama-256", input=texts)
    plain = client.embeddings.create(model="wordllama-256", input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-4)
    ferry, boat, tax = (one.embedding for one in packed.data)
    assert sum(a * b for a, b in zip(ferry, boat, strict=True)) > sum(a * b for a, b in zip(ferry, tax, strict=True))
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="wordllama-256", input="x", dimensions=8)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_errors_have_openais_shape_whatever_is_wrong(service: Service) -> None:
    for body, content_type, status in (
        (b"{", "application/json", 400),
        (b"{}", "application/json", 400),
        (b"x", "text/plain", 415),
    ):
        answer = httpx.post(f"{service.url}/v1/chat/completions", content=body, headers={"Content-Type": content_type})
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
