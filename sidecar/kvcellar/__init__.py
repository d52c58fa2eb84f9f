"""Host memory that vLLM engines keep their offloaded KV cache in, owned by a sidecar.

This package imports nothing, so that reading the version or one submodule never
costs more than that submodule. Start reading at ``docs/design.md``.
"""

__version__ = "0.1.0"
