"""GPUs for tests: a real one where the machine has one, and the simulated driver everywhere.

`build_stub` compiles tests/fakes/stub_libcuda against the vendor's own header. `Gpu` opens a driver, real
or simulated, and has the few calls that only tests make: device memory, work on the compute stream, a
context. kvcellar's own calls stay in `GpuDevice`.
"""

import ctypes
import subprocess
import sysconfig
from collections.abc import Callable
from ctypes import byref, c_int, c_long, c_size_t, c_ubyte, c_uint64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcellar.worker import cuda_driver, hip_runtime
from kvcellar.worker.driver import STREAM_NON_BLOCKING, DriverCalls
from kvcellar.worker.gpu_device import GpuDevice

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tests" / "fakes" / "stub_libcuda"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Vendor:
    """What differs between CUDA and HIP for a test."""

    name: str
    header: str
    """Path below a site-packages folder."""
    source: str
    flags: tuple[str, ...]
    load: Callable[[str], DriverCalls]
    allocate: str
    free: str
    write: str
    read: str
    copy: str
    begin_capture: str
    end_capture: str
    destroy_graph: str


CUDA = Vendor(
    name="cuda",
    header="nvidia/cu13/include/cuda.h",
    source="cuda.c",
    flags=(),
    load=cuda_driver.load,
    allocate="cuMemAlloc_v2",
    free="cuMemFree_v2",
    write="cuMemcpyHtoD_v2",
    read="cuMemcpyDtoH_v2",
    copy="cuMemcpyDtoDAsync_v2",
    begin_capture="cuStreamBeginCapture_v2",
    end_capture="cuStreamEndCapture",
    destroy_graph="cuGraphDestroy",
)
HIP = Vendor(
    name="hip",
    header="triton/backends/amd/include/hip/hip_runtime_api.h",
    source="hip.c",
    flags=("-D__HIP_PLATFORM_AMD__",),
    load=hip_runtime.load,
    allocate="hipMalloc",
    free="hipFree",
    write="hipMemcpyHtoD",
    read="hipMemcpyDtoH",
    copy="hipMemcpyDtoDAsync",
    begin_capture="hipStreamBeginCapture",
    end_capture="hipStreamEndCapture",
    destroy_graph="hipGraphDestroy",
)


def header_of(vendor: Vendor) -> Path | None:
    """The vendor's header in this environment, or in that of an engine; None if neither has it."""
    own = Path(sysconfig.get_path("purelib"))
    engines = sorted(ROOT.glob(".venv-vllm*/lib/python3*/site-packages"))
    return next((p for s in (own, *engines) if (p := s / vendor.header).exists()), None)


def include_folder(vendor: Vendor, header: Path) -> Path:
    """The folder to give to the compiler."""
    return header.parents[1] if vendor is HIP else header.parent


def compile_c(sources: list[Path], output: Path, *flags: str) -> Path:
    """Compile with gcc; warnings are errors."""
    argv = ["gcc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([*argv, *map(str, sources), "-o", str(output)], check=True)
    return output


def build_stub(vendor: Vendor, folder: Path) -> Path | None:
    """The simulated driver as a shared library; None without the vendor's header."""
    header = header_of(vendor)
    if header is None:
        return None
    include = f"-I{include_folder(vendor, header)}"
    flags = ("-fPIC", "-shared", "-pthread", "-Wl,-Bsymbolic", include, *vendor.flags)
    sources = [STUB / "stub.c", STUB / vendor.source]
    return compile_c(sources, folder / f"lib{vendor.name}_stub.so", *flags)


def missing_gpu() -> str:
    """Why there is no real CUDA GPU here; empty if there is one."""
    try:
        library = ctypes.CDLL(cuda_driver.LIBRARY)
    except OSError as error:
        return f"no GPU on this machine: {error}"
    n_devices = c_int(0)
    if (code := library.cuInit(0)) or library.cuDeviceGetCount(byref(n_devices)):
        return f"no GPU on this machine: cuInit gives {code}"
    return "" if n_devices.value else "no GPU on this machine: the driver sees none"


class Gpu:
    """A driver that tests use: opened once for a process. `close` gives its context back."""

    def __init__(self, vendor: Vendor, library: str, *, is_real: bool) -> None:
        self.vendor = vendor
        self.is_real = is_real
        self.path = library
        self._library = ctypes.CDLL(library)
        if vendor is CUDA:
            context = c_void_p()
            self._call("cuInit", 0)
            self._call("cuDevicePrimaryCtxRetain", byref(context), 0)
            self._call("cuCtxSetCurrent", context)
        self.calls = vendor.load(library)

    def close(self) -> None:
        if self.vendor is CUDA:
            self._call("cuCtxSetCurrent", None)
            self._call("cuDevicePrimaryCtxRelease_v2", 0)

    # --- kvcellar's device, and the engine's side

    def device(self, stream: int, *, in_batches: bool = True) -> GpuDevice:
        """A device whose engine computes on `stream`. The driver is opened anew, as in a new process."""
        calls = self.vendor.load(self.path)
        if not in_batches:
            calls = replace(calls, copy_batch=None)
        return GpuDevice(calls, lambda: stream)

    def new_stream(self) -> int:
        handle = c_void_p()
        self._check(self.calls.stream_create(byref(handle), STREAM_NON_BLOCKING, 0))
        assert handle.value
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        self._check(self.calls.stream_destroy(stream))

    def allocate(self, size_bytes: int) -> int:
        address = c_uint64()
        self._call(self.vendor.allocate, byref(address), c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call(self.vendor.free, c_uint64(address))

    def write(self, address: int, content: Bytes) -> None:
        """Fill device memory at once; nothing may be queued for it."""
        source = c_void_p(content.ctypes.data)
        self._call(self.vendor.write, c_uint64(address), source, c_size_t(content.nbytes))

    def read(self, address: int, size_bytes: int) -> Bytes:
        """Device memory as it is now."""
        content = np.empty(size_bytes, dtype=np.uint8)
        target = c_void_p(content.ctypes.data)
        self._call(self.vendor.read, target, c_uint64(address), c_size_t(size_bytes))
        return content

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        """Queue a copy on the device: what stands for the engine's computing."""
        size = c_size_t(size_bytes)
        self._call(self.vendor.copy, c_uint64(dst), c_uint64(src), size, c_void_p(stream))

    def synchronize(self) -> None:
        self._check(self.calls.synchronize())

    def begin_capture(self, stream: int) -> None:
        self._call(self.vendor.begin_capture, c_void_p(stream), 0)

    def end_capture(self, stream: int) -> None:
        graph = c_void_p()
        self._call(self.vendor.end_capture, c_void_p(stream), byref(graph))
        if graph.value:
            self._call(self.vendor.destroy_graph, graph)

    def _call(self, function: str, *arguments: object) -> None:
        self._check(getattr(self._library, function)(*arguments))

    def _check(self, code: int) -> None:
        assert code == 0, f"the driver gives {code}"


class StubGpu(Gpu):
    """The simulated driver, and what only it can be told and asked."""

    def __init__(self, vendor: Vendor, library: Path) -> None:
        self._stub = ctypes.CDLL(str(library))
        self._stub.stub_reset.argtypes = [c_uint64]
        self._stub.stub_fail.argtypes = [ctypes.c_char_p, c_long, c_long, c_int, c_int]
        self._stub.stub_fail_copy.argtypes = [c_long, c_int]
        self._stub.stub_set.argtypes = [ctypes.c_char_p, c_long]
        self._stub.stub_adopt.argtypes = [c_uint64, c_uint64]
        self._stub.stub_count.argtypes = [ctypes.c_char_p]
        self._stub.stub_count.restype = c_long
        self._stub.stub_violation.restype = ctypes.c_char_p
        self.reset(0)
        super().__init__(vendor, str(library), is_real=False)

    def reset(self, seed: int) -> None:
        """Forget everything, also settings and failures, and take another order."""
        self._stub.stub_reset(seed)

    def set(self, name: str, value: int = 1) -> None:
        self._stub.stub_set(name.encode(), value)

    def fail(
        self, function: str, nth: int, code: int, *, times: int = 1, is_sticky: bool = False
    ) -> None:
        """Let the n-th call of a function from now on (`*`: of any) fail, and more behind it."""
        self._stub.stub_fail(function.encode(), nth, times, code, int(is_sticky))

    def fail_no_more(self) -> None:
        """Take back a `fail` that did not happen yet."""
        self._stub.stub_fail(b"", 0, 0, 0, 0)

    def fail_copy(self, nth: int, code: int = 700) -> None:
        """Let the n-th piece that is moved from now on fail on the device."""
        self._stub.stub_fail_copy(nth, code)

    def adopt(self, address: int, size_bytes: int) -> None:
        """Let memory of this process pass for device memory, such as a CPU engine's tensors."""
        self._stub.stub_adopt(address, size_bytes)

    def count(self, what: str) -> int:
        number: int = self._stub.stub_count(what.encode())
        return number

    def calls_of(self, function: str) -> int:
        return self.count(f"calls:{function}")

    @property
    def violation(self) -> str:
        """The first thing that a real driver would not promise to work; empty if there was none."""
        text: bytes = self._stub.stub_violation()
        return text.decode()

    @property
    def leaks(self) -> dict[str, int]:
        """What is still held."""
        held = {what: self.count(what) for what in ("registrations", "streams", "events")}
        return {what: number for what, number in held.items() if number}


def view(address: int, size_bytes: int) -> Bytes:
    """Host memory as an array."""
    memory = (c_ubyte * size_bytes).from_address(address)
    return np.ctypeslib.as_array(memory)
