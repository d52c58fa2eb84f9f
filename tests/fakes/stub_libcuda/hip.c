/* The simulated driver as the HIP runtime. AMD's header checks every signature here. */

#include "stub.h"

#include <hip/hip_runtime_api.h>
#include <stdlib.h>

static _Thread_local int current_device;
static _Thread_local hipError_t last_error;

/* Source: hip_runtime_api.h, hipGetLastError: a failed call is kept for its thread until asked for. */
static hipError_t done(int code)
{
    if (code)
        last_error = (hipError_t)code;
    return (hipError_t)leave(code);
}

#define ENTER(function)           \
    do {                          \
        int code_ = enter(function); \
        if (code_)                \
            return done(code_);   \
    } while (0)

hipError_t hipGetDevice(int *device)
{
    ENTER("hipGetDevice");
    *device = current_device;
    return done(STUB_SUCCESS);
}

hipError_t hipSetDevice(int device)
{
    ENTER("hipSetDevice");
    current_device = device;
    return done(STUB_SUCCESS);
}

hipError_t hipGetDeviceCount(int *n)
{
    ENTER("hipGetDeviceCount");
    *n = 1;
    return done(STUB_SUCCESS);
}

hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER("hipDeviceGetStreamPriorityRange");
    *least = 0;
    *greatest = -1;
    return done(STUB_SUCCESS);
}

hipError_t hipDeviceSynchronize(void)
{
    ENTER("hipDeviceSynchronize");
    return done(device_synchronize());
}

hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned int flags, int priority)
{
    ENTER("hipStreamCreateWithPriority");
    return done(stream_create((address_t *)stream, flags, priority));
}

hipError_t hipStreamDestroy(hipStream_t stream)
{
    ENTER("hipStreamDestroy");
    return done(stream_destroy((address_t)stream));
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned int flags)
{
    ENTER("hipStreamWaitEvent");
    return done(flags ? STUB_INVALID_VALUE : stream_wait_event((address_t)stream, (address_t)event));
}

hipError_t hipStreamSynchronize(hipStream_t stream)
{
    ENTER("hipStreamSynchronize");
    return done(stream_synchronize((address_t)stream));
}

hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus *status)
{
    ENTER("hipStreamIsCapturing");
    int is_capturing = 0;
    int code = stream_is_capturing((address_t)stream, &is_capturing);
    *status = is_capturing ? hipStreamCaptureStatusActive : hipStreamCaptureStatusNone;
    return done(code);
}

hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode)
{
    (void)mode;
    ENTER("hipStreamBeginCapture");
    return done(stream_capture((address_t)stream, true));
}

hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t *graph)
{
    ENTER("hipStreamEndCapture");
    *graph = NULL;
    return done(stream_capture((address_t)stream, false));
}

hipError_t hipGraphDestroy(hipGraph_t graph)
{
    (void)graph;
    ENTER("hipGraphDestroy");
    return done(STUB_SUCCESS);
}

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags)
{
    ENTER("hipEventCreateWithFlags");
    return done(event_create((address_t *)event, !(flags & hipEventDisableTiming)));
}

hipError_t hipEventDestroy(hipEvent_t event)
{
    ENTER("hipEventDestroy");
    return done(event_destroy((address_t)event));
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream)
{
    ENTER("hipEventRecord");
    return done(event_record((address_t)event, (address_t)stream));
}

hipError_t hipEventQuery(hipEvent_t event)
{
    ENTER("hipEventQuery");
    return done(event_query((address_t)event));
}

hipError_t hipEventSynchronize(hipEvent_t event)
{
    ENTER("hipEventSynchronize");
    return done(event_synchronize((address_t)event));
}

hipError_t hipEventElapsedTime(float *milliseconds, hipEvent_t start, hipEvent_t end)
{
    ENTER("hipEventElapsedTime");
    return done(event_elapsed(milliseconds, (address_t)start, (address_t)end));
}

hipError_t hipHostRegister(void *address, size_t size, unsigned int flags)
{
    ENTER("hipHostRegister");
    return done(flags > 15 ? STUB_INVALID_VALUE : host_register((address_t)address, size));
}

hipError_t hipHostUnregister(void *address)
{
    ENTER("hipHostUnregister");
    return done(host_unregister((address_t)address));
}

hipError_t hipMalloc(void **address, size_t size)
{
    ENTER("hipMalloc");
    return done(device_allocate((address_t *)address, size));
}

hipError_t hipFree(void *address)
{
    ENTER("hipFree");
    return done(device_free((address_t)address));
}

hipError_t hipMemcpyHtoD(hipDeviceptr_t dst, const void *src, size_t size)
{
    ENTER("hipMemcpyHtoD");
    return done(copy_now((address_t)dst, (address_t)src, size, TO_DEVICE));
}

hipError_t hipMemcpyDtoH(void *dst, hipDeviceptr_t src, size_t size)
{
    ENTER("hipMemcpyDtoH");
    return done(copy_now((address_t)dst, (address_t)src, size, TO_HOST));
}

hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t dst, const void *src, size_t size, hipStream_t stream)
{
    ENTER("hipMemcpyHtoDAsync");
    return done(copy_single((address_t)dst, (address_t)src, size, TO_DEVICE, (address_t)stream));
}

hipError_t hipMemcpyDtoHAsync(void *dst, hipDeviceptr_t src, size_t size, hipStream_t stream)
{
    ENTER("hipMemcpyDtoHAsync");
    return done(copy_single((address_t)dst, (address_t)src, size, TO_HOST, (address_t)stream));
}

hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t dst, hipDeviceptr_t src, size_t size, hipStream_t stream)
{
    ENTER("hipMemcpyDtoDAsync");
    return done(copy_single((address_t)dst, (address_t)src, size, ON_DEVICE, (address_t)stream));
}

hipError_t hipMemsetD8Async(hipDeviceptr_t dst, unsigned char value, size_t size, hipStream_t stream)
{
    ENTER("hipMemsetD8Async");
    return done(fill((address_t)dst, value, size, (address_t)stream));
}

/* Source: hip_runtime_api.h, hipMemcpyBatchAsync: attributes are not supported. So: stream order. */
hipError_t hipMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t n, hipMemcpyAttributes *attributes,
                               size_t *indices, size_t n_attributes, size_t *fail_index, hipStream_t stream)
{
    int refused = enter("hipMemcpyBatchAsync");
    int *orders = malloc((n ? n : 1) * sizeof *orders);
    for (size_t i = 0; i < n; i++)
        orders[i] = ORDER_STREAM;
    struct batch b = {(address_t *)dsts, (address_t *)srcs, sizes, n, orders, fail_index};
    int code = STUB_NOT_SUPPORTED;
    if (refused) {
        code = refused;
        queue_some_of(&b, (address_t)stream);
    } else if (!attributes && !indices && !n_attributes) {
        code = copy_batch(&b, (address_t)stream);
    }
    free(orders);
    return done(code);
}

/* --- errors */

static const struct {
    hipError_t code;
    const char *name, *text;
} errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(hipSuccess, "no error"),
    ERROR(hipErrorInvalidValue, "invalid argument"),
    ERROR(hipErrorOutOfMemory, "out of memory"),
    ERROR(hipErrorInvalidHandle, "invalid resource handle"),
    ERROR(hipErrorNotReady, "device not ready"),
    ERROR(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(hipErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    ERROR(hipErrorNotSupported, "operation not supported"),
    ERROR(hipErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
};

static hipError_t describe(hipError_t code, const char **string, bool is_name)
{
    *string = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *string = is_name ? errors[i].name : errors[i].text;
    return *string ? hipSuccess : hipErrorInvalidValue;
}

hipError_t hipDrvGetErrorName(hipError_t code, const char **name)
{
    return describe(code, name, true);
}

hipError_t hipDrvGetErrorString(hipError_t code, const char **text)
{
    return describe(code, text, false);
}

hipError_t hipGetLastError(void)
{
    hipError_t code = last_error;
    last_error = hipSuccess;
    return code;
}
