"""`kvcellar doctor`: checks the machine or container that it runs in, and leaves nothing behind."""

import json
import os
import sys
from dataclasses import asdict

from kvcellar.cli.doctor.findings import Finding, Verdict, problem
from kvcellar.cli.doctor.kernel import check_kernel
from kvcellar.cli.doctor.software import check_desired, check_library, check_sidecar, check_vllm
from kvcellar.cli.doctor.volume import check_directory, check_memory, check_volume
from kvcellar.contract import printable
from kvcellar.daemon.config import Settings
from kvcellar.errors import ConfigurationError, NotReady

_WIDTH = max(map(len, Verdict))


def run(*, as_json: bool) -> int:
    """Print what was found; 0 without a problem, else 6."""
    found = examine()
    is_healthy = all(finding.verdict is not Verdict.PROBLEM for finding in found)
    if as_json:
        body = {"healthy": is_healthy, "findings": [asdict(finding) for finding in found]}
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        sys.stdout.write("".join(map(_lines, found)))
    return 0 if is_healthy else NotReady.exit_status


def examine() -> list[Finding]:
    """Every check, in the order in which one mistake leads to the next."""
    software = [check_library(os.environ), check_vllm(os.environ)]
    try:
        settings = Settings.load()
    except ConfigurationError as error:
        # Where the regions are is not known then, so nothing can be said of the volume.
        return [
            problem("settings", str(error), "docs/reference/settings.md has them all"),
            *software,
        ]
    directory = settings.region_directory
    place = directory if directory.is_dir() else directory.parent
    return [
        *check_volume(place),
        *check_directory(directory),
        *check_memory(settings, place),
        *check_kernel(place),
        *software,
        check_sidecar(settings),
        check_desired(settings),
    ]


def _lines(finding: Finding) -> str:
    head = f"{finding.verdict:<{_WIDTH}}  {finding.check}: {printable(finding.found)}\n"
    return head + (f"{'':<{_WIDTH}}  do: {printable(finding.remedy)}\n" if finding.remedy else "")
