// The driver (libcuda): what torch and Triton take from it. Triton's kernels are logged as "triton NAME".
#define CUDA_ENABLE_DEPRECATED
#include <cuda.h>
#include <string.h>
#include "record.h"

void *nullcuda_handle(void);
void *nullcuda_reserve(size_t n);
int nullcuda_attribute(int a);
int cudaGetDevice(int *d);

CUresult cuInit(unsigned) { return 0; }
CUresult cuDriverGetVersion(int *v) { *v = CUDA_VERSION; return 0; }
CUresult cuDeviceGetCount(int *n) { *n = 8; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return 0; }
CUresult cuDeviceGetName(char *s, int n, CUdevice) { strncpy(s, "NVIDIA H100 80GB HBM3", n); return 0; }
CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice) { *n = 80ull << 30; return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice) { *v = nullcuda_attribute(a); return 0; } // numbered as the runtime's
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)0x40; return 0; }
CUresult cuCtxGetDevice(CUdevice *d) { return cudaGetDevice(d); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice) { *c = (CUcontext)0x40; return 0; }
CUresult cuGetErrorString(CUresult, const char **s) { *s = "error of the null device"; return 0; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute, CUdeviceptr p) { *(CUdeviceptr *)v = p; return 0; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *s) { *s = 0; return 0; }

// expandable segments: addresses first, memory for them later
CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) { *n = 2 << 20; return 0; }
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t, CUdeviceptr, unsigned long long) { *p = (CUdeviceptr)nullcuda_reserve(n); return 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *, unsigned long long) {
  record("malloc", "%zu", n);
  *h = (CUmemGenericAllocationHandle)nullcuda_handle();
  return 0;
}

// Triton
CUresult cuModuleLoadData(CUmodule *m, const void *) { *m = nullcuda_handle(); return 0; }
CUresult cuModuleLoad(CUmodule *m, const char *) { *m = nullcuda_handle(); return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule, const char *name) { *f = (CUfunction)strdup(name); return 0; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction) { *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0; return 0; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction, int, size_t) { *n = 2; return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) { *n = 1; return 0; }
CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **) {
  record("triton", "%s", (const char *)f);
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction f, void **, void **) { record("triton", "%s", (const char *)f); return 0; }
