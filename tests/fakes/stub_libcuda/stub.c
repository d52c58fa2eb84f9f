/* A GPU driver that runs queued work in any order which its rules allow, over host memory.
 *
 * Nothing runs when it is queued. Each call into the driver lets a seeded random choice of streams take a
 * few steps first; a wait takes as many as it needs. A step of a batched copy moves one piece, so batches
 * of different streams interleave. "Device memory" is memory of this process. Whatever the documentation
 * forbids is refused with the documented code where it names one; where it only says "undefined" or is
 * silent, it is counted as a violation, and a test that sees one fails.
 *
 * This file is the driver itself; cuda.c and hip.c give it the two interfaces. What tests tell it, and ask
 * of it, are the functions that begin with stub_.
 *
 * "API" below is the CUDA driver API reference as the comments of cuda.h have it; "sync" is its page "API
 * synchronization behavior".
 */

#define _GNU_SOURCE
#include "stub.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define MAX_STREAMS 128
#define MAX_RANGES 512
#define MAX_EVENTS 4096
#define LEGACY_STREAM 1 /* CU_STREAM_LEGACY; 0 is the same. Source: cuda.h */

enum op_kind { OP_COPY, OP_FILL, OP_RECORD, OP_WAIT };
enum memory_kind { MEMORY_PAGEABLE, MEMORY_PINNED, MEMORY_DEVICE, MEMORY_BAD };

struct piece {
    address_t dst, src;
    size_t size;
    void *early; /* the source as it was when it was read ahead of the stream, or NULL */
};

/* What an event captured when it was recorded. Source: API, cuEventRecord: later records change nothing
 * for those who wait already. */
struct mark {
    bool is_reached;
    int error;
    double time_ms;
    struct mark *next_made;
};

struct op {
    enum op_kind kind;
    struct op *next;
    struct mark *mark;      /* OP_RECORD, OP_WAIT */
    struct piece *pieces;   /* OP_COPY */
    size_t left;            /* pieces that were not moved yet: the first ones */
    struct batch given;     /* the caller's arrays, and what was in them */
    address_t *dst, *src;
    size_t *sizes;
    unsigned char value;    /* OP_FILL */
};

struct stream {
    bool is_alive, is_capturing;
    uint64_t pace; /* how often it is chosen, beside others: some streams lag far behind */
    struct op *head, *tail;
};

struct event {
    bool is_alive, is_timed;
    struct mark *mark; /* NULL until recorded */
};

struct range {
    address_t address;
    size_t size;
    enum memory_kind kind;
};

struct counter {
    char name[64];
    long value;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream streams[MAX_STREAMS];
static struct event events[MAX_EVENTS];
static struct range ranges[MAX_RANGES];
static struct mark *marks;
static struct counter counters[256], settings[32];
static uint64_t random_state = 1;
static uint64_t steps_per_call; /* at most; 0: nothing runs until somebody waits */
static double now_ms;
static int sticky_error;
static char first_violation[512];

static struct {
    char function[64];
    long countdown, times;
    int code;
    bool is_sticky;
} failure;
static long copies_until_error;
static int copy_error;

/* --- numbers that tests read */

static struct counter *find(struct counter *table, size_t length, const char *name)
{
    for (size_t i = 0; i < length; i++) {
        if (!table[i].name[0])
            snprintf(table[i].name, sizeof table[i].name, "%s", name);
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    }
    abort();
}

void count(const char *what, long difference)
{
    find(counters, 256, what)->value += difference;
}

long setting(const char *name)
{
    return find(settings, 32, name)->value;
}

void violation(const char *format, ...)
{
    count("violations", 1);
    if (first_violation[0])
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(first_violation, sizeof first_violation, format, arguments);
    va_end(arguments);
}

static uint64_t random_below(uint64_t limit)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (random_state * 2685821657736338717ULL >> 16) % limit;
}

static uint64_t draw_pace(void)
{
    static const uint64_t paces[] = {1, 8, 64};
    return paces[random_below(3)];
}

/* --- memory */

/* Source: API, note on memory copies: a region is wholly registered with the driver or not at all; one
 * that is in part, or that spans two registrations, is refused. The latter was seen with the batched copy
 * (github.com/sgl-project/sglang/pull/36798). */
static enum memory_kind kind_of(address_t address, size_t size)
{
    for (size_t i = 0; i < MAX_RANGES; i++) {
        const struct range *r = &ranges[i];
        if (!r->size || address + size <= r->address || address >= r->address + r->size)
            continue;
        bool is_inside = address >= r->address && address + size <= r->address + r->size;
        return is_inside ? r->kind : MEMORY_BAD;
    }
    return MEMORY_PAGEABLE;
}

static struct range *add_range(address_t address, size_t size, enum memory_kind kind)
{
    for (size_t i = 0; i < MAX_RANGES; i++)
        if (!ranges[i].size) {
            ranges[i] = (struct range){address, size, kind};
            return &ranges[i];
        }
    abort();
}

static bool is_mapped(address_t address, size_t size)
{
    address_t first = address & ~(PAGE - 1);
    return msync((void *)first, address + size - first, MS_ASYNC) == 0;
}

/* --- running what is queued */

static void fail_for_good(int code)
{
    sticky_error = code;
    for (struct mark *m = marks; m; m = m->next_made)
        if (!m->is_reached) {
            m->is_reached = true;
            m->error = code;
        }
}

static void check_arrays(const struct op *op)
{
    size_t n = op->given.count;
    if (!n)
        return;
    size_t bytes = n * sizeof(address_t);
    bool is_there = is_mapped((address_t)op->given.dst, bytes) && is_mapped((address_t)op->given.src, bytes) &&
                    is_mapped((address_t)op->given.sizes, bytes);
    /* The documentation does not say when the arrays may be used again, so: not before the copies ran. */
    if (!is_there || memcmp(op->given.dst, op->dst, bytes) || memcmp(op->given.src, op->src, bytes) ||
        memcmp(op->given.sizes, op->sizes, bytes))
        violation("the arrays of a batched copy changed before its copies ran");
}

static void move(const struct piece *p)
{
    if (copies_until_error && --copies_until_error == 0) {
        fail_for_good(copy_error);
        return;
    }
    if (!is_mapped(p->dst, p->size) || (!p->early && !is_mapped(p->src, p->size))) {
        violation("a copy ran to or from memory that is not mapped any more");
        return;
    }
    memmove((void *)p->dst, p->early ? p->early : (void *)p->src, p->size);
    count("copied_bytes", (long)p->size);
}

/* One step of the first operation of a stream; true if that is done. */
static bool advance(struct op *op)
{
    switch (op->kind) {
    case OP_WAIT:
        return true;
    case OP_RECORD:
        now_ms += 0.001;
        op->mark->is_reached = true;
        op->mark->time_ms = now_ms;
        return true;
    case OP_FILL:
        memset((void *)op->pieces[0].dst, op->value, op->pieces[0].size);
        return true;
    case OP_COPY:
        check_arrays(op);
        /* Source: API, cuMemcpyBatchAsync: copies within a batch run in no specific order. */
        for (uint64_t n = 1 + random_below(op->left); n && op->left && !sticky_error; n--) {
            size_t i = random_below(op->left);
            move(&op->pieces[i]);
            free(op->pieces[i].early);
            op->pieces[i] = op->pieces[--op->left];
        }
        return op->left == 0;
    }
    abort();
}

static void free_op(struct op *op)
{
    for (size_t i = 0; i < op->left; i++)
        if (op->kind == OP_COPY)
            free(op->pieces[i].early);
    free(op->pieces);
    free(op->dst);
    free(op->src);
    free(op->sizes);
    free(op);
}

static void drop_first(struct stream *s)
{
    struct op *op = s->head;
    s->head = op->next;
    if (!s->head)
        s->tail = NULL;
    free_op(op);
}

/* One step of a random stream that may go on; false if there is none. */
static bool step(void)
{
    if (sticky_error) {
        for (size_t i = 0; i < MAX_STREAMS; i++)
            while (streams[i].head)
                drop_first(&streams[i]);
        return false;
    }
    size_t ready[MAX_STREAMS], n = 0;
    uint64_t paces = 0;
    for (size_t i = 0; i < MAX_STREAMS; i++) {
        const struct op *op = streams[i].head;
        if (op && (op->kind != OP_WAIT || op->mark->is_reached)) {
            ready[n++] = i;
            paces += streams[i].pace;
        }
    }
    if (!n)
        return false;
    uint64_t chosen = random_below(paces);
    struct stream *s = &streams[ready[0]];
    for (size_t i = 0; i < n && chosen >= s->pace; s = &streams[ready[++i]])
        chosen -= s->pace;
    if (advance(s->head))
        drop_first(s);
    return true;
}

static bool is_idle(const struct stream *s)
{
    return !s->head;
}

static int run_until_idle(const struct stream *s)
{
    while (!is_idle(s))
        if (!step() && !sticky_error) {
            violation("streams wait for each other: a deadlock");
            break;
        }
    return sticky_error;
}

/* --- entering and leaving */

int enter(const char *function)
{
    pthread_mutex_lock(&lock);
    char name[64];
    snprintf(name, sizeof name, "calls:%s", function);
    count(name, 1);
    /* Source: API, every function: "may also return error codes from previous, asynchronous launches"; an
     * illegal address "leaves the process in an inconsistent state and any further CUDA work will return
     * the same error". */
    if (sticky_error)
        return sticky_error;
    bool is_meant = !strcmp(failure.function, function) || !strcmp(failure.function, "*");
    if (is_meant && failure.countdown && --failure.countdown == 0 && failure.times) {
        if (failure.is_sticky)
            fail_for_good(failure.code);
        failure.countdown = --failure.times ? 1 : 0;
        return failure.code;
    }
    uint64_t most = setting("steps per call") ? (uint64_t)setting("steps per call") : steps_per_call;
    for (uint64_t n = random_below(most + 1); n; n--)
        step();
    return STUB_SUCCESS;
}

int leave(int code)
{
    pthread_mutex_unlock(&lock);
    return code;
}

/* --- streams and events */

static struct stream *find_stream(address_t handle)
{
    if (handle <= 2) /* the default streams; see cuda.h, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD */
        return &streams[handle == 0 ? LEGACY_STREAM : handle];
    struct stream *s = (struct stream *)handle;
    return s >= &streams[3] && s < &streams[MAX_STREAMS] && s->is_alive ? s : NULL;
}

static struct op *enqueue(struct stream *s, enum op_kind kind)
{
    struct op *op = calloc(1, sizeof *op);
    op->kind = kind;
    if (s->tail)
        s->tail->next = op;
    else
        s->head = op;
    s->tail = op;
    return op;
}

int stream_create(address_t *handle, unsigned int flags, int priority)
{
    if (flags != 1) {
        /* Source: API, cuStreamCreate: without CU_STREAM_NON_BLOCKING a stream synchronises with stream 0. */
        violation("a stream that waits for the legacy default stream was made");
        return STUB_INVALID_VALUE;
    }
    count("streams", 1);
    if (priority != 0) /* the lowest that this device has, see the front ends */
        violation("a stream of priority %d was made", priority);
    for (size_t i = 3; i < MAX_STREAMS; i++)
        if (!streams[i].is_alive && !streams[i].head) {
            streams[i].is_alive = true;
            streams[i].pace = draw_pace();
            *handle = (address_t)&streams[i];
            return STUB_SUCCESS;
        }
    return STUB_OUT_OF_MEMORY;
}

int stream_destroy(address_t handle)
{
    struct stream *s = find_stream(handle);
    if (!s || handle <= 2)
        return STUB_INVALID_HANDLE;
    s->is_alive = false; /* source: API, cuStreamDestroy: returns at once, the work goes on */
    count("streams", -1);
    return STUB_SUCCESS;
}

int stream_synchronize(address_t handle)
{
    struct stream *s = find_stream(handle);
    return s ? run_until_idle(s) : STUB_INVALID_HANDLE;
}

int stream_is_capturing(address_t handle, int *status)
{
    struct stream *s = find_stream(handle);
    if (!s)
        return STUB_INVALID_HANDLE;
    *status = s->is_capturing;
    return STUB_SUCCESS;
}

int stream_capture(address_t handle, bool begins)
{
    struct stream *s = find_stream(handle);
    if (!s || s == &streams[LEGACY_STREAM] || s->is_capturing == begins)
        return s ? STUB_CAPTURE_UNSUPPORTED : STUB_INVALID_HANDLE;
    s->is_capturing = begins;
    return STUB_SUCCESS;
}

static bool is_any_capturing(void)
{
    for (size_t i = 0; i < MAX_STREAMS; i++)
        if (streams[i].is_capturing)
            return true;
    return false;
}

static struct event *find_event(address_t handle)
{
    struct event *e = (struct event *)handle;
    return e >= events && e < &events[MAX_EVENTS] && e->is_alive ? e : NULL;
}

int event_create(address_t *handle, bool is_timed)
{
    for (size_t i = 0; i < MAX_EVENTS; i++)
        if (!events[i].is_alive) {
            events[i] = (struct event){true, is_timed, NULL};
            *handle = (address_t)&events[i];
            count("events", 1);
            return STUB_SUCCESS;
        }
    return STUB_OUT_OF_MEMORY;
}

int event_destroy(address_t handle)
{
    struct event *e = find_event(handle);
    if (!e)
        return STUB_INVALID_HANDLE;
    e->is_alive = false;
    count("events", -1);
    return STUB_SUCCESS;
}

int event_record(address_t event, address_t stream)
{
    struct event *e = find_event(event);
    struct stream *s = find_stream(stream);
    if (!e || !s)
        return STUB_INVALID_HANDLE;
    struct mark *m = calloc(1, sizeof *m);
    m->next_made = marks;
    marks = m;
    e->mark = m;
    enqueue(s, OP_RECORD)->mark = m;
    return STUB_SUCCESS;
}

int stream_wait_event(address_t stream, address_t event)
{
    struct event *e = find_event(event);
    struct stream *s = find_stream(stream);
    if (!e || !s)
        return STUB_INVALID_HANDLE;
    if (e->mark) /* source: API, cuEventRecord: an event that was never recorded is an empty set of work */
        enqueue(s, OP_WAIT)->mark = e->mark;
    return STUB_SUCCESS;
}

int event_query(address_t handle)
{
    struct event *e = find_event(handle);
    if (!e)
        return STUB_INVALID_HANDLE;
    if (e->mark && !e->mark->is_reached)
        return STUB_NOT_READY;
    return e->mark ? e->mark->error : STUB_SUCCESS;
}

int event_synchronize(address_t handle)
{
    struct event *e = find_event(handle);
    if (!e)
        return STUB_INVALID_HANDLE;
    while (e->mark && !e->mark->is_reached && step()) {
    }
    if (e->mark && !e->mark->is_reached)
        violation("an event was waited for that no stream can reach: a deadlock");
    return e->mark ? e->mark->error : STUB_SUCCESS;
}

/* Source: API, cuEventElapsedTime. */
int event_elapsed(float *milliseconds, address_t start, address_t end)
{
    struct event *s = find_event(start), *e = find_event(end);
    if (!s || !e || !s->mark || !e->mark || !s->is_timed || !e->is_timed)
        return STUB_INVALID_HANDLE;
    if (!s->mark->is_reached || !e->mark->is_reached)
        return STUB_NOT_READY;
    *milliseconds = (float)(e->mark->time_ms - s->mark->time_ms);
    return STUB_SUCCESS;
}

/* --- host and device memory */

int host_register(address_t address, size_t size)
{
    /* Seen: 900 from a registration during a capture (github.com/vllm-project/vllm/pull/46958). */
    if (is_any_capturing())
        return STUB_CAPTURE_UNSUPPORTED;
    if (!size || !is_mapped(address, size))
        return STUB_INVALID_VALUE;
    /* Seen: one call of 512 GiB or more fails (github.com/vllm-project/vllm/issues/51080). */
    if (size >= 512UL << 30)
        return STUB_OUT_OF_MEMORY;
    /* Seen with driver 590: an overlap with a registered range (github.com/lupinemachines/lupine/issues/437). */
    if (kind_of(address, size) != MEMORY_PAGEABLE)
        return STUB_ALREADY_REGISTERED;
    add_range(address, size, MEMORY_PINNED);
    count("registrations", 1);
    count("registered_bytes", (long)size);
    return STUB_SUCCESS;
}

static bool is_in_use(address_t address, size_t size)
{
    for (size_t i = 0; i < MAX_STREAMS; i++)
        for (const struct op *op = streams[i].head; op; op = op->next)
            for (size_t k = 0; op->kind == OP_COPY && k < op->left; k++) {
                const struct piece *p = &op->pieces[k];
                if ((p->dst >= address && p->dst < address + size) ||
                    (p->src >= address && p->src < address + size))
                    return true;
            }
    return false;
}

/* Source: API, cuMemHostUnregister: the base address that was registered. Seen with driver 590: 1 for an
 * address inside a range, 713 for one in none (github.com/lupinemachines/lupine/issues/437). */
int host_unregister(address_t address)
{
    for (size_t i = 0; i < MAX_RANGES; i++) {
        struct range *r = &ranges[i];
        if (!r->size || r->kind != MEMORY_PINNED || address < r->address || address >= r->address + r->size)
            continue;
        if (address != r->address)
            return STUB_INVALID_VALUE;
        if (!is_mapped(r->address, r->size))
            violation("memory was unmapped before it was unregistered");
        if (is_in_use(r->address, r->size))
            violation("memory was unregistered while copies to or from it were queued");
        count("registrations", -1);
        count("registered_bytes", -(long)r->size);
        r->size = 0;
        return STUB_SUCCESS;
    }
    return STUB_NOT_REGISTERED;
}

int device_allocate(address_t *address, size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!size || memory == MAP_FAILED)
        return size ? STUB_OUT_OF_MEMORY : STUB_INVALID_VALUE;
    *address = (address_t)memory;
    add_range(*address, size, MEMORY_DEVICE);
    return STUB_SUCCESS;
}

int device_free(address_t address)
{
    for (size_t i = 0; i < MAX_RANGES; i++)
        if (ranges[i].size && ranges[i].address == address && ranges[i].kind == MEMORY_DEVICE) {
            if (is_in_use(address, ranges[i].size))
                violation("device memory was freed while copies to or from it were queued");
            munmap((void *)address, ranges[i].size);
            ranges[i].size = 0;
            return STUB_SUCCESS;
        }
    return STUB_INVALID_VALUE;
}

int device_synchronize(void)
{
    for (size_t i = 0; i < MAX_STREAMS; i++)
        run_until_idle(&streams[i]);
    return sticky_error;
}

/* --- copies */

static bool is_allowed(enum memory_kind dst, enum memory_kind src, enum direction direction)
{
    bool is_to = dst == MEMORY_DEVICE, is_from = src == MEMORY_DEVICE;
    if (dst == MEMORY_BAD || src == MEMORY_BAD)
        return false;
    switch (direction) {
    case TO_DEVICE: return is_to && !is_from;
    case TO_HOST: return !is_to && is_from;
    case ON_DEVICE: return is_to && is_from;
    case EITHER: return is_to != is_from;
    }
    abort();
}

static bool is_pageable(const struct piece *p)
{
    return kind_of(p->dst, p->size) == MEMORY_PAGEABLE || kind_of(p->src, p->size) == MEMORY_PAGEABLE;
}

static struct piece read_ahead(address_t dst, address_t src, size_t size, int order)
{
    struct piece p = {dst, src, size, NULL};
    /* Source: API, CUmemcpySrcAccessOrder. ANY may be read at any time, so half of them are read now. */
    if (order == ORDER_DURING_CALL || (order == ORDER_ANY && random_below(2))) {
        p.early = malloc(size);
        memcpy(p.early, (void *)src, size);
    }
    return p;
}

/* Source: sync, "Memcpy": a copy from pageable memory may be staged after the stream was waited for, and
 * one to pageable memory returns only when it is complete. So some of them run at once. */
static int maybe_run_now(struct stream *s, const struct op *op)
{
    bool is_queued_only = true;
    for (size_t i = 0; i < op->left && is_queued_only; i++)
        is_queued_only = !is_pageable(&op->pieces[i]);
    if (is_queued_only)
        return STUB_SUCCESS;
    count("pageable_copies", 1);
    return random_below(2) ? run_until_idle(s) : STUB_SUCCESS;
}

int copy_single(address_t dst, address_t src, size_t size, enum direction direction, address_t stream)
{
    struct stream *s = find_stream(stream);
    if (!s)
        return STUB_INVALID_HANDLE;
    if (!size || !is_allowed(kind_of(dst, size), kind_of(src, size), direction))
        return STUB_INVALID_VALUE;
    if (direction != ON_DEVICE)
        count("descriptors", 1);
    struct op *op = enqueue(s, OP_COPY);
    op->pieces = malloc(sizeof *op->pieces);
    op->pieces[0] = read_ahead(dst, src, size, ORDER_STREAM);
    op->left = 1;
    return maybe_run_now(s, op);
}

int copy_now(address_t dst, address_t src, size_t size, enum direction direction)
{
    if (!size || !is_allowed(kind_of(dst, size), kind_of(src, size), direction))
        return STUB_INVALID_VALUE;
    memmove((void *)dst, (void *)src, size);
    return STUB_SUCCESS;
}

int fill(address_t dst, unsigned char value, size_t size, address_t stream)
{
    struct stream *s = find_stream(stream);
    if (!s || kind_of(dst, size) != MEMORY_DEVICE)
        return s ? STUB_INVALID_VALUE : STUB_INVALID_HANDLE;
    struct op *op = enqueue(s, OP_FILL);
    op->pieces = malloc(sizeof *op->pieces);
    op->pieces[0] = (struct piece){dst, 0, size, NULL};
    op->value = value;
    return STUB_SUCCESS;
}

static int by_destination(const void *left, const void *right)
{
    address_t a = ((const struct piece *)left)->dst, b = ((const struct piece *)right)->dst;
    return a < b ? -1 : a > b;
}

static void check_destinations(const struct op *op)
{
    struct piece *sorted = malloc(op->left * sizeof *sorted);
    memcpy(sorted, op->pieces, op->left * sizeof *sorted);
    qsort(sorted, op->left, sizeof *sorted, by_destination);
    for (size_t i = 1; i < op->left; i++)
        if (sorted[i - 1].dst + sorted[i - 1].size > sorted[i].dst)
            violation("two copies of a batch write to the same bytes");
    free(sorted);
}

static int check_batch(const struct batch *b, size_t *bad)
{
    for (*bad = 0; *bad < b->count; (*bad)++) {
        enum memory_kind dst = kind_of(b->dst[*bad], b->sizes[*bad]);
        enum memory_kind src = kind_of(b->src[*bad], b->sizes[*bad]);
        if (!b->sizes[*bad] || !is_allowed(dst, src, EITHER))
            return STUB_INVALID_VALUE;
    }
    return STUB_SUCCESS;
}

static void *duplicate(const void *array, size_t bytes)
{
    return memcpy(malloc(bytes), array, bytes);
}

static struct op *queue_batch(struct stream *s, const struct batch *b, size_t n)
{
    struct op *op = enqueue(s, OP_COPY);
    op->pieces = malloc((n ? n : 1) * sizeof *op->pieces);
    for (size_t i = 0; i < n; i++)
        op->pieces[i] = read_ahead(b->dst[i], b->src[i], b->sizes[i], b->orders[i]);
    op->left = n;
    op->given = *b;
    op->dst = duplicate(b->dst, b->count * sizeof *b->dst);
    op->src = duplicate(b->src, b->count * sizeof *b->src);
    op->sizes = duplicate(b->sizes, b->count * sizeof *b->sizes);
    count("descriptors", (long)n);
    return op;
}

int copy_batch(const struct batch *b, address_t stream)
{
    struct stream *s = find_stream(stream);
    size_t bad = 0;
    if (!s)
        return STUB_INVALID_HANDLE;
    if (setting("batch is not supported"))
        return STUB_NOT_SUPPORTED;
    /* Source: API, cuMemcpyBatchAsync: "must not be legacy NULL stream". */
    if (s == &streams[LEGACY_STREAM] || !b->count)
        return STUB_INVALID_VALUE;
    if (s->is_capturing)
        return STUB_CAPTURE_UNSUPPORTED;
    int code = check_batch(b, &bad);
    if (code) {
        if (b->fail_index)
            *b->fail_index = bad;
        return code;
    }
    count("batches", 1);
    struct op *op = queue_batch(s, b, b->count);
    check_destinations(op);
    return maybe_run_now(s, op);
}

/* The documentation does not say that a batch that fails has queued nothing. */
void queue_some_of(const struct batch *b, address_t stream)
{
    struct stream *s = find_stream(stream);
    size_t bad = 0;
    if (!s || sticky_error || check_batch(b, &bad) || b->count < 2)
        return;
    size_t n = 1 + random_below(b->count - 1);
    if (b->fail_index)
        *b->fail_index = n;
    queue_batch(s, b, n);
}

/* --- what tests tell the driver, and ask of it */

void stub_reset(uint64_t seed)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MAX_STREAMS; i++) {
        while (streams[i].head)
            drop_first(&streams[i]);
        streams[i] = (struct stream){0};
    }
    for (size_t i = 0; i < MAX_RANGES; i++)
        if (ranges[i].size && ranges[i].kind == MEMORY_DEVICE)
            munmap((void *)ranges[i].address, ranges[i].size);
    while (marks) {
        struct mark *next = marks->next_made;
        free(marks);
        marks = next;
    }
    memset(events, 0, sizeof events);
    memset(ranges, 0, sizeof ranges);
    memset(counters, 0, sizeof counters);
    memset(settings, 0, sizeof settings);
    memset(&failure, 0, sizeof failure);
    first_violation[0] = 0;
    sticky_error = 0;
    copies_until_error = 0;
    random_state = seed * 2 + 1;
    steps_per_call = (uint64_t[]){0, 1, 3, 8}[random_below(4)];
    for (size_t i = 0; i < 3; i++)
        streams[i].pace = draw_pace();
    pthread_mutex_unlock(&lock);
}

/* Let the n-th call from now of a function ("*": of any), and those behind it, so many times in all, return
 * a code; a sticky one stays. */
void stub_fail(const char *function, long nth, long times, int code, int is_sticky)
{
    pthread_mutex_lock(&lock);
    snprintf(failure.function, sizeof failure.function, "%s", function);
    failure.countdown = nth;
    failure.times = times;
    failure.code = code;
    failure.is_sticky = is_sticky;
    pthread_mutex_unlock(&lock);
}

/* Let the n-th piece that is moved from now on fail on the device, which breaks everything after it. */
void stub_fail_copy(long nth, int code)
{
    pthread_mutex_lock(&lock);
    copies_until_error = nth;
    copy_error = code;
    pthread_mutex_unlock(&lock);
}

void stub_set(const char *name, long value)
{
    pthread_mutex_lock(&lock);
    find(settings, 32, name)->value = value;
    pthread_mutex_unlock(&lock);
}

/* Let memory of this process pass for device memory: a CPU engine's tensors. */
void stub_adopt(uint64_t address, uint64_t size)
{
    pthread_mutex_lock(&lock);
    add_range(address, size, MEMORY_DEVICE);
    pthread_mutex_unlock(&lock);
}

long stub_count(const char *what)
{
    pthread_mutex_lock(&lock);
    long value = find(counters, 256, what)->value;
    pthread_mutex_unlock(&lock);
    return value;
}

const char *stub_violation(void)
{
    return first_violation;
}
