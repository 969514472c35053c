// Stand-in for the runtime library that compiled CuTe DSL host code calls: the entry points it may use, backed by
// callbacks into Python. Launches return 719 (launch failure) when the emulated kernel reports an error.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*load_callback)(const void *image);            // -> library number > 0, 0 = refused
typedef int (*kernel_callback)(int library, const char *name);  // -> kernel number > 0, 0 = not found
typedef int (*launch_callback)(int kernel, const uint32_t *dims /* grid, block, cluster, overlaps */, uint64_t smem, void *stream,
                               void **args);
typedef int (*attribute_callback)(int attribute);
static load_callback on_load;
static kernel_callback on_kernel;
static launch_callback on_launch;
static attribute_callback on_attribute;

void cute_emulator_callbacks(load_callback l, kernel_callback k, launch_callback c, attribute_callback a) {
  on_load = l; on_kernel = k; on_launch = c; on_attribute = a;
}

// ---- launches: cudaLaunchConfig_t is grid, block, smem, stream, attributes, count; an attribute is 72 bytes ----
static int launch(const char *config, const void *kernel, void **args) {
  uint32_t dims[10], n; uint64_t smem; void *stream; const char *attributes;
  memcpy(dims, config, 24); dims[6] = dims[7] = dims[8] = 1; dims[9] = 0;
  memcpy(&smem, config + 24, 8);
  memcpy(&stream, config + 32, 8);
  memcpy(&attributes, config + 40, 8);
  memcpy(&n, config + 48, 4);
  for (uint32_t i = 0; i < n; i++) {
    int id; memcpy(&id, attributes + 72 * i, 4);
    if (id == 4) memcpy(dims + 6, attributes + 72 * i + 8, 12);  // cluster dimension
    if (id == 6) memcpy(dims + 9, attributes + 72 * i + 8, 4);   // programmatic stream serialisation
  }
  return on_launch ? on_launch((int)(intptr_t)kernel, dims, smem, stream, args) : 999;
}
int _cudaLaunchKernelEx(const char *config, const void *kernel, void **args) { return launch(config, kernel, args); }
int _cudaLaunchKernel(const void *kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                      void **args, uint64_t smem, void *stream) {
  char config[56]; uint32_t d[6] = {gx, gy, gz, bx, by, bz};
  memset(config, 0, sizeof config);
  memcpy(config, d, 24); memcpy(config + 24, &smem, 8); memcpy(config + 32, &stream, 8);
  return launch(config, kernel, args);
}

// ---- modules ----
static int load(void **library, const void *image) {
  int id = on_load ? on_load(image) : 0;
  *library = (void *)(intptr_t)id;
  return id ? 0 : 200;
}
static int kernel_of(void **kernel, void *library, const char *name) {
  int id = on_kernel ? on_kernel((int)(intptr_t)library, name) : 0;
  *kernel = (void *)(intptr_t)id;
  return id ? 0 : 500;
}
int _cudaLibraryLoadData(void **library, const void *image, ...) { return load(library, image); }
int _cuLibraryLoadData(void **library, const void *image, ...) { return load(library, image); }
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return kernel_of(kernel, library, name); }
int _cuLibraryGetKernel(void **kernel, void *library, const char *name) { return kernel_of(kernel, library, name); }

// ---- device ----
int _cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int _cudaGetDevice(int *d) { *d = 0; return 0; }
int _cuDeviceGet(int *d, int ordinal) { *d = ordinal; return 0; }
int _cudaDeviceGetAttribute(int *v, int attribute, int device) { *v = on_attribute ? on_attribute(attribute) : 0; return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t smem) { *n = 1; return 0; }

// ---- memory: the host's; streams and events: everything is synchronous ----
int _cudaMalloc(void **p, size_t n) { return posix_memalign(p, 256, n ? n : 1) ? 2 : 0; }
int _cudaMallocAsync(void **p, size_t n, void *stream) { return _cudaMalloc(p, n); }
int _cudaMallocHost(void **p, size_t n) { return _cudaMalloc(p, n); }
int _cudaMallocManaged(void **p, size_t n, unsigned flags) { return _cudaMalloc(p, n); }
int _cudaFree(void *p) { free(p); return 0; }
int _cudaFreeAsync(void *p, void *stream) { free(p); return 0; }
int _cudaFreeHost(void *p) { free(p); return 0; }
int _cudaMemcpy(void *d, const void *s, size_t n, int kind) { memmove(d, s, n); return 0; }
int _cudaMemcpyAsync(void *d, const void *s, size_t n, int kind, void *stream) { memmove(d, s, n); return 0; }
int _cudaMemset(void *d, int v, size_t n) { memset(d, v, n); return 0; }
int _cudaMemsetAsync(void *d, int v, size_t n, void *stream) { memset(d, v, n); return 0; }
int _cudaStreamCreate(void **s) { *s = (void *)1; return 0; }
int _cudaEventCreate(void **e) { *e = (void *)1; return 0; }
int _cudaEventElapsedTime(float *ms, void *a, void *b) { *ms = 0; return 0; }
#define SUCCEEDS(name) int name() { return 0; }
SUCCEEDS(_cudaFuncSetAttribute) SUCCEEDS(_cudaKernelSetAttributeForDevice) SUCCEEDS(_cudaDeviceSynchronize)
SUCCEEDS(_cudaSetDevice) SUCCEEDS(_cudaStreamDestroy) SUCCEEDS(_cudaStreamSynchronize) SUCCEEDS(_cudaStreamWaitEvent)
SUCCEEDS(_cudaEventDestroy) SUCCEEDS(_cudaEventRecord) SUCCEEDS(_cudaLibraryUnload) SUCCEEDS(_cuLibraryUnload)
SUCCEEDS(_cuKernelGetAttribute) SUCCEEDS(_cudaProfilerStart) SUCCEEDS(_cudaProfilerStop)
#define REFUSES(name) int name() { fprintf(stderr, "kernel emulator: " #name " is not implemented\n"); return 801; }
REFUSES(_cuTensorMapEncodeTiled) REFUSES(_cuLibraryGetGlobal) REFUSES(_cuLibraryGetKernelCount)
REFUSES(_cuLibraryGetManaged) REFUSES(_cuLibraryGetModule) REFUSES(_cuLibraryGetUnifiedFunction)
REFUSES(_cuLibraryLoadFromFile) REFUSES(_cudaGetDeviceProperties) REFUSES(_cudaGraphDestroy)
REFUSES(_cudaGraphExecDestroy) REFUSES(_cudaGraphInstantiate) REFUSES(_cudaGraphLaunch) REFUSES(_cudaLibraryGetGlobal)
REFUSES(_cudaLibraryGetKernelCount) REFUSES(_cudaLibraryGetManaged) REFUSES(_cudaLibraryGetUnifiedFunction)
REFUSES(_cudaLibraryLoadFromFile) REFUSES(_cudaStreamAddCallback) REFUSES(_cudaStreamBeginCapture)
REFUSES(_cudaStreamEndCapture)

// ---- what the DSL's own runtime library adds; errors reach Python by way of the launch callback ----
const char *cuda_dialect_get_error_name(int e) { return e ? "emulated kernel failed" : "success"; }
void cuda_dialect_assert_success(int e) {}
void cuda_dialect_print_on_error(int e) {}
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*to_device)(void **, int), void *set_error) {
  if (*state) return 0;
  void *library = 0;
  int e = init(&library);
  if (e) return e;
  if (to_device && (e = to_device(&library, 0))) return e;
  *state = library;
  return 0;
}
void cuda_dialect_unload_library_once(void **state) { *state = 0; }
typedef void (*raise_error)(const char *kind, const char **parts, int32_t count);  // TVM-FFI wants an error to be set
static void raise(raise_error set) {
  const char *message = "emulated kernel failed";
  if (set) set("RuntimeError", &message, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(raise_error set, int e) { raise(set); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(raise_error set, int e) { raise(set); }
