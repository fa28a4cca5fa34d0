"""From a whole history, as clients of OpenAI's API send it every time, to the session that holds it.

The session whose history is the same goes on. Where a history goes another way than a session did, a fork of that
session does, from the last exchange they share; what only the client knows of is told to it. A history that no session
shares begins a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from app.audit import chains
from app.audit.records import TurnRecord
from app.chat import ChatService, NewSession
from app.errors import Conflict
from app.turns.feed import TurnFeed
from app.turns.prompts import DEFAULT_SYSTEM_PROMPT
from app.turns.request import Question

Exchange = tuple[str, str]

# Sessions that share a history and are all at work are not tried without end.
_MOST_TRIED = 8


@dataclass(frozen=True)
class History:
    """What came before a question. system_prompt: None for the default. exchanges: questions with their answers."""

    system_prompt: str | None
    exchanges: Sequence[Exchange]

    def names(self) -> list[str]:
        """The name of each of its beginnings, the empty one first; see `app.audit.chains`."""
        names = [chains.first(DEFAULT_SYSTEM_PROMPT if self.system_prompt is None else self.system_prompt)]
        for question, answer in self.exchanges:
            names.append(chains.following(names[-1], question, answer))
        return names


class Conversations:
    """Asks within histories instead of sessions. model, budget_tokens: of the sessions that it goes on with."""

    def __init__(self, chat: ChatService, model: str, budget_tokens: int) -> None:
        self._chat = chat
        self._model = model
        self._budget_tokens = budget_tokens

    async def ask(self, history: History, question: Question) -> tuple[str, TurnFeed]:
        """Start a turn behind a history. Returns the session's id, and the turn.

        Raises what `ChatService.create` and `ChatService.ask` raise, but for Conflict: a session that is at work is not
        waited for, another one is told its history.
        """
        for depth, turn, is_last in await self._shared(history):
            rest = history.exchanges[depth:]
            try:
                if is_last and not rest:
                    # Only if nobody else has gone on with it in the meantime.
                    return turn.session_id, await self._chat.ask(turn.session_id, question, behind=turn.id)
                fork = await self._chat.fork(turn.session_id, before=turn.number + 1, told=rest)
                return fork.id, await self._chat.ask(fork.id, question)
            except (Conflict, LookupError):
                continue
        while True:
            session = await self._chat.create(
                NewSession("", history.system_prompt, None, "chunkkv", "attn_mass"), told=history.exchanges
            )
            # Whoever sends the same history at this moment may have found the new session, and gone on with it first.
            with suppress(Conflict):
                return session.id, await self._chat.ask(session.id, question)

    async def _shared(self, history: History) -> list[tuple[int, TurnRecord, bool]]:
        """Turns that end a beginning of the history: how many exchanges that has, the turn, whether it is its session's
        last. The longest first, and of those the ones that can go on as they are.
        """
        names = history.names()[1:]
        found = await asyncio.to_thread(self._chat.store.find_history, names, self._model, self._budget_tokens)
        depths = {name: depth for depth, name in enumerate(names, start=1)}
        shared = [(depths[name], turn, is_last) for name, turn, is_last in found]
        return sorted(shared, key=lambda one: (-one[0], not one[2]))[:_MOST_TRIED]
