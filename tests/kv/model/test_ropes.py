"""Renumbering through the model's own rope, plain and scaled, against rotating the raw keys anew."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kv import KVCacheBuilder, KVCacheConfig
from tests.kv.feeding import tiny_llama

ROPES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def tiny(scaling: dict[str, Any] | None, traditional: bool) -> Any:
    options = {"rope_scaling": scaling, "rope_traditional": traditional, "max_position_embeddings": 256}
    return tiny_llama(width=16, layers=2, words=100, **options)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("scaling", ROPES)
def test_renumbered_keys_are_those_of_their_new_positions(scaling: str, traditional: bool) -> None:
    model = tiny(ROPES[scaling], traditional)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(chunkkv_budget=40, chunkkv_scope="model", chunkkv_recent=4))
    raw: list[list[Any]] = [[], []]
    # The keys before rotation, as the model makes them.
    for layer, block in enumerate(model.layers):
        rope = block.self_attn.rope

        def spied(x: mx.array, offset: Any = 0, *, rope: Any = rope, layer: int = layer) -> mx.array:
            if x.shape[1] == 2:
                raw[layer].append(np.array(x[0]))
            return rope(x, offset=offset)

        block.self_attn.rope = spied
    tokens = np.random.default_rng(3).integers(0, 100, 200)
    for start in range(0, 200, 25):
        mx.eval(model(mx.array(tokens[start : start + 25])[None], cache=caches))
    group = caches[0].group
    positions = group.positions()[0]
    assert positions[-1] == 199
    ropes = [block.self_attn.rope.__kwdefaults__["rope"] for block in model.layers]
    group.rebase(ropes)
    kept = len(positions)
    assert group.positions()[0] == list(range(kept))
    assert {cache.offset for cache in caches} == {kept}
    for layer, cache in enumerate(caches):
        chosen = np.concatenate(raw[layer], axis=1)[:, positions]
        expected = ropes[layer](mx.array(chosen)[None], offset=0)
        np.testing.assert_allclose(np.array(cache.keys[0]), np.array(expected)[0], atol=2e-5)
