"""Every exception of kvcellar.

The tree (exit status of the command line in brackets)::

    KVCellarError                     [1]
    +-- ConfigurationError            [2]  a setting, an argument or a directory that cannot be used
    |   +-- InvalidEngineId           [2]
    |   +-- InvalidCapacity           [2]
    |   +-- InvalidDesiredState       [2]
    +-- DoesNotFit                    [3]  the region is larger than a limit leaves free
    +-- RegionHeld                    [4]  another process owns or uses what was asked for
    |   +-- RankTaken                 [4]
    |   +-- NoFreeSlot                [4]
    +-- RegionMismatch                [5]  the region is not the one that was meant
    |   +-- MetadataDamaged           [5]
    |   +-- RanksDisagree             [5]
    +-- LibraryMismatch               [5]  what lies in a library's directory is not what was installed
    +-- NotReady                      [6]  a wait reached its deadline, or a process is unhealthy
    +-- Unsupported                   [2]  a configuration or version that kvcellar refuses by name
    +-- TransferFailed                [1]  a copy between device and host
    +-- IndexMisuse                   [1]  a call that breaks the contract of the chunk index
    +-- EngineFailed                  [1]  demo.client: the demo's engine did not do what was asked
    +-- SidecarFailed                 [1]  demo.sidecar: the demo's sidecar did not do what was asked
    +-- ProcessesLeft                 [1]  demo.sandbox: processes that should have gone are still there

The last ones stand where their module says, since only the demo knows them; the operator keeps its own in
`kvcellar_operator`. Standard library only: every process of kvcellar imports this module.
"""

from typing import ClassVar


class KVCellarError(Exception):
    """The root: anything that kvcellar raises on purpose."""

    exit_status: ClassVar[int] = 1
    """Exit status of a command that ends with this error (docs/reference/cli.md)."""


class ConfigurationError(KVCellarError):
    """A setting, an argument or a directory cannot be used as it is."""

    exit_status = 2


class InvalidEngineId(ConfigurationError):
    """An engine id that is not `[A-Za-z0-9._-]{1,128}` or that begins with a dot."""


class InvalidCapacity(ConfigurationError):
    """A capacity that is not a whole, positive number of bytes below 2^63."""


class InvalidDesiredState(ConfigurationError):
    """A desired state that cannot be read, breaks its shape, or is another pod's; it is not used."""


class DoesNotFit(KVCellarError):
    """A region needs more than a limit leaves free.

    Attributes:
        asked_bytes: what the region still needs.
        free_bytes: what the binding limit leaves.
        binding_limit: the name of that limit, as in `memory.Limit.name`.
    """

    exit_status = 3

    def __init__(
        self, message: str, *, asked_bytes: int = 0, free_bytes: int = 0, binding_limit: str = ""
    ) -> None:
        """Keep the numbers beside the sentence, so that callers need not parse it.

        The defaults are for pickle, which sets the fields afterwards: engines send errors between processes.
        """
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.binding_limit = binding_limit


class RegionHeld(KVCellarError):
    """Another process owns or uses the region."""

    exit_status = 4


class RankTaken(RegionHeld):
    """A living process already holds this (role, rank)."""


class NoFreeSlot(RegionHeld):
    """Every participant slot of the region is held."""


class RegionMismatch(KVCellarError):
    """The region is not the one that was meant: identity, geometry or fingerprint differ."""

    exit_status = 5


class MetadataDamaged(RegionMismatch):
    """Both copies of a section of the metadata page are bad, or the page has another format."""


class RanksDisagree(RegionMismatch):
    """The ranks of one engine see different regions or compute different geometries."""


class LibraryMismatch(KVCellarError):
    """What lies in a library's directory was not put there by `kvcellar install-library`, or was changed."""

    exit_status = 5


class NotReady(KVCellarError):
    """A deadline passed before the region was there, or a process is unhealthy."""

    exit_status = 6


class Unsupported(KVCellarError):
    """A configuration, platform or version that kvcellar refuses by name."""

    exit_status = 2


class TransferFailed(KVCellarError):
    """A copy between device and host failed."""


class IndexMisuse(KVCellarError):
    """A call that breaks the contract of the chunk index, such as a load of a missing key."""
