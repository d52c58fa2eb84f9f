"""Checks of what is installed, and of the sidecar beside: versions by metadata, nothing is imported."""

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from kvcellar import __version__
from kvcellar.cli.client import SidecarClient
from kvcellar.cli.doctor.findings import Finding, fine, problem, warning
from kvcellar.contract import ENV_VLLM_UNTESTED, LIBRARY_CURRENT, printable
from kvcellar.daemon.config import Settings
from kvcellar.daemon.desired import DesiredFile
from kvcellar.daemon.status import GIVEN_UP
from kvcellar.errors import Unsupported
from kvcellar.plugin.settings import check_version

_VERSION = re.compile(r"^__version__ = \"([^\"\n]{1,64})\"", re.MULTILINE)


def check_library(environ: Mapping[str, str]) -> Finding:
    """The library that an engine with this PYTHONPATH would import, or that lies where engines find it."""
    entries = [Path(entry) for entry in environ.get("PYTHONPATH", "").split(":") if entry]
    for folder in [*entries, Path(LIBRARY_CURRENT)]:
        version = _version_in(folder)
        if version is None:
            continue
        if version == __version__:
            return fine("library", f"kvcellar {version} lies in {folder}")
        found = f"kvcellar {version} lies in {folder}, and this is {__version__}"
        return warning(
            "library", found, "run `kvcellar install-library DIR`, and start the engine anew"
        )
    return fine("library", f"kvcellar {__version__} is installed here; PYTHONPATH has no other")


def _version_in(folder: Path) -> str | None:
    try:
        found = _VERSION.search((folder / "kvcellar" / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return printable(found[1]) if found else None


def check_vllm(environ: Mapping[str, str]) -> Finding:
    """The vLLM of this Python, by its metadata."""
    try:
        version = printable(metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        return fine("vllm", "vLLM is not installed for this Python, and a sidecar needs none")
    try:
        check_version(version, is_untested_allowed=False)
    except Unsupported as error:
        if environ.get(ENV_VLLM_UNTESTED) == "1":
            found = f"vLLM {version} is not one that kvcellar was tested with, and is allowed"
            return warning("vllm", found, f"{ENV_VLLM_UNTESTED} is 1: compare its answers yourself")
        sentence, _, remedy = str(error).partition(": ")
        return problem("vllm", sentence, remedy)
    return fine("vllm", f"vLLM {version} is installed, and kvcellar was tested with it")


def check_sidecar(settings: Settings) -> Finding:
    """Whether a sidecar answers, lives and has its regions."""
    client = SidecarClient(settings.client_host, settings.http_port)
    lives = client.get("/livez")
    if lives is None:
        found = f"no sidecar answers at {client.address}"
        return warning("sidecar", found, "start `kvcellar sidecar`, or look at its log")
    if lives.status != 200:
        return problem("sidecar", f"{client.address}: {lives.detail}", "look at the sidecar's log")
    ready = client.get("/readyz")
    if ready is not None and ready.status == 200:
        return fine(
            "sidecar", f"the sidecar at {client.address} lives, and every region is reserved"
        )
    said = ready.detail if ready is not None else "it stopped answering"
    shown = client.get("/v1/regions")
    states = {region["state"] for region in shown.regions()} if shown is not None else set()
    if states & GIVEN_UP or not states:
        return problem("sidecar", f"{client.address} is not ready: {said}", "see `kvcellar status`")
    return warning("sidecar", f"{client.address} is not ready yet: {said}", "wait, and ask again")


def check_desired(settings: Settings) -> Finding:
    """Whether what is desired of the regions can be used."""
    path = settings.desired_file
    if path is None:
        return fine("desired", "no desired state is followed: KVCELLAR_DESIRED_FILE is not set")
    file = DesiredFile(path, settings.pod_uid)
    file.look()
    if file.current.problem:
        found = f"{path} is not used: {printable(file.current.problem)}"
        return problem("desired", found, "look at the controller's log and the pod's annotation")
    ids = json.dumps(sorted(file.current.regions))
    return fine("desired", f"{path} can be used; it names the regions {printable(ids)}")
