/* What the two front ends of the simulated driver share: see stub.c. */

#ifndef KVCELLAR_STUB_H
#define KVCELLAR_STUB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Codes that CUDA and HIP number alike. Source: CUresult in cuda.h, hipError_t in hip_runtime_api.h. */
enum {
    STUB_SUCCESS = 0,
    STUB_INVALID_VALUE = 1,
    STUB_OUT_OF_MEMORY = 2,
    STUB_NOT_INITIALIZED = 3,
    STUB_INVALID_DEVICE = 101,
    STUB_INVALID_CONTEXT = 201,
    STUB_INVALID_HANDLE = 400,
    STUB_NOT_READY = 600,
    STUB_ILLEGAL_ADDRESS = 700,
    STUB_ALREADY_REGISTERED = 712,
    STUB_NOT_REGISTERED = 713,
    STUB_NOT_SUPPORTED = 801,
    STUB_CAPTURE_UNSUPPORTED = 900,
    STUB_CAPTURE_IMPLICIT = 906,
};

/* Source access orders of a batched copy. Source: CUmemcpySrcAccessOrder in cuda.h. */
enum { ORDER_STREAM = 1, ORDER_DURING_CALL = 2, ORDER_ANY = 3 };

typedef uint64_t address_t;

enum direction { TO_DEVICE, TO_HOST, ON_DEVICE, EITHER };

/* Every entry point begins with one of these and ends with `leave`. A code other than 0 is what the call
 * has to return at once: a failure that a test asked for, or an error that stays. */
int enter(const char *function);
int leave(int code);

int stream_create(address_t *handle, unsigned int flags, int priority);
int stream_destroy(address_t handle);
int stream_wait_event(address_t stream, address_t event);
int stream_synchronize(address_t handle);
int stream_is_capturing(address_t handle, int *status);
int stream_capture(address_t handle, bool begins);

int event_create(address_t *handle, bool is_timed);
int event_destroy(address_t handle);
int event_record(address_t event, address_t stream);
int event_query(address_t handle);
int event_synchronize(address_t handle);
int event_elapsed(float *milliseconds, address_t start, address_t end);

int host_register(address_t address, size_t size);
int host_unregister(address_t address);
int device_allocate(address_t *address, size_t size);
int device_free(address_t address);
int device_synchronize(void);

int copy_single(address_t dst, address_t src, size_t size, enum direction, address_t stream);
int copy_now(address_t dst, address_t src, size_t size, enum direction);
int fill(address_t dst, unsigned char value, size_t size, address_t stream);

struct batch {
    const address_t *dst, *src;
    const size_t *sizes;
    size_t count;
    const int *orders; /* one for each copy */
    size_t *fail_index; /* may be NULL */
};
int copy_batch(const struct batch *, address_t stream);
/* A failure that `enter` reported for a batched copy: some of its copies are queued all the same. */
void queue_some_of(const struct batch *, address_t stream);

long setting(const char *name);
void count(const char *what, long difference);
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
