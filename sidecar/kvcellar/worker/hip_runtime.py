"""The HIP runtime through ctypes, in the shape of the CUDA driver.

A thread works on a device number, not on a context. The batched copy is new in ROCm 7 and takes no
attributes, so sources are read in stream order. Source of all declarations: AMD's hip_runtime_api.h,
which tests/integration/test_driver_signatures.py compares them with.

This module must not know plans, jobs, torch or vLLM.
"""

from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p

from kvcellar.worker.driver import Call, DriverCalls, DriverLibrary, Signatures

LIBRARY = "libamdhip64.so"

_HANDLE = POINTER(c_void_p)
_STRING = POINTER(c_char_p)

SIGNATURES: Signatures = {
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "hipDeviceSynchronize": (),
    "hipStreamCreateWithPriority": (_HANDLE, c_uint, c_int),
    "hipStreamDestroy": (c_void_p,),
    "hipStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "hipStreamSynchronize": (c_void_p,),
    "hipStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "hipEventCreateWithFlags": (_HANDLE, c_uint),
    "hipEventDestroy": (c_void_p,),
    "hipEventRecord": (c_void_p, c_void_p),
    "hipEventQuery": (c_void_p,),
    "hipEventSynchronize": (c_void_p,),
    "hipEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "hipHostRegister": (c_void_p, c_size_t, c_uint),
    "hipHostUnregister": (c_void_p,),
    "hipMemcpyHtoDAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "hipMemcpyDtoHAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "hipMemcpyBatchAsync": (
        c_void_p,
        c_void_p,
        c_void_p,
        c_size_t,
        c_void_p,
        c_void_p,
        c_size_t,
        c_void_p,
        c_void_p,
    ),
    "hipDrvGetErrorName": (c_int, _STRING),
    "hipDrvGetErrorString": (c_int, _STRING),
    "hipGetLastError": (),
}


def load(path: str = LIBRARY) -> DriverCalls:
    """Load the runtime. The engine's device has to be current on this thread.

    Raises:
        Unsupported: the library is not there or lacks a function that kvcellar needs.
    """
    library = DriverLibrary(path, SIGNATURES)
    return DriverCalls(
        name="HIP",
        current=_current(library.get("hipGetDevice")),
        set_current=library.get("hipSetDevice"),
        has_default=True,  # device 0
        priority_range=library.get("hipDeviceGetStreamPriorityRange"),
        stream_create=library.get("hipStreamCreateWithPriority"),
        stream_destroy=library.get("hipStreamDestroy"),
        stream_wait_event=library.get("hipStreamWaitEvent"),
        stream_synchronize=library.get("hipStreamSynchronize"),
        stream_is_capturing=library.get("hipStreamIsCapturing"),
        event_create=library.get("hipEventCreateWithFlags"),
        event_destroy=library.get("hipEventDestroy"),
        event_record=library.get("hipEventRecord"),
        event_query=library.get("hipEventQuery"),
        event_synchronize=library.get("hipEventSynchronize"),
        event_elapsed=library.get("hipEventElapsedTime"),
        host_register=library.get("hipHostRegister"),
        host_unregister=library.get("hipHostUnregister"),
        synchronize=library.get("hipDeviceSynchronize"),
        copy_to_device=library.get("hipMemcpyHtoDAsync"),
        copy_to_host=library.get("hipMemcpyDtoHAsync"),
        copy_batch=_find_batch(library),
        error_name=library.get("hipDrvGetErrorName"),
        error_text=library.get("hipDrvGetErrorString"),
        # A failed call would show in torch's next check of its own kernels.
        forget_error=library.get("hipGetLastError"),
    )


def _current(get_device: Call) -> Callable[[], tuple[int, int | None]]:
    def current() -> tuple[int, int | None]:
        device = c_int(0)
        return get_device(byref(device)), device.value

    return current


def _find_batch(library: DriverLibrary) -> Call | None:
    function = library.find("hipMemcpyBatchAsync")
    if function is None:
        return None
    fail_index = c_size_t(0)

    def copy_batch(
        dst: int, src: int, sizes: int, count: int, is_order_free: bool, stream: int
    ) -> int:
        del is_order_free
        return function(dst, src, sizes, count, None, None, 0, byref(fail_index), stream)

    return copy_batch
