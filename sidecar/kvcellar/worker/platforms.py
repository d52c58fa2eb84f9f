"""Which platforms kvcellar serves: whose engines get a region, and which device copies for a tensor.

The one place to change when a device is added. This module must not know plans, jobs, torch or vLLM.
"""

from kvcellar.errors import Unsupported
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.devices import Device

_REGION_PLATFORMS = frozenset({"cuda", "rocm", "cpu"})


def uses_region(platform: str) -> bool:
    """Whether engines on this platform keep their chunks in a region, not in private memory.

    Args:
        platform: vLLM's name of it, such as `cuda`. CUDA and ROCm pin the region; a CPU has nothing to
            pin; on the others nobody has tried.
    """
    return platform in _REGION_PLATFORMS


def device_for(device_type: str) -> Device:
    """The device that copies for tensors of this type, such as torch's `tensor.device.type`.

    Raises:
        Unsupported: kvcellar cannot copy from and to such a device.
    """
    if device_type == "cpu":
        return CpuDevice()
    raise Unsupported(
        f"KV cache tensors on device {device_type!r} were given; this version of kvcellar copies for "
        "'cpu' only: turn CPU offload off, or use a version that supports this device"
    )
