"""`kvcellar status`: the regions as the sidecar shows them, or as they lie in the directory."""

import json
import sys
from typing import Any

from kvcellar.cli.client import SidecarClient
from kvcellar.cli.sizes import mebibytes, table
from kvcellar.contract import RegionsBody, printable, to_json
from kvcellar.daemon import orphans
from kvcellar.daemon.cleaning import lying_stock
from kvcellar.daemon.config import Settings
from kvcellar.daemon.status import Status, found_view
from kvcellar.errors import ConfigurationError, NotReady, RegionMismatch
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import Janitor, StockFile
from kvcellar.region.memory import read_limits
from kvcellar.region.metadata import Counters
from kvcellar.region.permissions import not_permitted
from kvcellar.region.survey import survey

_COLUMNS = ("ENGINE", "STATE", "CAPACITY", "RESERVED", "SETTLED", "USED", "ATTACHED", "GENERATION")


def run(*, as_json: bool) -> int:
    """Show the regions.

    Raises:
        NotReady: no sidecar answers and there is no directory.
        ConfigurationError: this process may not look at what lies in the directory.
        RegionMismatch: a page cannot be read, or a data file is not ours; everything was printed before.
    """
    settings = Settings.load()
    answer = SidecarClient(settings.client_host, settings.http_port).get("/v1/regions")
    damage = ""
    if answer is not None and answer.regions():
        regions: dict[str, Any] = answer.json()
    else:
        body, damage = _look(settings)
        regions = to_json(body)
    if as_json:
        sys.stdout.write(json.dumps(regions) + "\n")
    else:
        sys.stdout.write(_table(regions.get("regions", [])))
    if damage:
        raise RegionMismatch(damage)
    return 0


def _look(settings: Settings) -> tuple[RegionsBody, str]:
    """What lies in the directory, and why the first region that cannot be looked at cannot."""
    path = settings.region_directory
    try:
        directory = RegionDirectory.open(path)
    except FileNotFoundError as error:
        raise NotReady(
            f"no sidecar answers at {settings.client_host}:{settings.http_port} and {path} does not "
            "exist: start `kvcellar sidecar`, or set KVCELLAR_DIR to where its regions are"
        ) from error
    try:
        found = survey(directory)
        stock_files = _look_at_root(settings, directory)
        limits = read_limits(directory.fd, pod_limit_bytes=settings.pod_memory_limit_bytes)
    except PermissionError as error:
        raise ConfigurationError(not_permitted(path, "looked at")) from error
    finally:
        directory.close()
    ids = frozenset(region.engine_id for region in found.regions)
    status = Status(
        regions=tuple(found_view(region, Counters()) for region in found.regions),
        contents=settings.contents,
        retention=settings.retention.text,
        on_failure=settings.on_failure,
        limits=tuple(limits),
        orphans=(*orphans.lying(found, ids), *lying_stock(stock_files)),
    )
    return status.regions_body(), next((r.error for r in found.regions if r.error), "")


def _look_at_root(settings: Settings, directory: RegionDirectory) -> list[StockFile]:
    """Files of stock vLLM beside the directory; none where the root cannot be read."""
    janitor = Janitor(settings.root)
    try:
        return janitor.look(directory)
    except OSError:
        return []
    finally:
        janitor.close()


def _table(regions: list[dict[str, Any]]) -> str:
    if not regions:
        return "no regions\n"
    rows = [_COLUMNS, *(_row(region) for region in regions)]
    reasons = [
        printable(f"{region['engineId']}: {region['reason']}") + "\n"
        for region in regions
        if region["reason"]
    ]
    return table(rows) + "".join(reasons)


def _row(region: dict[str, Any]) -> tuple[str, ...]:
    return (
        printable(region["engineId"]),
        printable(region["state"]),
        mebibytes(region["capacityBytes"]),
        mebibytes(region["reservedBytes"]),
        mebibytes(region["settledBytes"]),
        mebibytes(region["usedBytes"]),
        str(len(region["participants"])),
        str(region["generation"]),
    )
