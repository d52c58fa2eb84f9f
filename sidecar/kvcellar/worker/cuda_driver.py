"""The CUDA driver API through ctypes: signatures, and which form of the batched copy there is.

Integers go in for handles and addresses. Nothing here creates a context: copies run in the one that is
current on the calling thread, torch's primary context. Source of all declarations: NVIDIA's cuda.h, which
tests/integration/test_driver_signatures.py compares them with.

This module must not know plans, jobs, torch or vLLM.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from kvcellar.worker.driver import Call, DriverCalls, DriverLibrary, Signatures

LIBRARY = "libcuda.so.1"

CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
SRC_ACCESS_ORDER_STREAM = 1
SRC_ACCESS_ORDER_ANY = 3

BATCH_WITH_FAIL_INDEX = 12080
BATCH_WITHOUT_FAIL_INDEX = 13000
"""CUDA versions that brought the two forms of cuMemcpyBatchAsync. Source: cudaTypedefs.h."""

_HANDLE = POINTER(c_void_p)
_STRING = POINTER(c_char_p)

SIGNATURES: Signatures = {
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuCtxGetCurrent": (_HANDLE,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuCtxSynchronize": (),
    "cuStreamCreateWithPriority": (_HANDLE, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuEventCreate": (_HANDLE, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuGetErrorName": (c_int, _STRING),
    "cuGetErrorString": (c_int, _STRING),
    "cuGetProcAddress": (c_char_p, _HANDLE, c_int, c_uint64),
}

_ARRAYS = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)
BATCH_SIGNATURES = {
    BATCH_WITH_FAIL_INDEX: (*_ARRAYS, c_void_p, c_void_p),
    BATCH_WITHOUT_FAIL_INDEX: (*_ARRAYS, c_void_p),
}
"""CUDA version -> arguments of cuMemcpyBatchAsync: dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs,
then failIdx in the older form, then the stream."""


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", c_int),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", c_uint),
    )


def load(path: str = LIBRARY) -> DriverCalls:
    """Load the driver. A context has to be current on this thread.

    Raises:
        Unsupported: the library is not there or lacks a function that kvcellar needs.
    """
    library = DriverLibrary(path, SIGNATURES)
    return DriverCalls(
        name="CUDA",
        current=_current(library.get("cuCtxGetCurrent")),
        set_current=library.get("cuCtxSetCurrent"),
        has_default=False,
        priority_range=library.get("cuCtxGetStreamPriorityRange"),
        stream_create=library.get("cuStreamCreateWithPriority"),
        stream_destroy=library.get("cuStreamDestroy_v2"),
        stream_wait_event=library.get("cuStreamWaitEvent"),
        stream_synchronize=library.get("cuStreamSynchronize"),
        stream_is_capturing=library.get("cuStreamIsCapturing"),
        event_create=library.get("cuEventCreate"),
        event_destroy=library.get("cuEventDestroy_v2"),
        event_record=library.get("cuEventRecord"),
        event_query=library.get("cuEventQuery"),
        event_synchronize=library.get("cuEventSynchronize"),
        event_elapsed=library.get("cuEventElapsedTime"),
        host_register=library.get("cuMemHostRegister_v2"),
        host_unregister=library.get("cuMemHostUnregister"),
        synchronize=library.get("cuCtxSynchronize"),
        copy_to_device=library.get("cuMemcpyHtoDAsync_v2"),
        copy_to_host=library.get("cuMemcpyDtoHAsync_v2"),
        copy_batch=_find_batch(library),
        error_name=library.get("cuGetErrorName"),
        error_text=library.get("cuGetErrorString"),
        forget_error=None,  # the driver API keeps none, unlike the runtime
    )


def _current(get_context: Call) -> Callable[[], tuple[int, int | None]]:
    def current() -> tuple[int, int | None]:
        context = c_void_p()
        return get_context(byref(context)), context.value

    return current


def _find_batch(library: DriverLibrary) -> Call | None:
    """The newest form of the batched copy that the driver has, if host addresses may be given to it.

    Where a device cannot use a host pointer for registered memory the batch would fault later, on the
    device; the single copies translate their host pointers.
    """
    version, device, is_usable = c_int(), c_int(), c_int()
    get_address = library.find("cuGetProcAddress")
    if (
        get_address is None
        or library.get("cuDriverGetVersion")(byref(version))
        or library.get("cuCtxGetDevice")(byref(device))
        or library.get("cuDeviceGetAttribute")(
            byref(is_usable), CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device
        )
        or not is_usable.value
    ):
        return None
    for since in (BATCH_WITHOUT_FAIL_INDEX, BATCH_WITH_FAIL_INDEX):
        if version.value < since:
            continue  # a driver refuses to be asked for a version above its own
        address = c_void_p()
        if get_address(b"cuMemcpyBatchAsync", byref(address), since, 0) == 0 and address.value:
            return _batch(address.value, since)
    return None


def _batch(address: int, since: int) -> Call:
    function = ctypes.CFUNCTYPE(c_int, *BATCH_SIGNATURES[since])(address)
    in_order = MemcpyAttributes(srcAccessOrder=SRC_ACCESS_ORDER_STREAM)
    any_order = MemcpyAttributes(srcAccessOrder=SRC_ACCESS_ORDER_ANY)
    first_copy = c_size_t(0)  # the attributes hold from this copy on
    fail_index = c_size_t(0)
    fail_arguments = (byref(fail_index),) if since == BATCH_WITH_FAIL_INDEX else ()

    def copy_batch(
        dst: int, src: int, sizes: int, count: int, is_order_free: bool, stream: int
    ) -> int:
        attributes = byref(any_order if is_order_free else in_order)
        code: int = function(
            dst, src, sizes, count, attributes, byref(first_copy), 1, *fail_arguments, stream
        )
        return code

    return copy_batch
