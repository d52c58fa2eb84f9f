"""The sidecar's process in a sandbox: start it, ask it over HTTP, stop or kill it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.errors import KVCellarError

_POLL_S = 0.05


class SidecarFailed(KVCellarError):
    """The sidecar did not start, answer or stop as asked; the message ends with its log."""


class Sidecar:
    """A sidecar that owns the region of one engine in the sandbox's `/dev/shm`.

    Make it by `start`; as a context manager it is killed at the end.
    """

    def __init__(self, entry: subprocess.Popen[bytes], port: int, log: Path) -> None:
        """Keep what `start` has started."""
        self._entry = entry
        self._port = port
        self._log = log

    @classmethod
    def start(
        cls,
        sandbox: Sandbox,
        log: Path,
        engine_id: str,
        capacity: str,
        python: Path = Path(sys.executable),
        **variables: str,
    ) -> Self:
        """Start it and return at once.

        Args:
            sandbox: where it runs; regions lie in the sandbox's `/dev/shm/kvcellar`.
            log: file for its log lines; appended to.
            engine_id: whose region it owns.
            capacity: of the region, such as `80Mi`.
            python: interpreter of an environment with the sidecar's packages.
            variables: more settings, such as `KVCELLAR_ENGINES`; they win over those set here.
        """
        port = free_port()
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "KVCELLAR_ROOT": str(SHM),
            "KVCELLAR_ENGINE_ID": engine_id,
            "KVCELLAR_CAPACITY": capacity,
            "KVCELLAR_HTTP_PORT": str(port),
            **variables,
        }
        with log.open("ab") as output:
            entry = sandbox.popen(
                [python, "-P", "-m", "kvcellar.daemon"],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return cls(entry, port, log)

    def __enter__(self) -> Self:
        """Nothing happens: it is started already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """`kill`."""
        self.kill()

    def region(self) -> dict[str, Any] | None:
        """The first region of `/v1/regions`, or None while nobody answers."""
        body = self._get("/v1/regions")
        regions = [] if body is None else body.get("regions", [])
        return dict(regions[0]) if regions else None

    def wait_for(
        self, what: str, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Poll the region until `holds` is true of it.

        Raises:
            SidecarFailed: it did not become true in time, or the sidecar ended.
        """
        deadline = time.monotonic() + timeout_s
        region: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            region = self.region()
            if region is not None and holds(region):
                return region
            if self._entry.poll() is not None:
                raise self._failure(f"the sidecar ended with {self._entry.returncode}")
            time.sleep(_POLL_S)
        raise self._failure(f"no region that is {what} within {timeout_s:.0f} s, last: {region}")

    def terminate(self, timeout_s: float = 10.0) -> float:
        """Send SIGTERM and wait; returns the seconds it took.

        Raises:
            SidecarFailed: it did not end, or not with status 0.
        """
        began = time.monotonic()
        self._entry.send_signal(signal.SIGTERM)
        try:
            status = self._entry.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"the sidecar runs {timeout_s:.0f} s after SIGTERM") from error
        if status != 0:
            raise self._failure(f"the sidecar ended with {status} at SIGTERM")
        return time.monotonic() - began

    def kill(self) -> None:
        """Send SIGKILL and wait; one that has ended is fine."""
        self._entry.kill()
        self._entry.wait()

    def _get(self, path: str) -> dict[str, Any] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2.0)
        try:
            connection.request("GET", path)
            body = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return body if isinstance(body, dict) else None

    def _failure(self, what: str) -> SidecarFailed:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        return SidecarFailed(f"{what}; end of {self._log}:\n{tail}")


def free_port() -> int:
    """A TCP port on loopback that is free now. Who binds it says so if somebody was quicker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
