"""A GPU device by itself: threads, captures, errors, and drivers that are missing, old or odd."""

import mmap
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed, Unsupported
from kvcellar.worker import cuda_driver, hip_runtime
from kvcellar.worker.gpu_device import GpuDevice
from kvcellar.worker.platforms import device_for
from tests.support.gpus import CUDA, HIP, Gpu, StubGpu, compile_c

PAGE = 4096


class Buffer:
    """Host memory on a page boundary."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        self.content = np.frombuffer(self._memory, dtype=np.uint8)
        self.address = self.content.ctypes.data


def copy(device: GpuDevice, dst: int, src: int, size_bytes: int, direction: Direction) -> None:
    """One copy, waited for."""
    stream, event = device.new_stream(), device.new_event()
    arrays = [np.array([value], dtype=np.uint64) for value in (dst, src, size_bytes)]
    device.copy_batch(arrays[0], arrays[1], arrays[2], stream, direction)
    device.record(event, stream)
    device.synchronize(event)
    device.destroy_event(event)
    device.destroy_stream(stream)


def in_thread(step: Callable[[], object]) -> BaseException | None:
    """Run a step in a new thread; what it raised."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_bytes_go_to_the_device_and_back(gpu: Gpu) -> None:
    device, there, host = gpu.device(0), gpu.allocate(PAGE), Buffer(2 * PAGE)
    host.content[:PAGE] = np.random.default_rng(1).integers(0, 256, PAGE)
    copy(device, there, host.address, PAGE, Direction.LOAD)
    copy(device, host.address + PAGE, there, PAGE, Direction.STORE)
    assert (host.content[PAGE:] == host.content[:PAGE]).all()
    gpu.free(there)


def test_a_thread_without_a_device_gets_this_one(gpu: Gpu) -> None:
    device, there, host = gpu.device(0), gpu.allocate(PAGE), Buffer(PAGE)
    host.content[:] = 7
    assert in_thread(lambda: copy(device, there, host.address, PAGE, Direction.LOAD)) is None
    assert (gpu.read(there, PAGE) == 7).all()
    gpu.free(there)


def test_a_thread_in_another_context_is_refused(stub_cuda: StubGpu) -> None:
    stub_cuda.reset(1)
    device = stub_cuda.device(0)

    def copy_elsewhere() -> None:
        stub_cuda.calls.set_current(0x1234)
        device.new_event()

    raised = in_thread(copy_elsewhere)
    assert isinstance(raised, TransferFailed)
    assert "works in another CUDA context" in str(raised)


def test_a_device_is_not_made_on_a_thread_without_one(stub_cuda: StubGpu) -> None:
    stub_cuda.reset(1)
    raised = in_thread(lambda: stub_cuda.device(0))
    assert isinstance(raised, Unsupported)
    assert "no CUDA device is in use on this thread" in str(raised)


def test_events_tell_what_is_done_and_how_long_it_took(gpu: Gpu) -> None:
    device, stream = gpu.device(0), gpu.new_stream()
    never, start, end = (device.new_event() for _ in range(3))
    assert device.query(never)
    there = gpu.allocate(2 << 20)
    device.record(start, stream)  # type: ignore[arg-type]
    for _ in range(20):
        gpu.copy(there + (1 << 20), there, 1 << 20, stream)
    device.record(end, stream)  # type: ignore[arg-type]
    device.synchronize(end)
    assert device.query(end)
    assert 0 < device.elapsed_s(start, end) < 1
    untimed = device.new_event(is_timed=False)
    device.record(untimed, stream)  # type: ignore[arg-type]
    device.synchronize(untimed)
    with pytest.raises(TransferFailed, match=r"\(400\)"):
        device.elapsed_s(start, untimed)
    for event in (never, start, end, untimed):
        device.destroy_event(event)
    gpu.free(there)
    gpu.destroy_stream(stream)


def test_host_memory_is_registered_once_and_unregistered_by_its_address(gpu: Gpu) -> None:
    device, host = gpu.device(0), Buffer(16 * PAGE)
    device.register_host(host.address, 8 * PAGE)
    with pytest.raises(TransferFailed, match=r"\(712\)"):
        device.register_host(host.address, 8 * PAGE)
    device.register_host(host.address + 8 * PAGE, 8 * PAGE)
    device.unregister_host(host.address + 8 * PAGE)
    device.unregister_host(host.address)
    with pytest.raises(TransferFailed, match="could not unregister"):
        device.unregister_host(host.address)


def test_a_copy_that_crosses_two_registrations_is_refused(stub: StubGpu) -> None:
    device, there, host = stub.device(0), stub.allocate(4 * PAGE), Buffer(4 * PAGE)
    for half in (host.address, host.address + 2 * PAGE):
        device.register_host(half, 2 * PAGE)
    with pytest.raises(TransferFailed, match=r"could not queue 1 copies: .* \(1\)"):
        copy(device, there, host.address + PAGE, 2 * PAGE, Direction.LOAD)
    for half in (host.address, host.address + 2 * PAGE):
        device.unregister_host(half)
    stub.synchronize()
    stub.free(there)


def test_nothing_is_registered_during_a_capture(gpu: Gpu) -> None:
    stream, host = gpu.new_stream(), Buffer(PAGE)
    device = gpu.device(stream)
    gpu.begin_capture(stream)
    with pytest.raises(TransferFailed, match="while a graph is being captured"):
        device.register_host(host.address, PAGE)
    gpu.end_capture(stream)
    device.register_host(host.address, PAGE)
    device.unregister_host(host.address)
    gpu.destroy_stream(stream)


def test_an_error_has_the_drivers_name_and_text(stub: StubGpu) -> None:
    device = stub.device(0)
    stub.fail("*", 1, 2)
    with pytest.raises(TransferFailed) as caught:
        device.new_event()
    name = "CUDA_ERROR_OUT_OF_MEMORY" if stub.vendor is CUDA else "hipErrorOutOfMemory"
    vendor = stub.vendor.name.upper()
    assert str(caught.value) == f"{vendor} could not make an event: {name} (2), out of memory"
    stub.fail("*", 1, 31337)
    with pytest.raises(TransferFailed, match=r"unknown \(31337\), unknown"):
        device.new_event()


def test_no_error_is_left_for_the_engine_to_find(stub_hip: StubGpu) -> None:
    stub_hip.reset(2)
    stub_hip.set("batch is not supported")
    device, host, there = stub_hip.device(0), Buffer(PAGE), stub_hip.allocate(PAGE)
    copy(device, there, host.address, PAGE, Direction.LOAD)
    stream, event = device.new_stream(), device.new_event()
    for _ in range(50):
        device.record(event, stream)
        device.query(event)  # "not ready" is an error to HIP
    with pytest.raises(TransferFailed):
        device.unregister_host(host.address)
    assert stub_hip.calls.forget_error is not None
    assert stub_hip.calls.forget_error() == 0
    device.destroy_event(event)
    device.destroy_stream(stream)
    stub_hip.free(there)


# --- drivers that are missing, too old, or answer nonsense


def test_a_driver_that_is_missing_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "libcuda.so.1")
    with pytest.raises(Unsupported, match=r"libcuda\.so\.1 cannot be loaded"):
        cuda_driver.load(path)
    with pytest.raises(Unsupported, match="turn CPU offload off"):
        hip_runtime.load(path)


def test_a_driver_that_is_too_old_is_named(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuCtxGetCurrent(void **c) { *c = 0; return 0; }\n")
    library = compile_c([source], tmp_path / "libold.so", "-shared", "-fPIC")
    with pytest.raises(Unsupported, match=r"has no cu\w+: this driver is too old"):
        cuda_driver.load(str(library))


@pytest.mark.parametrize("function", ["stream_create", "event_create"])
def test_a_driver_that_gives_no_handle_and_no_error_is_refused(
    stub: StubGpu, function: str
) -> None:
    def nothing(*arguments: object) -> int:
        return 0

    stream = nothing if function == "stream_create" else stub.calls.stream_create
    event = nothing if function == "event_create" else stub.calls.event_create
    calls = replace(stub.calls, stream_create=stream, event_create=event)
    device = GpuDevice(calls, lambda: 0)
    with pytest.raises(TransferFailed, match="gave none, without an error"):
        device.new_stream() if function == "stream_create" else device.new_event()


def test_a_driver_that_cannot_name_an_error_still_gives_its_number(stub: StubGpu) -> None:
    def no_name(code: int, text: object) -> int:
        return 0

    device = GpuDevice(replace(stub.calls, error_name=no_name, error_text=no_name), lambda: 0)
    stub.fail("*", 1, 2)
    with pytest.raises(TransferFailed, match=r"unknown \(2\), unknown"):
        device.new_event()


def test_the_device_is_chosen_by_what_torch_was_built_for(
    stub: StubGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(cuda_stream=77)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(current_stream=lambda: stream),
        version=SimpleNamespace(hip="7.1" if stub.vendor is HIP else None),
    )
    module = cuda_driver if stub.vendor is CUDA else hip_runtime
    calls = stub.calls
    monkeypatch.setattr(module, "load", lambda: calls)
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = device_for("cuda")
    assert device.current_stream() == 77
    assert device.pins_host


def test_without_torch_a_device_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(Unsupported, match="pass a device to CPUOffloadingWorker"):
        device_for("cuda")


def test_the_stub_refuses_the_legacy_default_stream_for_a_batch(stub: StubGpu) -> None:
    there, host = stub.allocate(PAGE), Buffer(PAGE)
    arrays = [np.array([value], dtype=np.uint64) for value in (there, host.address, PAGE)]
    assert stub.calls.copy_batch is not None
    for stream in (0, 1):
        code = stub.calls.copy_batch(*(a.ctypes.data for a in arrays), 1, True, stream)
        assert code == 1
    stub.free(there)
