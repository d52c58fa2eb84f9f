"""What an engine is started with: model, ranks, connector, vLLM's arguments and its environment.

Which settings, and why (all measured with vLLM 0.31 and 0.32 on two cores):

- float32, greedy, eager: tokens are then the same in every start, for every batch, and with or
  without a prefix that was cached or loaded, and equal to those of transformers. The smallest
  distance between the best two log probabilities in hundreds of steps was a few 1e-3, while
  rounding differs by about 1e-6.
- Threads are neither bound nor more than one a rank: with vLLM's default binding two ranks
  refuse to start on a machine with one NUMA node, and compete for one core elsewhere.
- Another number of ranks gives other tokens by itself: compare like with like.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcellar.demo.models import TRAITS, ModelKind

KV_TRANSFER: dict[str, Any] = {
    "kv_connector": "KVCellarConnector",
    "kv_connector_module_path": "kvcellar.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "KVCellarOffloadingSpec",
        "spec_module_path": "kvcellar.vllm",
    },
}
"""What a user gives vLLM as `--kv-transfer-config` (docs/how-to/use-with-vllm.md)."""

VLLM_SHM_BYTES = 272 << 20
"""For vLLM's own message queues: 0.32 wants to find 240 MiB free in /dev/shm; and some to spare."""

VLLM_LEFT_BYTES = 16 << 20
"""What one SIGKILL may leave of vLLM's own message queues in /dev/shm (its files, not ours)."""

_KV_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is made of.

    Attributes:
        python: interpreter of an environment with vLLM.
        model: folder of a checkpoint that `models.write_checkpoint` made.
        kind: which model that is.
        ranks: tensor-parallel size.
        kv_transfer: the value of ``--kv-transfer-config``; None for no connector.
        n_blocks: KV blocks on the device. Few of them make vLLM evict early; they must hold
            one sequence of `max_model_len`.
        max_model_len: tokens of prompt and answer together.
        max_num_seqs: requests in a batch.
        env: more environment variables; they win over those set here.
        arguments: more arguments of `vllm.LLM`; they win over those set here.
        cache: folder for what vLLM keeps between starts, per environment. Without one each
            start imports vLLM once more to look at the model's class: about 8 s.
    """

    python: Path
    model: Path
    kind: ModelKind
    ranks: int = 1
    kv_transfer: Mapping[str, Any] | None = None
    n_blocks: int = 128
    max_model_len: int = 512
    max_num_seqs: int = 4
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache: Path | None = None


def vllm_arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    traits = TRAITS[config.kind]
    arguments: dict[str, Any] = {
        "model": str(config.model),
        "tensor_parallel_size": config.ranks,
        "distributed_executor_backend": "mp",
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "block_size": traits.block_size,
        "num_gpu_blocks_override": config.n_blocks,
        "kv_cache_memory_bytes": _KV_MEMORY_BYTES,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_model_len,
        "disable_log_stats": False,
    }
    if traits.attention_backend is not None:
        arguments["attention_config"] = {"backend": traits.attention_backend}
    if config.kv_transfer is not None:
        arguments["kv_transfer_config"] = dict(config.kv_transfer)
    return arguments | dict(config.arguments)


def environment(config: EngineConfig, scratch: Path) -> dict[str, str]:
    """The whole environment of an engine: little is inherited, so that starts are alike.

    Args:
        config: the engine.
        scratch: a folder of its own for HOME and TMPDIR, which goes with its sandbox.
    """
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "VLLM_CACHE_ROOT": str(config.cache or scratch / "vllm"),
        # Nothing leaves the machine, and nothing is looked for outside it.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # With two ranks the embedding would otherwise be compiled at the first request, which
        # takes 25 s and a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
    } | dict(config.env)
