// The CUDA runtime of a device that does nothing: it keeps addresses apart, counts, and logs.
//
// Device memory is an address range without access rights: a host that reads it crashes, as with a real device, and no
// page is ever used, so models of any size fit. Copies to the host give zeros, all other copies and kernels do nothing.
// A stream is always idle. The machine has DEVICES devices, alike.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "record.h"

enum { DEVICES = 8, MAX_REGISTERED = 4096 };
static const size_t DEVICE_BYTES = 80ull << 30, ARENA_BYTES = 4ull << 40, PAGE = 2 << 20;

// ---- log
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;

static void write_line(const char *kind, const char *format, va_list values) {
  if (!out) {
    const char *path = getenv("NULLCUDA_LOG");
    out = fopen(path ? path : "/dev/null", "a");
    if (getenv("NULLCUDA_FLUSH")) setvbuf(out, 0, _IOLBF, 0);
  }
  fprintf(out, "%s ", kind);
  vfprintf(out, format, values);
  fputc('\n', out);
}

void record(const char *kind, const char *format, ...) {
  va_list values;
  va_start(values, format);
  pthread_mutex_lock(&mutex);
  write_line(kind, format, values);
  pthread_mutex_unlock(&mutex);
  va_end(values);
}

// An event in the queue of a stream: a line of its own names the stream where it is another than before.
static void queue(void *stream, const char *kind, const char *format, ...) {
  static void *last = (void *)-1;
  va_list values;
  va_start(values, format);
  pthread_mutex_lock(&mutex);
  if (stream != last && out) fprintf(out, "stream %p\n", last = stream);
  write_line(kind, format, values);
  pthread_mutex_unlock(&mutex);
  va_end(values);
}

void nullcuda_mark(const char *name) {
  record("mark", "%s", name);
  fflush(out);
}

// ---- memory: two arenas that only grow; torch's allocators reuse what they have
struct arena { char *start; size_t used; };
static struct arena device_memory, pinned_memory;

static void *take(struct arena *arena, size_t n, int rights) {
  pthread_mutex_lock(&mutex);
  if (!arena->start)
    arena->start = mmap(0, ARENA_BYTES, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  size_t offset = arena->used;
  arena->used += (n + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_unlock(&mutex);
  if (arena->start == MAP_FAILED || arena->used > ARENA_BYTES) abort();
  return arena->start + offset;
}

static int is_in(const struct arena *arena, const void *p) {
  return arena->start && (char *)p >= arena->start && (char *)p < arena->start + arena->used;
}

// host memory that is page-locked after its allocation; it is never unlocked here
static struct { const char *start; size_t n; } registered[MAX_REGISTERED];
static int n_registered;

cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
  pthread_mutex_lock(&mutex);
  if (n_registered == MAX_REGISTERED) abort();
  registered[n_registered].start = p;
  registered[n_registered++].n = n;
  pthread_mutex_unlock(&mutex);
  return 0;
}
cudaError_t cudaHostUnregister(void *) { return 0; }

static int is_pinned(const void *p) {
  for (int i = 0; i < n_registered; i++)
    if ((const char *)p >= registered[i].start && (const char *)p < registered[i].start + registered[i].n) return 1;
  return is_in(&pinned_memory, p);
}

void *nullcuda_reserve(size_t n) { return take(&device_memory, n, PROT_NONE); }

cudaError_t cudaMalloc(void **p, size_t n) { record("malloc", "%zu", n); *p = nullcuda_reserve(n); return 0; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { *p = take(&pinned_memory, n, PROT_READ | PROT_WRITE); return 0; }
cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = DEVICE_BYTES; return 0; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  cudaGetDevice(&a->device);
  a->type = is_in(&device_memory, p) ? cudaMemoryTypeDevice : is_pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = (void *)p;
  return 0;
}

static void copy(void *to, const void *from, size_t n, void *stream) {
  const char *source = is_in(&device_memory, from) ? "device" : is_pinned(from) ? "pinned" : "pageable";
  int to_host = !is_in(&device_memory, to);
  queue(stream, "copy", "%s to %s %zu", source, to_host ? "host" : "device", n);
  if (to_host) memset(to, 0, n);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind, cudaStream_t s) { copy(to, from, n, s); return 0; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind) { record("sync", "cudaMemcpy"); copy(to, from, n, 0); return 0; }
cudaError_t cudaMemsetAsync(void *, int, size_t n, cudaStream_t) { record("memset", "%zu", n); return 0; }

// ---- synchronization
static int capturing; // a graph; nothing may be waited for then
cudaError_t cudaStreamSynchronize(cudaStream_t) { record("sync", "cudaStreamSynchronize"); return capturing ? cudaErrorStreamCaptureUnsupported : 0; }
cudaError_t cudaDeviceSynchronize(void) { record("sync", "cudaDeviceSynchronize"); return 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { queue(s, "event", "%p", e); return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) { queue(s, "wait", "%p", e); return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { record("sync", "cudaEventSynchronize"); return 0; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return 0; }

// ---- handles
void *nullcuda_handle(void) {
  static uintptr_t last = 0x1000;
  return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = nullcuda_handle(); return 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { *s = nullcuda_handle(); return 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) { *s = nullcuda_handle(); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = nullcuda_handle(); return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { *e = nullcuda_handle(); return 0; }

// ---- graphs: what is recorded runs nowhere, and a launch is one line of the log
static unsigned long long captures;
static enum cudaStreamCaptureStatus capture_status(void) {
  return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *status) { *status = capture_status(); return 0; }
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *n) {
  *status = capture_status();
  if (id) *id = captures;
  if (graph) *graph = (cudaGraph_t)0x50;
  if (n) *n = 0;
  return 0;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *, const cudaGraphEdgeData *, size_t, unsigned) { return 0; }
#endif
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode) { record("graph", "begin %p", s); capturing = 1; captures++; return 0; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) { record("graph", "end"); capturing = 0; *graph = (cudaGraph_t)0x50; return 0; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t, unsigned long long) { *exec = (cudaGraphExec_t)0x60; return 0; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t, unsigned long long) { *exec = (cudaGraphExec_t)0x60; return 0; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { record("graph", "launch"); return 0; }
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *n) { *n = 1; return 0; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *) { return 0; }

// ---- the device: an H100, as far as torch asks
static __thread int current;
cudaError_t cudaGetDeviceCount(int *n) { *n = DEVICES; return 0; }
cudaError_t cudaGetDevice(int *d) { *d = current; return 0; }
cudaError_t cudaSetDevice(int d) { current = d; return 0; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *yes, int, int) { *yes = 1; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d); return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return 0; }

int nullcuda_attribute(int a) {
  switch (a) {
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    default: return 1;
  }
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int) { *v = nullcuda_attribute(a); return 0; }

#undef cudaGetDeviceProperties // CUDA 12's header renames it
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  memcpy(p->uuid.bytes, &d, sizeof d);
  p->major = 9;
  p->totalGlobalMem = DEVICE_BYTES;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = 1;
  return 0;
}
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { return cudaGetDeviceProperties(p, d); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) { *n = 2; return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t, unsigned) { *n = 2; return 0; }
const char *cudaGetErrorString(cudaError_t) { return "error of the null device"; }
const char *cudaGetErrorName(cudaError_t) { return "cudaErrorNull"; }

// ---- kernels: nvcc's start-up code registers each with its name
enum { SLOTS = 1 << 20 };
static struct { const void *function; const char *name; } kernels[SLOTS];

static unsigned slot_of(const void *function) {
  unsigned slot = ((uintptr_t)function >> 4) * 2654435761u & (SLOTS - 1);
  while (kernels[slot].function && kernels[slot].function != function) slot = (slot + 1) & (SLOTS - 1);
  return slot;
}
void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, void *, void *, void *, void *, int *) {
  unsigned slot = slot_of(function);
  kernels[slot].function = function;
  kernels[slot].name = name;
}
void **__cudaRegisterFatBinary(void *) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
char __cudaInitModule(void **) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return 0; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } launch;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  launch.grid = grid; launch.block = block; launch.shared = shared; launch.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = launch.grid; *block = launch.block; *shared = launch.shared; *(void **)stream = launch.stream;
  return 0;
}
static cudaError_t launched(const void *function, void *stream) {
  const char *name = kernels[slot_of(function)].name;
  queue(stream, "kernel", "%s", name ? name : "?");
  return 0;
}
cudaError_t cudaLaunchKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(f, s); }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(f, s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **) { return launched(f, c->stream); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(f, s); }

// ---- the way from the runtime to the driver (driver.c)
static int unknown_driver_function(void) { record("unknown", "driver function, looked up before as 'missing'"); return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, unsigned long long, enum cudaDriverEntryPointQueryResult *result) {
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *f = dlsym(RTLD_DEFAULT, versioned);
  if (!*f) *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) {
    record("missing", "%s", name);
    *f = (void *)unknown_driver_function;
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return 0;
}
