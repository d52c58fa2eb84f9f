"""The file of the desired state, as the sidecar reads it: what is in force, and why something is not.

The file is opened anew at each look, since the kubelet never writes into it: it makes a new folder and
renames a link onto `..data`. So its path leads over links, outside the directory of regions and out of
the engines' reach, and here following them is right.

Invariants: what cannot be used changes nothing (the last good state stays in force, and the reason is
kept); a region's generation never falls, until the region is left out of a good state.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcellar.contract import (
    ENV_POD_UID,
    MAX_DESIRED_BYTES,
    DesiredRegion,
    parse_desired,
    printable,
)
from kvcellar.errors import InvalidDesiredState

_NEVER_BLOCK = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Also where the path leads to a pipe, whose opening would wait for a writer."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What is desired now.

    Attributes:
        regions: what is in force, by engine id.
        problem: why the whole file is not used; empty if it is.
        stale: why what it says of one region is not used, by engine id.
    """

    regions: Mapping[str, DesiredRegion] = field(default_factory=dict)
    problem: str = ""
    stale: Mapping[str, str] = field(default_factory=dict)

    def problem_of(self, engine_id: str) -> str:
        """Why what is desired of a region is not used; empty if it is, or nothing is desired."""
        return self.problem or self.stale.get(engine_id, "")


class DesiredFile:
    """Reads the file again and again. For one thread; `current` may be read by any."""

    def __init__(self, path: Path | None, pod_uid: str | None) -> None:
        """Remember where it is, and whose wishes count; no path: nothing is ever desired."""
        self.current = Desired()
        self._path = path
        self._pod_uid = pod_uid
        self._seen: bytes | None = None

    def look(self) -> bool:
        """Read the file once; whether that changed anything. Never blocks, and never raises."""
        if self._path is None:
            return False
        before, seen = self.current, self._seen
        self._seen = None
        try:
            self._seen = data = _read(self._path)
            if data == seen:
                return False
            self.current = self._judge(data)
        except InvalidDesiredState as error:
            self.current = replace(before, problem=str(error))
        except OSError as error:
            self.current = replace(before, problem=f"it cannot be read: {error.strerror}")
        return self.current != before

    def _judge(self, data: bytes) -> Desired:
        state = parse_desired(data)
        if state is None:
            return Desired()
        if self._pod_uid is None:
            raise InvalidDesiredState(f"{ENV_POD_UID} is not set, so nobody can say whose it is")
        if state.podUID != self._pod_uid:
            uid = printable(state.podUID[:64])
            raise InvalidDesiredState(f"it is of pod {uid}, and this is pod {self._pod_uid}")
        regions, stale = dict(state.regions), {}
        for engine_id, region in state.regions.items():
            last = self.current.regions.get(engine_id)
            if last is not None and region.generation < last.generation:
                regions[engine_id] = last
                stale[engine_id] = (
                    f"its generation {region.generation} is below {last.generation}, which is in force"
                )
        return Desired(regions, "", stale)


def _read(path: Path) -> bytes:
    """At most one byte more than can be used; nothing where there is no file.

    Raises:
        InvalidDesiredState: it is no regular file.
        OSError: it cannot be read.
    """
    try:
        fd = os.open(path, _NEVER_BLOCK)
    except FileNotFoundError:
        return b""
    try:
        # Before it is a file of Python's: of a folder that cannot be made, and the descriptor would stay open.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidDesiredState("it is no regular file")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(MAX_DESIRED_BYTES + 1)
    finally:
        os.close(fd)
