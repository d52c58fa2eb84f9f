"""Which platforms kvcellar serves: whose engines get a region, and which device copies for a tensor.

The one place to change when a device is added. This module must not know plans, jobs or vLLM, and does
not import torch: tensors on a GPU are torch's, so an engine that has some has imported it.
"""

import sys
from types import ModuleType

from kvcellar.errors import Unsupported
from kvcellar.worker import cuda_driver, hip_runtime
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.devices import Device
from kvcellar.worker.gpu_device import GpuDevice

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

    Call it on the engine's own thread, once the engine works on its device. torch says `cuda` for
    ROCm's devices too; which of the two it was built for decides.

    Raises:
        Unsupported: kvcellar cannot copy from and to such a device, or its driver is missing or too old.
        TransferFailed: the driver gave an error.
    """
    match device_type:
        case "cpu":
            return CpuDevice()
        case "cuda":
            return _gpu(sys.modules.get("torch"))
        case _:
            raise Unsupported(
                f"KV cache tensors on device {device_type!r} were given; this version of kvcellar copies "
                "for 'cpu' and 'cuda' only (ROCm's devices are 'cuda' to torch): turn CPU offload off, "
                "or use a version that supports this device"
            )


def _gpu(torch: ModuleType | None) -> GpuDevice:
    if torch is None:
        raise Unsupported(
            "KV cache tensors on device 'cuda' were given, but torch, whose stream copies have to wait "
            "for, is not loaded: pass a device to CPUOffloadingWorker"
        )

    def current_stream() -> int:
        handle: int = torch.cuda.current_stream().cuda_stream
        return handle

    calls = hip_runtime.load() if torch.version.hip else cuda_driver.load()
    return GpuDevice(calls, current_stream)
