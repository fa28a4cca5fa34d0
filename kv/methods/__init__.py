"""The methods, one a file. Each is an options struct whose `policies` says where it stands on the four axes."""

from __future__ import annotations

from kv.methods.cam import CaMOptions
from kv.methods.chunkkv import ChunkKVOptions
from kv.methods.full import FullOptions
from kv.methods.h2o import H2OOptions
from kv.methods.kivi import KIVIOptions
from kv.methods.l2norm import L2NormOptions
from kv.methods.options import Options
from kv.methods.pyramidkv import PyramidKVOptions
from kv.methods.snapkv import SnapKVOptions
from kv.methods.squeezeattention import SqueezeAttentionOptions
from kv.methods.streaming_llm import StreamingLLMOptions
from kv.methods.tova import TOVAOptions

METHODS: dict[str, type[Options]] = {
    "full": FullOptions,
    "chunkkv": ChunkKVOptions,
    "h2o": H2OOptions,
    "snapkv": SnapKVOptions,
    "streaming_llm": StreamingLLMOptions,
    "tova": TOVAOptions,
    "pyramidkv": PyramidKVOptions,
    "squeezeattention": SqueezeAttentionOptions,
    "l2norm": L2NormOptions,
    "cam": CaMOptions,
    "kivi": KIVIOptions,
}
