"""What kvcellar uses of a GPU driver, by meaning, so that CUDA and HIP are one device to the rest.

`DriverCalls` holds C functions through ctypes, which releases the interpreter lock while one runs. All
return the driver's code, 0 for success; CUDA and HIP share the few codes that are told apart here.
`cuda_driver` and `hip_runtime` fill it.

This module must not know plans, jobs, torch or vLLM.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import Unsupported

Call = Callable[..., int]
"""A function of the driver; arguments as its own documentation has them."""

NOT_READY = 600
NOT_SUPPORTED = 801
"""Source: CUresult in cuda.h, hipError_t in hip_runtime_api.h; the numbers are the same."""

EVENT_DISABLE_TIMING = 2
STREAM_NON_BLOCKING = 1
"""Source: CUevent_flags and CUstream_flags in cuda.h; the same in hip_runtime_api.h."""

Signatures = Mapping[str, Sequence[type]]
"""Symbol -> types of the arguments; every result is an int."""


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """The functions of a driver.

    Attributes:
        name: for people.
        current: the code, and what this thread works on: a context or a device number; None for nothing.
        set_current: make this thread work on such a thing.
        has_default: whether a thread that chose nothing works on something all the same.
        priority_range: store the lowest and the highest stream priority.
        stream_create: (pointer to a handle, flags, priority).
        stream_destroy: of a handle.
        stream_wait_event: (stream, event, flags).
        stream_synchronize: block until the stream has no work left.
        stream_is_capturing: (stream, pointer to a status, 0 for no).
        event_create: (pointer to a handle, flags).
        event_destroy: of a handle.
        event_record: (event, stream).
        event_query: 0 or NOT_READY.
        event_synchronize: block until the event is reached.
        event_elapsed: (pointer to a float of milliseconds, start, end).
        host_register: (address, bytes, flags).
        host_unregister: of an address.
        synchronize: block until the device has no work left.
        copy_to_device: (device address, host address, bytes, stream).
        copy_to_host: (host address, device address, bytes, stream).
        copy_batch: (addresses of the arrays dst, src and sizes, their length, whether the source may
            be read out of order, stream); None if the driver or the device has no batch.
        error_name: (code, pointer to a C string).
        error_text: the same.
        forget_error: drop the error that the driver keeps for a thread after a failed call; None if
            it keeps none.
    """

    name: str
    current: Callable[[], tuple[int, int | None]]
    set_current: Call
    has_default: bool
    priority_range: Call
    stream_create: Call
    stream_destroy: Call
    stream_wait_event: Call
    stream_synchronize: Call
    stream_is_capturing: Call
    event_create: Call
    event_destroy: Call
    event_record: Call
    event_query: Call
    event_synchronize: Call
    event_elapsed: Call
    host_register: Call
    host_unregister: Call
    synchronize: Call
    copy_to_device: Call
    copy_to_host: Call
    copy_batch: Call | None
    error_name: Call
    error_text: Call
    forget_error: Call | None


class DriverLibrary:
    """A loaded shared library whose functions are declared before they are called.

    Args:
        path: name or path, as dlopen(3) takes it.
        signatures: the functions that will be asked for.

    Raises:
        Unsupported: the library cannot be loaded.
    """

    def __init__(self, path: str, signatures: Signatures) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise Unsupported(
                f"the driver library {path} cannot be loaded ({error}), but the KV cache is on a device "
                "of this kind: make the driver visible in this container, or turn CPU offload off"
            ) from error
        self._path = path
        self._signatures = signatures

    def find(self, symbol: str) -> Call | None:
        """A function, or None if this version of the library lacks it."""
        function: Any = getattr(self._library, symbol, None)
        if function is None:
            return None
        function.argtypes = list(self._signatures[symbol])
        function.restype = ctypes.c_int
        call: Call = function
        return call

    def get(self, symbol: str) -> Call:
        """A function.

        Raises:
            Unsupported: this version of the library lacks it.
        """
        call = self.find(symbol)
        if call is None:
            raise Unsupported(
                f"{self._path} has no {symbol}: this driver is too old for kvcellar; update it, or turn "
                "CPU offload off"
            )
        return call
