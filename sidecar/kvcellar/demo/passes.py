"""One pass of an engine over many prompts, with what vLLM counted meanwhile."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvcellar.demo.answers import Answer
from kvcellar.demo.client import Engine

_HITS = "vllm:external_prefix_cache_hits_total"
_STORED = "vllm:kv_offload_store_bytes_total"
_LOADED = "vllm:kv_offload_load_bytes_total"


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass over the prompts gave."""

    answers: list[Answer]
    seconds: float
    hit_tokens: float
    loaded_bytes: float
    stored_bytes: float

    @classmethod
    def over(cls, engine: Engine, prompts: Sequence[Sequence[int]]) -> Self:
        """All prompts once, and by how much vLLM's counters rose."""
        before = engine.metrics()
        began = time.monotonic()
        answers = engine.generate(prompts, together=True)
        seconds = time.monotonic() - began
        engine.settle()
        after = engine.metrics()
        return cls(
            answers,
            seconds,
            hit_tokens=after.total(_HITS) - before.total(_HITS),
            loaded_bytes=after.total(_LOADED) - before.total(_LOADED),
            stored_bytes=after.total(_STORED) - before.total(_STORED),
        )
