"""The CPU as a device: copies of every size, order, failures, and what is left behind."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed, Unsupported
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.platforms import device_for


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


Sizes = NDArray[np.uint64]


def u64(values: list[int]) -> Sizes:
    return np.array(values, dtype=np.uint64)


def sizes_that(hook: Callable[[], object], sizes: list[int]) -> Sizes:
    """Sizes that call `hook` in the copy thread, before anything is copied."""

    class HookedSizes(np.ndarray[tuple[int], np.dtype[np.uint64]]):
        def __le__(self, other: object) -> NDArray[np.bool_]:  # type: ignore[explicit-override]  # 3.12
            hook()
            is_small: NDArray[np.bool_] = np.asarray(self) <= other  # type: ignore[operator]
            return is_small

    return u64(sizes).view(HookedSizes)


def copy_now(device: CpuDevice, dst: list[int], src: list[int], sizes: list[int]) -> None:
    stream, event = device.new_stream(), device.new_event()
    device.copy_batch(u64(dst), u64(src), u64(sizes), stream, Direction.STORE)
    device.record(event, stream)
    device.synchronize(event)
    device.destroy_event(event)
    device.destroy_stream(stream)


SIZES = st.sampled_from([1, 3, 512, 4096, 8192, 8193, 16384, 70000])


@given(st.lists(SIZES, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_pieces_of_any_sizes_arrive_and_nothing_else_changes(
    sizes: list[int], order: random.Random
) -> None:
    device = CpuDevice()
    total = sum(sizes) + 2 * len(sizes)
    source = np.random.default_rng(len(sizes)).integers(1, 255, total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    expected = target.copy()
    places = list(range(len(sizes)))
    order.shuffle(places)
    starts = np.cumsum([0, *[size + 2 for size in sizes]])[:-1].tolist()
    for place in places:
        piece = slice(starts[place], starts[place] + sizes[place])
        expected[piece] = source[piece]
    copy_now(
        device,
        [target.ctypes.data + starts[place] for place in places],
        [source.ctypes.data + starts[place] for place in places],
        [sizes[place] for place in places],
    )
    device.close()
    assert (target == expected).all()


def test_small_pieces_far_apart_are_copied(device: CpuDevice) -> None:
    # A buffer on the heap and one in a mapping are terabytes apart; the view spans both.
    heap = np.arange(64, dtype=np.uint8)
    far = np.zeros(1 << 26, dtype=np.uint8)
    copy_now(
        device,
        [far.ctypes.data, far.ctypes.data + (1 << 25), heap.ctypes.data + 32],
        [heap.ctypes.data, heap.ctypes.data + 8, far.ctypes.data + 5000],
        [8, 8, 8],
    )
    assert far[:8].tolist() == list(range(8))
    assert far[1 << 25 :][:8].tolist() == list(range(8, 16))
    assert heap[32:40].tolist() == [0] * 8


def test_many_small_pieces_are_copied_in_several_steps(device: CpuDevice) -> None:
    source = np.random.default_rng(1).integers(0, 255, (600, 4096), dtype=np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(2).permutation(600)
    copy_now(
        device,
        [target.ctypes.data + int(row) * 4096 for row in range(600)],
        [source.ctypes.data + int(row) * 4096 for row in order],
        [4096] * 600,
    )
    assert (target == source[order]).all()


def test_a_stream_waits_for_an_event_of_another(device: CpuDevice) -> None:
    first, second = device.new_stream(), device.new_stream()
    gate, middle, end = threading.Event(), device.new_event(), device.new_event()
    source, between, target = (np.full(8, value, dtype=np.uint8) for value in (1, 2, 3))
    device.copy_batch(
        u64([between.ctypes.data]),
        u64([source.ctypes.data]),
        sizes_that(lambda: gate.wait(20), [8]),
        first,
        Direction.STORE,
    )
    device.record(middle, first)
    device.wait_event(second, middle)
    device.copy_batch(
        u64([target.ctypes.data]), u64([between.ctypes.data]), u64([8]), second, Direction.LOAD
    )
    device.record(end, second)
    assert not device.query(end)
    gate.set()
    device.synchronize(end)
    assert target.tolist() == [1] * 8
    assert device.elapsed_s(middle, end) >= 0


def test_a_failure_shows_at_the_next_event_only(device: CpuDevice) -> None:
    stream, bad, good = device.new_stream(), device.new_event(), device.new_event()
    device.copy_batch(u64([0]), u64([0]), sizes_that(_break, [1]), stream, Direction.STORE)
    device.record(bad, stream)
    device.record(good, stream)
    device.synchronize(good)
    for _ in range(2):
        with pytest.raises(TransferFailed, match="ZeroDivisionError"):
            device.query(bad)
    with pytest.raises(TransferFailed, match="ZeroDivisionError"):
        device.synchronize(bad)
    device.record(bad, stream)
    device.synchronize(bad)


def _break() -> None:
    raise ZeroDivisionError("a copy that fails")


def test_an_event_that_was_never_recorded_counts_as_reached(device: CpuDevice) -> None:
    event = device.new_event()
    assert device.query(event)
    device.synchronize(event)
    device.record(event, device.current_stream())
    assert device.query(event)


def test_synchronize_all_waits_for_every_stream(device: CpuDevice) -> None:
    source = np.ones(3, dtype=np.uint8)
    target = np.zeros(3, dtype=np.uint8)
    for idx in range(3):
        device.copy_batch(
            u64([target.ctypes.data + idx]),
            u64([source.ctypes.data + idx]),
            sizes_that(lambda: time.sleep(0.01), [1]),
            device.new_stream(),
            Direction.STORE,
        )
    device.synchronize_all()
    assert target.tolist() == [1, 1, 1]


def test_close_ends_every_thread() -> None:
    before = threading.active_count()
    device = CpuDevice()
    device.new_stream()
    device.new_stream()
    assert threading.active_count() == before + 2
    device.close()
    device.close()
    assert threading.active_count() == before


def test_host_memory_of_a_cpu_is_never_pinned(device: CpuDevice) -> None:
    assert not device.pins_host
    device.register_host(4096, 4096)
    device.unregister_host(4096)


def test_a_device_is_chosen_by_the_tensors_type_or_refused_by_name() -> None:
    assert isinstance(device_for("cpu"), CpuDevice)
    with pytest.raises(Unsupported, match="'xpu'"):
        device_for("xpu")
