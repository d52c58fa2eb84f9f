"""All that the builders need to know of one pod, decided before anything is built. Pure."""

from dataclasses import dataclass

from kvcellar import contract
from kvcellar_operator.demands import QosClass
from kvcellar_operator.identity import Identity
from kvcellar_operator.profiles import Profile
from kvcellar_operator.settings import InjectSettings
from kvcellar_operator.shm import SharedMemory
from kvcellar_operator.sizing import Sizing


@dataclass(frozen=True, slots=True)
class Parts:
    """All that the builders need to know of one pod.

    Attributes:
        profile: what to inject.
        settings: the injector's own.
        sizing: how large.
        shm: the volume at /dev/shm.
        identity: user and group of our containers.
        engine_ids: one for each engine container, without `_dp` suffix.
        qos: the class of the pod, to be kept.
        is_host_network: whether the pod uses the node's network.
    """

    profile: Profile
    settings: InjectSettings
    sizing: Sizing
    shm: SharedMemory
    identity: Identity
    engine_ids: tuple[str, ...]
    qos: QosClass
    is_host_network: bool

    @property
    def image(self) -> str:
        """The image of the sidecar and of `kvcellar-wait`."""
        return self.profile.sidecar.image or self.settings.image

    @property
    def has_library(self) -> bool:
        """Whether engines get the library: an unmodified vLLM needs none."""
        return self.profile.mode is contract.Mode.PLUGIN
