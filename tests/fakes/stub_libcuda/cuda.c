/* The simulated driver as libcuda.so.1. NVIDIA's header checks every signature here. */

#include "stub.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ATTRIBUTES 16

static struct CUctx_st { int retained; } primary; /* the header leaves the type open */
static _Thread_local CUcontext current;
static bool is_initialised;

/* For functions that need a context. Source: API, CUDA_ERROR_NOT_INITIALIZED and _INVALID_CONTEXT. */
static int enter_context(const char *function)
{
    int code = enter(function);
    if (code)
        return code;
    if (!is_initialised)
        return STUB_NOT_INITIALIZED;
    return current ? STUB_SUCCESS : STUB_INVALID_CONTEXT;
}

#define RETURN_IF_REFUSED(code) \
    do {                        \
        int code_ = (code);     \
        if (code_)              \
            return leave(code_); \
    } while (0)
#define ENTER(function) RETURN_IF_REFUSED(enter_context(function))
#define ENTER_ANYWHERE(function) RETURN_IF_REFUSED(enter(function))

CUresult cuInit(unsigned int flags)
{
    ENTER_ANYWHERE("cuInit");
    is_initialised = true;
    return leave(flags ? STUB_INVALID_VALUE : STUB_SUCCESS);
}

static int driver_version(void)
{
    return setting("driver version") ? (int)setting("driver version") : 13000;
}

CUresult cuDriverGetVersion(int *version)
{
    ENTER_ANYWHERE("cuDriverGetVersion");
    *version = driver_version();
    return leave(STUB_SUCCESS);
}

CUresult cuDeviceGetCount(int *n)
{
    ENTER_ANYWHERE("cuDeviceGetCount");
    *n = 1;
    return leave(is_initialised ? STUB_SUCCESS : STUB_NOT_INITIALIZED);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER_ANYWHERE("cuDeviceGet");
    *device = 0;
    return leave(ordinal ? STUB_INVALID_DEVICE : STUB_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    ENTER_ANYWHERE("cuDeviceGetAttribute");
    if (device != 0)
        return leave(STUB_INVALID_DEVICE);
    bool is_known = attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    *value = is_known ? !setting("host pointers are not device pointers") : 0;
    return leave(STUB_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER_ANYWHERE("cuDevicePrimaryCtxRetain");
    (void)device;
    primary.retained++;
    *context = &primary;
    return leave(STUB_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER_ANYWHERE("cuDevicePrimaryCtxRelease");
    (void)device;
    primary.retained--;
    return leave(STUB_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER_ANYWHERE("cuCtxSetCurrent");
    current = context;
    return leave(STUB_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER_ANYWHERE("cuCtxGetCurrent");
    *context = current;
    return leave(STUB_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER("cuCtxGetDevice");
    *device = 0;
    return leave(STUB_SUCCESS);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return leave(STUB_SUCCESS);
}

CUresult cuCtxSynchronize(void)
{
    ENTER("cuCtxSynchronize");
    return leave(device_synchronize());
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    ENTER("cuStreamCreateWithPriority");
    return leave(stream_create((address_t *)stream, flags, priority));
}

CUresult cuStreamDestroy(CUstream stream)
{
    ENTER("cuStreamDestroy");
    return leave(stream_destroy((address_t)stream));
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER("cuStreamWaitEvent");
    return leave(flags ? STUB_INVALID_VALUE : stream_wait_event((address_t)stream, (address_t)event));
}

CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER("cuStreamSynchronize");
    return leave(stream_synchronize((address_t)stream));
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    ENTER("cuStreamIsCapturing");
    int is_capturing = 0;
    int code = stream_is_capturing((address_t)stream, &is_capturing);
    *status = is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return leave(code);
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
    (void)mode;
    ENTER("cuStreamBeginCapture");
    return leave(stream_capture((address_t)stream, true));
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    ENTER("cuStreamEndCapture");
    *graph = (CUgraph)&primary; /* nobody looks into it */
    return leave(stream_capture((address_t)stream, false));
}

CUresult cuGraphDestroy(CUgraph graph)
{
    (void)graph;
    ENTER("cuGraphDestroy");
    return leave(STUB_SUCCESS);
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER("cuEventCreate");
    if (flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
        return leave(STUB_INVALID_VALUE);
    return leave(event_create((address_t *)event, !(flags & CU_EVENT_DISABLE_TIMING)));
}

CUresult cuEventDestroy(CUevent event)
{
    ENTER("cuEventDestroy");
    return leave(event_destroy((address_t)event));
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER("cuEventRecord");
    return leave(event_record((address_t)event, (address_t)stream));
}

CUresult cuEventQuery(CUevent event)
{
    ENTER("cuEventQuery");
    return leave(event_query((address_t)event));
}

CUresult cuEventSynchronize(CUevent event)
{
    ENTER("cuEventSynchronize");
    return leave(event_synchronize((address_t)event));
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER("cuEventElapsedTime");
    return leave(event_elapsed(milliseconds, (address_t)start, (address_t)end));
}

/* The older symbol, which drivers keep. */
static CUresult elapsed_2000(float *milliseconds, CUevent start, CUevent end)
{
    return cuEventElapsedTime(milliseconds, start, end);
}
static const PFN_cuEventElapsedTime_v2000 elapsed_check = elapsed_2000;
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    return elapsed_check(milliseconds, start, end);
}

CUresult cuMemHostRegister(void *address, size_t size, unsigned int flags)
{
    ENTER("cuMemHostRegister");
    return leave(flags > 15 ? STUB_INVALID_VALUE : host_register((address_t)address, size));
}

CUresult cuMemHostUnregister(void *address)
{
    ENTER("cuMemHostUnregister");
    return leave(host_unregister((address_t)address));
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t size)
{
    ENTER("cuMemAlloc");
    address_t allocated = 0;
    int code = device_allocate(&allocated, size);
    *address = allocated;
    return leave(code);
}

CUresult cuMemFree(CUdeviceptr address)
{
    ENTER("cuMemFree");
    return leave(device_free(address));
}

CUresult cuMemcpyHtoD(CUdeviceptr dst, const void *src, size_t size)
{
    ENTER("cuMemcpyHtoD");
    return leave(copy_now(dst, (address_t)src, size, TO_DEVICE));
}

CUresult cuMemcpyDtoH(void *dst, CUdeviceptr src, size_t size)
{
    ENTER("cuMemcpyDtoH");
    return leave(copy_now((address_t)dst, src, size, TO_HOST));
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t size, CUstream stream)
{
    ENTER("cuMemcpyHtoDAsync");
    return leave(copy_single(dst, (address_t)src, size, TO_DEVICE, (address_t)stream));
}

CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t size, CUstream stream)
{
    ENTER("cuMemcpyDtoHAsync");
    return leave(copy_single((address_t)dst, src, size, TO_HOST, (address_t)stream));
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    ENTER("cuMemcpyDtoDAsync");
    return leave(copy_single(dst, src, size, ON_DEVICE, (address_t)stream));
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t size, CUstream stream)
{
    ENTER("cuMemsetD8Async");
    return leave(fill(dst, value, size, (address_t)stream));
}

/* --- the batched copy */

/* Source: API, cuMemcpyBatchAsync: the first index is 0, each is above the one before, the last is below
 * the number of copies, there are no more attributes than copies, and each names an access order. */
static int *spread_orders(const CUmemcpyAttributes *attributes, const size_t *indices, size_t n, size_t n_copies)
{
    if (!n || n > n_copies || indices[0] != 0)
        return NULL;
    int *orders = malloc(n_copies * sizeof *orders);
    for (size_t k = 0; k < n; k++) {
        size_t end = k + 1 < n ? indices[k + 1] : n_copies;
        int order = (int)attributes[k].srcAccessOrder;
        if (end <= indices[k] || end > n_copies || order < ORDER_STREAM || order > ORDER_ANY ||
            attributes[k].flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) {
            free(orders);
            return NULL;
        }
        for (size_t i = indices[k]; i < end; i++)
            orders[i] = order;
    }
    return orders;
}

static CUresult batch(struct batch b, CUmemcpyAttributes *attributes, size_t *indices, size_t n, CUstream stream)
{
    int refused = enter_context("cuMemcpyBatchAsync");
    int *orders = spread_orders(attributes, indices, n, b.count);
    b.orders = orders;
    int code = STUB_INVALID_VALUE;
    if (refused) {
        code = refused;
        if (orders)
            queue_some_of(&b, (address_t)stream);
    } else if (orders) {
        code = copy_batch(&b, (address_t)stream);
    }
    free(orders);
    return leave(code);
}

static CUresult batch_12080(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n, CUmemcpyAttributes *attributes,
                            size_t *indices, size_t n_attributes, size_t *fail_index, CUstream stream)
{
    struct batch b = {(address_t *)dsts, (address_t *)srcs, sizes, n, NULL, fail_index};
    count("batches with a fail index", 1);
    return batch(b, attributes, indices, n_attributes, stream);
}

static CUresult batch_13000(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n, CUmemcpyAttributes *attributes,
                            size_t *indices, size_t n_attributes, CUstream stream)
{
    struct batch b = {(address_t *)dsts, (address_t *)srcs, sizes, n, NULL, NULL};
    return batch(b, attributes, indices, n_attributes, stream);
}

static const PFN_cuMemcpyBatchAsync_v12080 older = batch_12080;
static const PFN_cuMemcpyBatchAsync_v13000 newer = batch_13000;

/* Source: API, cuGetProcAddress. */
static CUresult proc_address_11030(const char *symbol, void **function, int version, cuuint64_t flags)
{
    ENTER_ANYWHERE("cuGetProcAddress");
    *function = NULL;
    if (flags || version > driver_version())
        return leave(STUB_INVALID_VALUE);
    if (!strcmp(symbol, "cuMemcpyBatchAsync") && !setting("no address of the batch")) {
        if (version >= 13000)
            memcpy(function, &newer, sizeof *function);
        else if (version >= 12080)
            memcpy(function, &older, sizeof *function);
    }
    return leave(STUB_SUCCESS);
}
static const PFN_cuGetProcAddress_v11030 proc_address_check = proc_address_11030;
#undef cuGetProcAddress
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags)
{
    return proc_address_check(symbol, function, version, flags);
}

/* --- errors */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
};

static CUresult describe(CUresult code, const char **string, bool is_name)
{
    *string = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *string = is_name ? errors[i].name : errors[i].text;
    return *string ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **name)
{
    return describe(code, name, true);
}

CUresult cuGetErrorString(CUresult code, const char **text)
{
    return describe(code, text, false);
}

int stub_contexts(void)
{
    return primary.retained;
}
