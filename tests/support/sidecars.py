"""A real sidecar process on a volume of the test's own, and what a test asks of it."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvcellar.contract import EngineId, Role
from kvcellar.demo.sidecar import free_port
from kvcellar.region import metafile, participants
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.region.joining import JoinRequest
from kvcellar.region.metadata import OwnerSection

KVCELLAR = Path(sys.executable).with_name("kvcellar")
DEADLINE_S = 30.0

_T = TypeVar("_T")


def until(look: Callable[[], _T], what: str, deadline_s: float = DEADLINE_S) -> _T:
    """Poll until `look` answers with something true, and return it."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline_s} s: {what}")


def attach(directory: Path, session: str = "ab" * 16) -> participants.Participant:
    """Attach to the region of `eng` as rank 0 of an engine of one rank."""
    request = JoinRequest(EngineId("eng"), session, Role.WORKER, 0, 1, "cd" * 32, 10.0)
    return participants.open_session(
        RegionDirectory.open(directory),
        request,
        lambda capacity: Geometry.compute(capacity, 4096, 1, Layout.SHARDED, 4096),
    )


class Sidecar:
    """A sidecar with settings of its own; `start` and `end` it any number of times."""

    def __init__(self, volume: Path, *options: str, **variables: str) -> None:
        self.volume = volume
        self.directory = volume / "kvcellar"
        self.port = free_port()
        self._options = options
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("KVCELLAR_")},
            "KVCELLAR_ROOT": str(volume),
            "KVCELLAR_ENGINE_ID": "eng",
            "KVCELLAR_CAPACITY": "32Mi",
            "KVCELLAR_HTTP_PORT": str(self.port),
            **variables,
        }
        self.log = Path(f"{volume}.{self.port}.log")
        self._process: subprocess.Popen[bytes] | None = None

    # --- the process -----------------------------------------------------------------------------

    def start(self, *wrapper: str) -> "Sidecar":
        """Start it, behind a wrapping command if there is one; returns at once."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*wrapper, KVCELLAR, "sidecar", *self._options], env=self.environment, stderr=log
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None
        return self._process

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; returns the exit status and the seconds that it took to end."""
        began = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S), time.monotonic() - began

    def wait(self) -> int:
        """The exit status of a sidecar that ends by itself."""
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """Make sure that nothing is left running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def run(
        self, *arguments: str, wrapper: Sequence[str] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run another command of kvcellar with the same settings, behind a wrapping command if there is one."""
        return subprocess.run(
            [*wrapper, KVCELLAR, *arguments],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    @property
    def complaint(self) -> str:
        """The sentence on stderr that is no log line; one at most."""
        lines = [line for line in self.log.read_text().splitlines() if not line.startswith("{")]
        assert len(lines) <= 1, lines
        return lines[0] if lines else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in map(json.loads, lines) if line["event"] == name]

    # --- what it shows ---------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, str]:
        """HTTP status and body; 0 if nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def region(self, engine_id: str = "eng") -> dict[str, Any]:
        """The region as it is shown; empty as long as nobody answers."""
        status, body = self.get(f"/v1/regions/{engine_id}")
        region: dict[str, Any] = json.loads(body) if status == 200 else {}
        return region

    def until_state(self, *states: str, engine_id: str = "eng") -> dict[str, Any]:
        """Wait until the region is shown in one of the states."""

        def look() -> dict[str, Any]:
            region = self.region(engine_id)
            return region if region.get("state") in states else {}

        return until(look, f"region {engine_id} in {states}: {self.log.read_text()}")

    def metrics(self) -> dict[str, float]:
        """Samples by `name{labels}`."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    # --- what lies on the volume -----------------------------------------------------------------

    @property
    def files(self) -> list[str]:
        """Names in the directory of regions."""
        return sorted(os.listdir(self.directory)) if self.directory.exists() else []

    def data_file(self, engine_id: str = "eng") -> Path:
        """The one data file of a region."""
        (found,) = self.directory.glob(f"{engine_id}.*.data")
        return found

    def owner(self, engine_id: str = "eng") -> OwnerSection | None:
        """The owner section of the metadata page, read past the sidecar; None if there is none."""
        try:
            fd = os.open(self.directory / f"{engine_id}.meta", os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return metafile.read_owner(fd)
        finally:
            os.close(fd)


def end_all(sidecars: Iterable[Sidecar]) -> None:
    """Leave no process behind, whatever a test did."""
    for sidecar in sidecars:
        sidecar.kill()
