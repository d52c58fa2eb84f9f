"""Tiny checkpoints with random weights, written without torch.

Owns the shapes of three models, one for each layout of a KV cache that kvcellar must carry:
``llama`` (heads sharded over ranks), ``mla`` (a latent that all ranks hold alike) and
``sliding`` (several KV groups, most with a window). The weights are drawn from a normal
distribution, since with constant weights (vLLM's ``load_format=dummy``) a load that copies
nothing still yields the same tokens. Models have no tokenizer: prompts are token ids.

A checkpoint depends only on the kind, the seed and numpy's generator, so engines on both
sides of a comparison may each write their own.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

VOCABULARY_SIZE = 512
"""Token ids lie in [0, 512)."""

MAX_TOKENS = 4096
"""Longest sequence (prompt and answer) that the models declare."""

WEIGHT_STD = 0.1
"""Large enough that attention over the KV cache decides the tokens, small enough for float32."""

_HIDDEN = 128
_FEED_FORWARD = 256
_HEADS = 4
_KV_HEADS = 2

_LLAMA_LAYERS = 4
_LLAMA_HEAD = 32

_MLA_LAYERS = 3
_MLA_LATENT = 512
_MLA_ROPE = 64
_MLA_NOPE = 32
_MLA_VALUE = 32

_SLIDING_LAYERS = 6
_SLIDING_HEAD = 32
_SLIDING_WINDOW = 96

Array: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]


class ModelKind(Enum):
    """Which layout of the KV cache a tiny model has."""

    LLAMA = "llama"
    MLA = "mla"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a caller must know of a model to run and to check it.

    Attributes:
        block_size: tokens in a KV block: 16 is all that vLLM's CPU kernel for MLA takes, and
            its other attention kernel wants a multiple of 32.
        kv_groups: KV groups that vLLM makes of it (with its hybrid manager on).
        replicated: all ranks of an engine hold the same KV bytes.
        attention_backend: vLLM's name of the kernel to use where the machine would decide
            (with AMX it takes another one for MLA); None for the only one there is.
        has_prefix_cache: vLLM's own prefix cache works on a CPU. For MLA it is switched off.
    """

    block_size: int
    kv_groups: int
    replicated: bool
    attention_backend: str | None
    has_prefix_cache: bool


TRAITS = {
    ModelKind.LLAMA: ModelTraits(
        block_size=32,
        kv_groups=1,
        replicated=False,
        attention_backend=None,
        has_prefix_cache=True,
    ),
    ModelKind.MLA: ModelTraits(
        block_size=16,
        kv_groups=1,
        replicated=True,
        attention_backend="CPU_MLA",
        has_prefix_cache=False,
    ),
    ModelKind.SLIDING: ModelTraits(
        block_size=32,
        kv_groups=6,
        replicated=False,
        attention_backend=None,
        has_prefix_cache=True,
    ),
}


def write_checkpoint(kind: ModelKind, folder: Path, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` of a tiny model.

    Args:
        kind: the model.
        folder: made if missing; files of the same names are overwritten.
        seed: other seeds give other weights, hence other tokens.

    Returns:
        The folder, which is what vLLM takes as its model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([seed, list(ModelKind).index(kind)])
    tensors = {
        name: generator.normal(_mean(kind, name), _std(kind, name), shape).astype(np.float32)
        for name, shape in _SHAPES[kind]()
    }
    (folder / "config.json").write_text(json.dumps(_CONFIGS[kind] | _SHARED_CONFIG, indent=2))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write float32 tensors in the safetensors format.

    The file is an 8-byte little-endian length, a JSON header of that length, padded with
    spaces to a multiple of 8, and the tensors' bytes without gaps in the header's order.

    Source: the "Format" section of the safetensors README.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset_bytes = 0
    for name, tensor in tensors.items():
        end_bytes = offset_bytes + tensor.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(tensor.astype("<f4").tobytes())


def random_prompt(n_tokens: int, seed: int) -> list[int]:
    """Token ids for a prompt, the same for the same arguments.

    Ids below 8 are left out, so that no prompt holds a token that a model calls special.
    """
    return [
        int(token) for token in np.random.default_rng(seed).integers(8, VOCABULARY_SIZE, n_tokens)
    ]


def _mean(kind: ModelKind, name: str) -> float:
    """Norm weights lie around the neutral value: 1, or 0 for Gemma, which adds the 1 itself."""
    return 1.0 if name.endswith("norm.weight") and kind is not ModelKind.SLIDING else 0.0


def _std(kind: ModelKind, name: str) -> float:
    """Gemma multiplies its embeddings by sqrt(hidden) and uses them again as its head.

    At the usual size each token would then simply repeat itself.
    """
    is_gemma_embedding = kind is ModelKind.SLIDING and name == "model.embed_tokens.weight"
    return WEIGHT_STD / 10 if is_gemma_embedding else WEIGHT_STD


def _llama_shapes() -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCABULARY_SIZE, _HIDDEN)
    yield "lm_head.weight", (VOCABULARY_SIZE, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for layer in range(_LLAMA_LAYERS):
        prefix = f"model.layers.{layer}"
        yield from _attention_shapes(prefix, _LLAMA_HEAD)
        yield from _feed_forward_shapes(prefix)
        yield f"{prefix}.input_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (_HIDDEN,)


def _mla_shapes() -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCABULARY_SIZE, _HIDDEN)
    yield "lm_head.weight", (VOCABULARY_SIZE, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for layer in range(_MLA_LAYERS):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_proj.weight", (_HEADS * (_MLA_NOPE + _MLA_ROPE), _HIDDEN)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (_MLA_LATENT + _MLA_ROPE, _HIDDEN)
        yield f"{attention}.kv_a_layernorm.weight", (_MLA_LATENT,)
        yield f"{attention}.kv_b_proj.weight", (_HEADS * (_MLA_NOPE + _MLA_VALUE), _MLA_LATENT)
        yield f"{attention}.o_proj.weight", (_HIDDEN, _HEADS * _MLA_VALUE)
        yield from _feed_forward_shapes(prefix)
        yield f"{prefix}.input_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (_HIDDEN,)


def _sliding_shapes() -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCABULARY_SIZE, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for layer in range(_SLIDING_LAYERS):
        prefix = f"model.layers.{layer}"
        yield from _attention_shapes(prefix, _SLIDING_HEAD)
        yield f"{prefix}.self_attn.q_norm.weight", (_SLIDING_HEAD,)
        yield f"{prefix}.self_attn.k_norm.weight", (_SLIDING_HEAD,)
        yield from _feed_forward_shapes(prefix)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}.{place}_layernorm.weight", (_HIDDEN,)


def _attention_shapes(prefix: str, head_size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.self_attn.q_proj.weight", (_HEADS * head_size, _HIDDEN)
    yield f"{prefix}.self_attn.k_proj.weight", (_KV_HEADS * head_size, _HIDDEN)
    yield f"{prefix}.self_attn.v_proj.weight", (_KV_HEADS * head_size, _HIDDEN)
    yield f"{prefix}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * head_size)


def _feed_forward_shapes(prefix: str) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.mlp.gate_proj.weight", (_FEED_FORWARD, _HIDDEN)
    yield f"{prefix}.mlp.up_proj.weight", (_FEED_FORWARD, _HIDDEN)
    yield f"{prefix}.mlp.down_proj.weight", (_HIDDEN, _FEED_FORWARD)


_SHAPES = {
    ModelKind.LLAMA: _llama_shapes,
    ModelKind.MLA: _mla_shapes,
    ModelKind.SLIDING: _sliding_shapes,
}

_SHARED_CONFIG: dict[str, object] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _FEED_FORWARD,
    "num_attention_heads": _HEADS,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}

_CONFIGS: dict[ModelKind, dict[str, object]] = {
    ModelKind.LLAMA: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _LLAMA_LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _LLAMA_HEAD,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
    },
    # Every layer is dense, so that the model has no experts. The positions are YaRN's, scaled
    # by 1, as real models of this kind have it: with plain ones vLLM's CPU kernel, which is
    # given slices of a larger tensor, computes something else for each batch (seen in 0.31 and
    # 0.32; with YaRN, which takes another way, the logits equal those of transformers).
    ModelKind.MLA: {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": _MLA_LAYERS,
        "num_key_value_heads": _HEADS,
        "kv_lora_rank": _MLA_LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": _MLA_NOPE,
        "qk_rope_head_dim": _MLA_ROPE,
        "v_head_dim": _MLA_VALUE,
        "first_k_dense_replace": _MLA_LAYERS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "original_max_position_embeddings": MAX_TOKENS,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    # The last layer sees everything, the others a window.
    ModelKind.SLIDING: {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": _SLIDING_LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _SLIDING_HEAD,
        "query_pre_attn_scalar": 1,
        "sliding_window": _SLIDING_WINDOW,
        "layer_types": ["sliding_attention"] * (_SLIDING_LAYERS - 1) + ["full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
}
