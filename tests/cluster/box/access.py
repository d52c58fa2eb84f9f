"""A running cluster, seen through one kubeconfig: the box's own, or one that a developer names."""

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from tests.cluster.box.api import Api, Credentials, JsonObject
from tests.cluster.box.errors import BoxError, CommandFailed

DEADLINE_S = 30.0

_T = TypeVar("_T")


def until(look: Callable[[], _T], what: str, deadline_s: float = DEADLINE_S) -> _T:
    """Poll until `look` answers with something true, and return it.

    Raises:
        BoxError: it did not within the deadline.
    """
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise BoxError(f"not within {deadline_s} s: {what}")


def kubeconfig_text(server: str, ca_pem: str, user: dict[str, str]) -> str:
    """A kubeconfig with one context. It is JSON, which is YAML too, so no YAML library is needed."""
    ca_data = base64.b64encode(ca_pem.encode()).decode()
    cluster = {"server": server, "certificate-authority-data": ca_data}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "box", "cluster": cluster}],
        "users": [{"name": "box", "user": user}],
        "contexts": [{"name": "box", "context": {"cluster": "box", "user": "box"}}],
        "current-context": "box",
    }
    return json.dumps(kubeconfig, indent=2) + "\n"


class Access:
    """What tests do to a cluster as the holder of one kubeconfig.

    Args:
        kubeconfig: its file.
        programs: the folder of kubectl and helm; None takes those on the PATH.
        scratch: a folder for kubeconfigs of other users and for the caches of the commands, so that
            nothing is written to the user's home.
    """

    def __init__(self, kubeconfig: Path, programs: Path | None, scratch: Path) -> None:
        self.kubeconfig = kubeconfig
        self._programs = programs
        self._scratch = scratch
        self._api: Api | None = None
        self._credentials: Credentials | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
            self._api.close()
            self._api = None

    # --- ways in ---------------------------------------------------------------------------------

    @property
    def api(self) -> Api:
        """The API over HTTP."""
        if self._api is None:
            self._api = Api(self.credentials())
        return self._api

    def credentials(self) -> Credentials:
        """Server, authority and login of the kubeconfig, for a Python client."""
        if self._credentials is None:
            view = ("config", "view", "--raw", "--minify", "--flatten", "--output=json")
            self._credentials = Credentials.read(json.loads(self.kubectl(*view).stdout))
        return self._credentials

    def environment(self) -> dict[str, str]:
        """The variables under which kubectl, helm and other clients reach this cluster."""
        path = os.environ["PATH"]
        return os.environ | {
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self._scratch / "kube"),
            "KUBERC": "off",
            "HELM_CACHE_HOME": str(self._scratch / "helm" / "cache"),
            "HELM_CONFIG_HOME": str(self._scratch / "helm" / "config"),
            "HELM_DATA_HOME": str(self._scratch / "helm" / "data"),
            "PATH": path if self._programs is None else f"{self._programs}:{path}",
        }

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return its status and output.

        Raises:
            CommandFailed: its status is not 0, and `check` is true.
        """
        return self._run("kubectl", arguments, stdin, check, timeout_s)

    def helm(
        self,
        *arguments: str,
        stdin: str | None = None,
        check: bool = True,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run helm; otherwise as `kubectl`."""
        return self._run("helm", arguments, stdin, check, timeout_s)

    def apply(self, *objects: JsonObject, options: tuple[str, ...] = ()) -> str:
        """``kubectl apply`` objects that are not in a file; returns what it printed."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self.kubectl("apply", *options, "-f", "-", stdin=json.dumps(listed)).stdout

    # --- other users -----------------------------------------------------------------------------

    def as_service_account(self, namespace: str, name: str, duration_s: int = 3600) -> "Access":
        """The cluster as a ServiceAccount sees it, with a fresh token."""
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.api.create(path, request | {"spec": {"expirationSeconds": duration_s}})
        return self.as_user_with({"token": answer["status"]["token"]}, f"{namespace}.{name}")

    def as_user_with(self, user: dict[str, str], label: str) -> "Access":
        """The cluster with another login: `user` is that part of a kubeconfig."""
        own = self.credentials()
        folder = Path(tempfile.mkdtemp(dir=self._scratch, prefix=f"{label}-"))
        path = folder / "kubeconfig"
        path.touch(mode=0o600)
        path.write_text(kubeconfig_text(own.server, own.ca_pem, user))
        return Access(path, self._programs, folder)

    def _run(
        self,
        program: str,
        arguments: tuple[str, ...],
        stdin: str | None,
        check: bool,
        timeout_s: float,
    ) -> subprocess.CompletedProcess[str]:
        argv = [program if self._programs is None else str(self._programs / program), *arguments]
        done = subprocess.run(
            argv,
            env=self.environment(),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise CommandFailed([program, *arguments], done.returncode, done.stdout, done.stderr)
        return done
