"""Names of files: what each is called in the directory of regions and beside it, and what a name says. Pure."""

import re

from kvcellar.contract import EngineId

_META = re.compile(r"(?P<id>[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})\.meta")
_DATA = re.compile(
    r"(?P<id>[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})\.(?P<nonce>[0-9a-f]{16})\.(?P<kind>data|index)"
)
_TEMPORARY = re.compile(
    r"\.new\.(?P<id>[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})\.(?P<nonce>[0-9a-f]{16})"
)

STOCK_FILE = re.compile(r"vllm_offload_.*\.mmap.*", re.DOTALL)
"""Files of stock vLLM; 0.33 makes several for one engine, `.mmap`, `.mmap.1` and so on."""
_QUARANTINE = re.compile(
    rf"quarantine\.(?P<inode>[0-9]{{1,20}})\.(?P<name>{STOCK_FILE.pattern})", re.DOTALL
)


def meta_name(engine_id: EngineId) -> str:
    """Name of the metadata page."""
    return f"{engine_id}.meta"


def data_name(engine_id: EngineId, nonce: str) -> str:
    """Name of the data file."""
    return f"{engine_id}.{nonce}.data"


def stock_name(engine_id: EngineId) -> str:
    """Name that vLLM itself gives its region's file, in /dev/shm."""
    return f"vllm_offload_{engine_id}.mmap"


def quarantine_name(inode: int, name: str) -> str:
    """Name of a file of stock vLLM while it lies aside; no pattern of vLLM's files fits it."""
    return f"quarantine.{inode}.{name}"


def quarantined(name: str) -> tuple[int, str] | None:
    """Inode and old name of a file that lies aside; None if the name is none of those."""
    match = _QUARANTINE.fullmatch(name)
    return (int(match["inode"]), match["name"]) if match else None


def index_name(engine_id: EngineId, nonce: str) -> str:
    """Name of the index file: failure marks, and the journal."""
    return f"{engine_id}.{nonce}.index"


def temporary_name(engine_id: EngineId, nonce: str) -> str:
    """Name of a metadata page that is not published yet; no engine id begins with a dot."""
    return f".new.{engine_id}.{nonce}"


def engine_of_meta(name: str) -> EngineId | None:
    """The engine id of a metadata page's name, or None for any other name."""
    match = _META.fullmatch(name)
    return EngineId(match["id"]) if match else None


def engine_of_part(name: str) -> EngineId | None:
    """The engine id of a data, index or temporary file's name, or None for any other name."""
    match = _DATA.fullmatch(name) or _TEMPORARY.fullmatch(name)
    return EngineId(match["id"]) if match else None


def data_of_part(name: str) -> str:
    """Name of the data file whose slots tell whether a data, index or temporary file is held."""
    match = _DATA.fullmatch(name)
    return data_name(EngineId(match["id"]), match["nonce"]) if match else name
