"""A program that reads chunks in a region by nothing but docs/reference: no kvcellar, no torch.

    python third_reader.py METADATA_FILE LOG

For each line of LOG that has a hash it reads the chunk in the data file and compares. Prints how many
agreed; the status is 1 if one did not, or none had a hash.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

OWNER, SESSION = (1024, 1024), (4096, 512)
"""Offset of a section, and bytes of each of its two copies."""

FIRST = 0x5A5A5A5A5A5A5A5A
"""A selector that names the first copy; any other value here names the second."""


def section(page: bytes, where: tuple[int, int]) -> bytes:
    """The payload of the copy in force."""
    offset, copy_bytes = where
    (selector,) = struct.unpack_from("<Q", page, offset)
    start = offset + 64 + (0 if selector == FIRST else copy_bytes)
    return page[start + 16 : start + copy_bytes]


def main(meta: Path, log: Path) -> int:
    """Compare and report."""
    page = meta.read_bytes()
    nonce = struct.unpack_from("<8x16s", section(page, OWNER))[0].decode()
    fields = struct.unpack_from("<16s32sQQB7xIIQQQQQ", section(page, SESSION))
    layout, _world_size, _page_bytes, _capacity, chunk_bytes, rank_bytes, stride, num_chunks = (
        fields[4:]
    )
    data = meta.with_name(f"{meta.name.removesuffix('.meta')}.{nonce}.data")
    agreed = disagreed = 0
    with data.open("rb") as file:
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if "sha256" not in entry:
                continue
            if not 0 <= entry["chunk"] < num_chunks:
                raise SystemExit(f"chunk {entry['chunk']} of {num_chunks}")
            rank = 0 if layout == 1 else entry["rank"]
            file.seek(rank * rank_bytes + entry["chunk"] * stride)
            is_same = hashlib.sha256(file.read(chunk_bytes)).hexdigest() == entry["sha256"]
            agreed, disagreed = agreed + is_same, disagreed + (not is_same)
    sys.stdout.write(json.dumps({"agreed": agreed, "disagreed": disagreed}) + "\n")
    return 0 if agreed and not disagreed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
