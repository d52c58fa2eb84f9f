"""An engine's KV cache as kvcellar sees it: by shape, so that neither torch nor vLLM is needed.

The protocols name what is used of vLLM's types; `device_tensor` reads the numbers that copies need, and
refuses tensors whose blocks are not dense. Source: `CanonicalKVCaches` in vLLM 0.32,
v1/kv_offload/base.py.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kvcellar.errors import ConfigurationError
from kvcellar.worker.chunk_layout import DeviceTensor


class BlockTensor(Protocol):
    """A tensor as torch has it; its first dimension counts blocks, the bytes of a block are dense."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of each dimension."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def stride(self, dim: int, /) -> int:
        """Distance of two elements of a dimension, in elements."""
        ...

    def element_size(self) -> int:
        """Bytes of an element."""
        ...


class KVCacheTensor(Protocol):
    """A tensor of KV blocks, and the bytes of one block with padding."""

    @property
    def tensor(self) -> BlockTensor:
        """The tensor."""
        ...

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a block, padding included."""
        ...


class KVCacheRef(Protocol):
    """What a KV cache group uses of a tensor."""

    @property
    def tensor_idx(self) -> int:
        """Which tensor."""
        ...

    @property
    def page_size_bytes(self) -> int:
        """Bytes used of each block, without padding."""
        ...


class KVCaches(Protocol):
    """The KV cache of one rank. Source: `CanonicalKVCaches` in vLLM 0.32, v1/kv_offload/base.py."""

    @property
    def tensors(self) -> Sequence[KVCacheTensor]:
        """All tensors, each once."""
        ...

    @property
    def group_data_refs(self) -> Sequence[Sequence[KVCacheRef]]:
        """What each KV cache group uses; groups may share a tensor."""
        ...


def device_tensor(idx: int, cache: KVCacheTensor) -> DeviceTensor:
    """Read a tensor's numbers, and check that its blocks are dense and have the page's size.

    Raises:
        ConfigurationError: they are not.
    """
    tensor = cache.tensor
    element_bytes = tensor.element_size()
    block_elements = 1
    is_dense = True
    for dim in reversed(range(1, len(tensor.shape))):
        is_dense &= tensor.shape[dim] == 1 or tensor.stride(dim) == block_elements
        block_elements *= tensor.shape[dim]
    if not is_dense or block_elements * element_bytes != cache.page_size_bytes:
        strides = tuple(tensor.stride(dim) for dim in range(len(tensor.shape)))
        raise ConfigurationError(
            f"KV cache tensor {idx} has shape {tuple(tensor.shape)}, strides {strides} and "
            f"{element_bytes}-byte elements, and pages of {cache.page_size_bytes} bytes were announced; "
            "its first dimension has to count blocks, and a block has to be one piece of a page's size"
        )
    return DeviceTensor(
        address=tensor.data_ptr(),
        num_blocks=tensor.shape[0],
        stride_bytes=tensor.stride(0) * element_bytes,
        page_bytes=cache.page_size_bytes,
    )


def device_type(kv_caches: KVCaches) -> str:
    """The type of device that the tensors are on; tensors that do not say are in host memory."""
    for cache in kv_caches.tensors:
        device: Any = getattr(cache.tensor, "device", None)
        return str(getattr(device, "type", "cpu"))
    return "cpu"
