"""What the keepers of one sidecar share."""

from collections.abc import Callable
from dataclasses import dataclass

from kvcellar.contract import OnFailure
from kvcellar.daemon.oom import FirstToBeKilled
from kvcellar.daemon.retention import Retention
from kvcellar.region.directory import RegionDirectory


@dataclass(frozen=True, slots=True)
class KeeperRules:
    """What holds for every region of this sidecar.

    Attributes:
        open_directory: opens the directory of regions, on a description of the caller's own.
        pod_limit_bytes: the pod's memory limit, which a container may not see; 0: unknown.
        oom: raised while pages are being reserved.
    """

    open_directory: Callable[[], RegionDirectory]
    on_failure: OnFailure
    retention: Retention
    pod_limit_bytes: int
    oom: FirstToBeKilled
