"""What names a history: a digest of the system prompt and of every question and answer so far.

A client that resends its whole history is so led back to the session that holds it, and to the turn from which it goes
another way. White space around a text does not count: clients trim it.
"""

from __future__ import annotations

import hashlib


def first(system_prompt: str) -> str:
    """The name of a history in which nothing was asked yet."""
    return _digest("", system_prompt)


def following(chain: str, question: str, answer: str) -> str:
    """The name of a history with one more exchange."""
    return _digest(chain, question, answer)


def _digest(chain: str, *texts: str) -> str:
    digest = hashlib.blake2b(chain.encode(), digest_size=16)
    for text in texts:
        encoded = text.strip().encode(errors="replace")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
