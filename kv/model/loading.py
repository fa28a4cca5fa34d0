"""A model ready to serve: weights, text codec, chat template, and what the session must know of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_map

from kv.config import KVCacheConfig
from kv.cpu.passes import wanting
from kv.model import oncpu, smollm2
from kv.model.sampling import Sampling
from kv.model.streams import can_share_a_pass
from kv.model.template import ChatTemplate
from kv.model.text import TextCodec


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model and what belongs to it.

    name: as given in settings. model, tokenizer: mlx-lm's. context_length: positions it was trained on.
    stop_ids: tokens that end an answer.
    ropes: each layer's rotation, in layer order. sampling: how its tokens are chosen where nobody says otherwise.
    """

    name: str
    model: Any
    tokenizer: Any
    codec: TextCodec
    template: ChatTemplate
    stop_ids: frozenset[int]
    context_length: int
    ropes: list[nn.Module]
    sampling: Sampling = field(default_factory=Sampling)

    @cached_property
    def fingerprint(self) -> bytes:
        """What K/V depends on beside the tokens: architecture, dtypes, shapes, and a sample of every weight."""
        digest = hashlib.blake2b(repr(getattr(self.model, "args", None)).encode(), digest_size=16)
        weights: list[tuple[str, mx.array]] = tree_flatten(self.model.parameters())  # type: ignore[assignment]
        for name, weight in weights:
            digest.update(f"{name} {weight.dtype} {weight.shape}".encode())
            digest.update(np.array(mx.contiguous(weight.reshape(-1)[:16]).view(mx.uint8)).tobytes())
        return digest.digest()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        sizes: list[int] = []
        tree_map(lambda array: sizes.append(array.nbytes), self.model.parameters())
        return sum(sizes)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers, by a pass that is laid out and never computed."""
        caches = KVCacheConfig(method="full").build(len(self.model.layers))
        with wanting("shapes"):
            self.model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        return sum(buffer.nbytes // buffer.shape[2] for cache in caches for buffer in cache.buffers)

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens it knows by name."""
        return len(self.tokenizer.get_vocab())

    @cached_property
    def decodes_together(self) -> bool:
        """Whether several sessions can share a forward pass; see `kv.session.together`."""
        return can_share_a_pass(self.model)


def load_model(name: str = smollm2.NAME, *, on_gpu: bool | None = None, quantize: int = 0) -> LoadedModel:
    """Load a model on the calling thread, which must be the one that runs it.

    name: the embedded model's name, an mlx-lm model folder, or a hub name.
    on_gpu: leave the model as it is (Metal, CUDA) or prepare it for the CPU; see `kv.model.oncpu`. None asks MLX for
        its default device.
    quantize: 8 or 4 bits for the weights of a model that comes unquantised; 0 for as they are.

    Raises ValueError for other bits, and if the model's layers, tokenizer or template cannot be served;
    FileNotFoundError if it is missing.
    """
    if on_gpu is None:
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
    if name == smollm2.NAME:
        model, tokenizer = smollm2.load(half=on_gpu)
        sampling = smollm2.SAMPLING
    else:
        model, tokenizer = mlx_lm.load(name)[:2]
        sampling = _own_sampling(name)
    if quantize:
        _quantize(model, quantize)
    if not on_gpu:
        model = oncpu.prepare(model)
    ropes = [getattr(getattr(layer, "self_attn", None), "rope", None) for layer in model.layers]
    if any(rope is None for rope in ropes):
        raise ValueError(f"model {name!r}: a layer has no rotary attention of its own; it cannot be served")
    codec = TextCodec(tokenizer)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        codec=codec,
        template=ChatTemplate(tokenizer, codec),
        # An answer never holds a control token, so each of them ends it.
        stop_ids=frozenset(tokenizer.eos_token_ids) | codec.special_ids,
        context_length=int(getattr(model.args, "max_position_embeddings", None) or 8192),
        ropes=ropes,
        sampling=sampling,
    )


def _quantize(model: Any, bits: int) -> None:
    """Quantise what can be, unless the model came so: somebody has chosen its bits then."""
    if bits not in (4, 8):
        raise ValueError(f"quantize: {bits} is not 0, 4 or 8")
    if any("scales" in module for _, module in model.named_modules()):
        return
    group = 32
    nn.quantize(
        model,
        group_size=group,
        bits=bits,
        class_predicate=lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0,
    )


def _own_sampling(name: str) -> Sampling:
    """What the model's own generation config asks for; greedy if it has none. Raises ValueError if it cannot be."""
    from mlx_lm.utils import hf_repo_to_path

    folder = Path(name) if Path(name).exists() else hf_repo_to_path(name)
    file = folder / "generation_config.json"
    if not file.is_file():
        return Sampling()
    try:
        return Sampling.of_generation_config(json.loads(file.read_text()))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
