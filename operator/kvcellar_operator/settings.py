"""What the injector itself has to know of its cluster and its release: one frozen value, made once.

The webhook makes it from its own configuration, `kvcellar inject` from its options.
"""

from dataclasses import dataclass, field

from kvcellar_operator.profiles import Profile

GPU_RESOURCES = (
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/mig-*",
    "amd.com/gpu",
    "amd.com/gpu_*",
    "gpu.intel.com/*",
    "habana.ai/gaudi",
    "aws.amazon.com/neuron*",
)
"""Extended resources, as shell patterns, that tell an engine container. Claims of dynamic resource
allocation count as well."""


@dataclass(frozen=True, slots=True)
class InjectSettings:
    """What every injection has in common.

    Attributes:
        image: reference of kvcellar's image, for sidecar and init containers.
        version: of the injector, for the annotation.
        image_pull_policy: of those containers; "" lets Kubernetes decide.
        default_profile: for pods that name none, where the namespace has no `default`.
        run_as_user: user of our containers where neither engine nor profile says one; None leaves it to
            the image, and to what the cluster fills in (OpenShift).
        shared_group: group that engine and sidecar share where the pod has no fsGroup and their users
            differ.
        has_native_sidecars: whether every kubelet is 1.29 or newer.
        gpu_resources: extended resources, as shell patterns, that tell an engine container.
    """

    image: str
    version: str
    image_pull_policy: str = ""
    default_profile: Profile = field(default_factory=Profile)
    run_as_user: int | None = 65532
    shared_group: int = 65532
    has_native_sidecars: bool = True
    gpu_resources: tuple[str, ...] = GPU_RESOURCES
