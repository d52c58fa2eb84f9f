"""What ctypes is told of the drivers agrees with the vendors' own headers.

The arguments of each function are read from the header's text; a C program compiled against it says how
large each type is and whether it is a pointer, and where the fields of structures lie.
"""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcellar.worker import cuda_driver, driver, hip_runtime
from tests.support.gpus import CUDA, HIP, Vendor, compile_c, header_of, include_folder

pytestmark = pytest.mark.integration

POINTER = 5  # what gcc's __builtin_classify_type says
SIMPLE_POINTERS = (ctypes.c_void_p, ctypes.c_char_p)

PROGRAM = """
#define __CUDA_API_VERSION_INTERNAL_ODR
#include <stdio.h>
#include <stddef.h>
#include <{include}>
#define TYPE(T) printf("%zu %d\\n", sizeof(T), __builtin_classify_type((T)0) == {pointer})
#define NUMBER(N) printf("%lld\\n", (long long)(N))
int main(void)
{{
{lines}
    return 0;
}}
"""


def find_header(vendor: Vendor) -> Path:
    header = header_of(vendor)
    if header is None:
        pytest.skip(f"no {vendor.header} in any environment: make venv venv-vllm")
    return header


def ask(vendor: Vendor, folder: Path, lines: Sequence[str]) -> list[list[int]]:
    """The numbers that a C program prints, a list for each line."""
    header = find_header(vendor)
    include = "hip/hip_runtime_api.h" if vendor is HIP else "cuda.h"
    source = folder / "ask.c"
    text = PROGRAM.format(include=include, pointer=POINTER, lines="\n".join(lines))
    source.write_text(text)
    program = compile_c(
        [source], folder / "ask", f"-I{include_folder(vendor, header)}", *vendor.flags
    )
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return [[int(number) for number in line.split()] for line in output.splitlines()]


def arguments_of(text: str, declaration: str) -> list[str] | None:
    """The types of a function's arguments, from a header's text; None if it is not declared."""
    found = re.search(declaration + r"\s*\(([^;]*)\)\s*;", text)
    if found is None:
        return None
    # Default values, which C++ has.
    listed = re.sub(r"__dparm\([^)]*\)|=[^,]*", "", found[1]).split(",")
    arguments = [" ".join(argument.split()) for argument in listed]
    if arguments in ([""], ["void"]):
        return []
    return [re.sub(r"\b\w+$", "", argument) for argument in arguments]  # without the name


def shape_of(ctype: type) -> list[int]:
    """Size, and whether it is a pointer."""
    is_pointer = issubclass(ctype, (*SIMPLE_POINTERS, ctypes._Pointer))
    return [ctypes.sizeof(ctype), int(is_pointer)]


def check(
    vendor: Vendor, folder: Path, declared: dict[str, list[str]], ours: dict[str, list[type]]
) -> None:
    lines = [f"    TYPE({argument});" for name in ours for argument in declared[name]]
    shapes = iter(ask(vendor, folder, lines))
    for name, types in ours.items():
        assert len(types) == len(declared[name]), (name, declared[name])
        for position, ctype in enumerate(types):
            assert shape_of(ctype) == next(shapes), (name, position, declared[name][position])


def test_cuda_functions_take_what_the_header_says(tmp_path: Path) -> None:
    text = find_header(CUDA).read_text()
    declared = {}
    for symbol in cuda_driver.SIGNATURES:
        name = symbol.removesuffix("_v2")
        if symbol != name:  # the header maps the name to this version
            assert re.search(rf"#define {name}\s+(__CUDA_API_PT\w+\()?{symbol}\b", text), symbol
        arguments = arguments_of(text, rf"CUDAAPI {name}")
        if symbol == "cuGetProcAddress":  # the older of two, behind "internal"
            arguments = arguments_of(
                text[text.index("#undef cuGetProcAddress") :], f"CUDAAPI {name}"
            )
        assert arguments is not None, symbol
        declared[symbol] = arguments
    check(CUDA, tmp_path, declared, {n: list(t) for n, t in cuda_driver.SIGNATURES.items()})


def test_both_forms_of_the_batch_take_what_the_header_says(tmp_path: Path) -> None:
    text = (find_header(CUDA).parent / "cudaTypedefs.h").read_text()
    declared: dict[str, list[str]] = {}
    ours: dict[str, list[type]] = {}
    for since, types in cuda_driver.BATCH_SIGNATURES.items():
        name = f"PFN_cuMemcpyBatchAsync_v{since}"
        arguments = arguments_of(text, rf"\(CUDAAPI \*{name}\)")
        assert arguments is not None
        declared[name] = [a.replace("CUdeviceptr_v2", "CUdeviceptr") for a in arguments]
        ours[name] = list(types)
    check(CUDA, tmp_path, declared, ours)


def test_hip_functions_take_what_the_header_says(tmp_path: Path) -> None:
    text = find_header(HIP).read_text()
    declared = {}
    for symbol in hip_runtime.SIGNATURES:
        arguments = arguments_of(text, rf"hipError_t {symbol}")
        assert arguments is not None, symbol
        declared[symbol] = arguments
    check(HIP, tmp_path, declared, {n: list(t) for n, t in hip_runtime.SIGNATURES.items()})


def test_cuda_structures_have_the_headers_layout(tmp_path: Path) -> None:
    lines, ours = [], []
    for name, structure in (
        ("CUmemcpyAttributes", cuda_driver.MemcpyAttributes),
        ("CUmemLocation", cuda_driver.MemLocation),
    ):
        lines.append(f"    NUMBER(sizeof({name}));")
        ours.append([ctypes.sizeof(structure)])
        for field, *_ in structure._fields_:
            lines.append(f"    NUMBER(offsetof({name}, {field}));")
            ours.append([getattr(structure, field).offset])
    assert ask(CUDA, tmp_path, lines) == ours


CONSTANTS = {
    "CUDA_ERROR_NOT_READY": driver.NOT_READY,
    "CUDA_ERROR_NOT_SUPPORTED": driver.NOT_SUPPORTED,
    "CU_EVENT_DISABLE_TIMING": driver.EVENT_DISABLE_TIMING,
    "CU_STREAM_NON_BLOCKING": driver.STREAM_NON_BLOCKING,
    "CU_STREAM_CAPTURE_STATUS_NONE": 0,
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": cuda_driver.SRC_ACCESS_ORDER_STREAM,
    "CU_MEMCPY_SRC_ACCESS_ORDER_ANY": cuda_driver.SRC_ACCESS_ORDER_ANY,
    "CU_GET_PROC_ADDRESS_DEFAULT": 0,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": (
        cuda_driver.CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    ),
}
HIP_CONSTANTS = {
    "hipErrorNotReady": driver.NOT_READY,
    "hipErrorNotSupported": driver.NOT_SUPPORTED,
    "hipEventDisableTiming": driver.EVENT_DISABLE_TIMING,
    "hipStreamNonBlocking": driver.STREAM_NON_BLOCKING,
    "hipStreamCaptureStatusNone": 0,
}


@pytest.mark.parametrize(
    ("vendor", "constants"), [(CUDA, CONSTANTS), (HIP, HIP_CONSTANTS)], ids=["cuda", "hip"]
)
def test_constants_have_the_headers_values(
    tmp_path: Path, vendor: Vendor, constants: dict[str, int]
) -> None:
    values = ask(vendor, tmp_path, [f"    NUMBER({name});" for name in constants])
    assert [value for (value,) in values] == list(constants.values())
