"""Where a block lies: in its tensor on the device, and in a chunk on the host.

A chunk holds `blocks_per_chunk` blocks of every tensor, *tensor
by tensor*, so that neighbouring blocks of one tensor are neighbours on the host as well and can be
copied as one piece (here 2 tensors, 3 blocks a chunk)::

    | t0 b0 | t0 b1 | t0 b2 | t1 b0 | t1 b1 | t1 b2 | pad to the chunk stride |

Tensor `t` begins at `blocks_per_chunk * (sum of the page bytes of the tensors before t)`. Pages are
counted with their padding; only the bytes that a group uses are copied.

Pure: this module must not know files, devices, torch or vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcellar.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor of KV blocks on the device.

    Attributes:
        address: of its first byte.
        num_blocks: blocks in it.
        stride_bytes: distance of two blocks; more than `page_bytes` where layers are packed.
        page_bytes: bytes of a block, padding included.
    """

    address: int
    num_blocks: int
    stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The part of a tensor's pages that a group uses: the first `used_bytes` of each."""

    tensor_idx: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where each tensor lies in a chunk. Make one with `compute`.

    Attributes:
        blocks_per_chunk: blocks of every tensor in a chunk.
        page_bytes: bytes of a block, of each tensor.
        offsets_bytes: first byte of each tensor, from the start of the chunk.
        chunk_bytes: bytes of a chunk.
    """

    blocks_per_chunk: int
    page_bytes: tuple[int, ...]
    offsets_bytes: tuple[int, ...]
    chunk_bytes: int

    @classmethod
    def compute(cls, page_bytes: Sequence[int], blocks_per_chunk: int) -> "ChunkLayout":
        """Lay out tensors of `page_bytes` one after the other.

        Raises:
            ConfigurationError: less than one block a chunk, or a page below one byte.
        """
        if blocks_per_chunk < 1 or any(page < 1 for page in page_bytes):
            raise ConfigurationError(
                f"a chunk of {blocks_per_chunk} blocks with pages of {list(page_bytes)} bytes was "
                "asked for; a chunk has one block or more and a page one byte or more: check the "
                "block size of the offload configuration"
            )
        spans = [page * blocks_per_chunk for page in page_bytes]
        offsets = tuple(sum(spans[:idx]) for idx in range(len(spans)))
        return cls(blocks_per_chunk, tuple(page_bytes), offsets, sum(spans))


@dataclass(frozen=True, slots=True)
class HostChunks:
    """The host memory that chunks lie in.

    Attributes:
        address: of chunk 0.
        stride_bytes: distance of two chunks.
        num_chunks: a chunk id is in `[0, num_chunks)`.
        chunks_per_piece: chunks of one registration with the driver, which no copy may cross; 0 if
            all memory is one piece.
    """

    address: int
    stride_bytes: int
    num_chunks: int
    chunks_per_piece: int = 0


def check_tensors(
    tensors: Sequence[DeviceTensor],
    groups: Sequence[Sequence[TensorRef]],
    layout: ChunkLayout,
    host: HostChunks,
) -> None:
    """Refuse tensors, groups and host memory that do not belong together.

    Raises:
        ConfigurationError: a reference to a tensor that is not there or to more than its page,
            blocks that overlap, or chunks that do not fit their stride.
    """
    if tuple(tensor.page_bytes for tensor in tensors) != layout.page_bytes:
        raise ConfigurationError(
            f"a chunk laid out for pages of {list(layout.page_bytes)} bytes was given for tensors "
            f"with pages of {[tensor.page_bytes for tensor in tensors]}: compute it from the tensors"
        )
    if host.num_chunks and layout.chunk_bytes > host.stride_bytes:
        raise ConfigurationError(
            f"chunks of {layout.chunk_bytes} bytes were asked for, {host.stride_bytes} bytes apart; "
            "they would overlap: scheduler and worker have to compute one geometry"
        )
    for idx, tensor in enumerate(tensors):
        if tensor.num_blocks > 1 and tensor.stride_bytes < tensor.page_bytes:
            raise ConfigurationError(
                f"KV cache tensor {idx} has pages of {tensor.page_bytes} bytes that are "
                f"{tensor.stride_bytes} bytes apart; its blocks overlap and cannot be offloaded"
            )
    for group, refs in enumerate(groups):
        for ref in refs:
            is_known = 0 <= ref.tensor_idx < len(tensors)
            if not is_known or not 0 < ref.used_bytes <= layout.page_bytes[ref.tensor_idx]:
                raise ConfigurationError(
                    f"KV cache group {group} refers to {ref.used_bytes} bytes of tensor "
                    f"{ref.tensor_idx}; there are {len(tensors)} tensors with pages of "
                    f"{list(layout.page_bytes)} bytes: this layout is not supported"
                )
