// cuBLAS and NCCL: a product is logged as "product DTYPE DTYPE OUT M N K BATCH", a collective as "nccl OP DTYPE COUNT
// COMMUNICATOR", a new communicator as "communicator NUMBER RANKS".
#define _GNU_SOURCE
#include <cublas_api.h>
#include <cublasLt.h>
#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "record.h"

void *nullcuda_handle(void);
void *nullcuda_reserve(size_t n);

// ---- cuBLAS
static const char *type_name(cudaDataType t) {
  switch (t) {
    case CUDA_R_16BF: return "bf16";
    case CUDA_R_16F: return "f16";
    case CUDA_R_32F: return "f32";
    case CUDA_R_64F: return "f64";
    case CUDA_R_8F_E4M3: return "e4m3";
    case CUDA_R_8F_E5M2: return "e5m2";
    default: return "other";
  }
}
static void product(cudaDataType a, cudaDataType b, cudaDataType c, long m, long n, long k, long batch) {
  record("product", "%s %s %s %ld %ld %ld %ld", type_name(a), type_name(b), type_name(c), m, n, k, batch);
}
cublasStatus_t cublasCreate_v2(cublasHandle_t *h) { *h = nullcuda_handle(); return 0; }
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t *m) { *m = 0; return 0; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t *m) { *m = 0; return 0; }
cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void *, const void *, cudaDataType a, int, const void *, cudaDataType b, int, const void *, void *, cudaDataType c, int, cublasComputeType_t, cublasGemmAlgo_t) {
  product(a, b, c, m, n, k, 1);
  return 0;
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void *, const void *, cudaDataType a, int, long long, const void *, cudaDataType b, int, long long, const void *, void *, cudaDataType c, int, long long, int batch, cublasComputeType_t, cublasGemmAlgo_t) {
  product(a, b, c, m, n, k, batch);
  return 0;
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float *, const float *, int, const float *, int, const float *, float *, int) {
  product(CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, m, n, k, 1);
  return 0;
}
cublasStatus_t cublasDgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const double *, const double *, int, const double *, int, const double *, double *, int) {
  product(CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, m, n, k, 1);
  return 0;
}
struct layout { cudaDataType type; uint64_t rows, columns; };
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows, uint64_t columns, int64_t) {
  struct layout *made = malloc(sizeof *made);
  *made = (struct layout){type, rows, columns};
  *l = (cublasLtMatrixLayout_t)made;
  return 0;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { free(l); return 0; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t, cudaDataType) { *d = nullcuda_handle(); return 0; }
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) { *p = nullcuda_handle(); return 0; }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *result, int *found) {
  memset(result, 0, sizeof *result);
  *found = 1;
  return 0;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t a, const void *, cublasLtMatrixLayout_t b, const void *, const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t) {
  const struct layout *x = (void *)a, *y = (void *)b, *z = (void *)d;
  product(x->type, y->type, z->type, z->rows, z->columns, x->rows == z->rows ? x->columns : x->rows, 1);
  return 0;
}

// ---- NCCL: making a communicator is collective, through a file beside the log to which each rank adds a line
struct ncclComm { int number, size, rank, splits; char name[200]; };

// Waits until `size` ranks have come to `name` with their colors; makes the communicator of those with this one's.
static ncclComm_t meet(const char *name, int size, int color) {
  static atomic_int last;
  char path[512], line[32];
  snprintf(path, sizeof path, "%s", getenv("NULLCUDA_LOG"));
  snprintf(strrchr(path, '/'), 256, "/communicator-%s", name);
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
  int length = snprintf(line, sizeof line, "%s %d\n", getenv("RANK"), color);
  if (write(file, line, length) != length) abort();
  close(file);
  for (int waited = 0; waited < 60000; waited++, usleep(1000)) {
    int rank, other, all = 0, own = 0;
    char members[64] = "";
    FILE *in = fopen(path, "r");
    for (; fscanf(in, "%d %d\n", &rank, &other) == 2; all++)
      if (other == color) own++, members[rank] = 1;
    fclose(in);
    if (all < size) continue;
    ncclComm_t made = calloc(1, sizeof *made);
    made->number = ++last;
    made->size = own;
    snprintf(made->name, sizeof made->name, "%s", name);
    char text[256] = "";
    for (rank = 0; rank < 64; rank++)
      if (members[rank]) {
        if (rank == atoi(getenv("RANK"))) made->rank = strlen(text) / 3;
        snprintf(text + strlen(text), 8, "%02d,", rank);
      }
    record("communicator", "%d %s", made->number, text);
    return made;
  }
  abort();
}
ncclResult_t ncclGetVersion(int *v) { *v = NCCL_VERSION_CODE; return 0; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static atomic_int count;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d.%d", getpid(), ++count);
  return 0;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int, ncclConfig_t *) { *c = meet(id.internal, n, 0); return 0; }
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int) { *c = meet(id.internal, n, 0); return 0; }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int, int, ncclUniqueId *id, ncclConfig_t *) { *c = meet(id->internal, n, 0); return 0; }
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int, ncclComm_t *c, ncclConfig_t *) {
  char name[220];
  snprintf(name, sizeof name, "%s-%d", parent->name, ++parent->splits);
  ncclComm_t made = meet(name, parent->size, color);
  *c = color == NCCL_SPLIT_NOCOLOR ? 0 : made;
  return 0;
}
ncclResult_t ncclCommCount(ncclComm_t c, int *n) { *n = c->size; return 0; }
ncclResult_t ncclCommUserRank(ncclComm_t c, int *rank) { *rank = c->rank; return 0; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e) { *e = 0; return 0; }
ncclResult_t ncclMemAlloc(void **p, size_t n) { *p = nullcuda_reserve(n); return 0; }
const char *ncclGetErrorString(ncclResult_t) { return "error of the null device"; }
const char *ncclGetLastError(ncclComm_t) { return "none"; }

static ncclResult_t collective(const char *op, size_t n, ncclDataType_t t, ncclComm_t c) {
  static const char *const NAMES[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "e4m3", "e5m2"};
  record("nccl", "%s %s %zu %d", op, NAMES[t], n, c->number);
  return 0;
}
static const char *with_op(const char *name, ncclRedOp_t op) {
  static __thread char text[32];
  snprintf(text, sizeof text, "%s_%s", name, op == ncclSum ? "sum" : op == ncclMax ? "max" : op == ncclMin ? "min" : op == ncclAvg ? "avg" : "other");
  return text;
}
ncclResult_t ncclAllReduce(const void *, void *, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) { return collective(with_op("all_reduce", op), n, t, c); }
ncclResult_t ncclReduceScatter(const void *, void *, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) { return collective(with_op("reduce_scatter", op), n, t, c); }
ncclResult_t ncclAllGather(const void *, void *, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) { return collective("all_gather", n, t, c); }
ncclResult_t ncclBroadcast(const void *, void *, size_t n, ncclDataType_t t, int, ncclComm_t c, cudaStream_t) { return collective("broadcast", n, t, c); }
ncclResult_t ncclSend(const void *, size_t n, ncclDataType_t t, int, ncclComm_t c, cudaStream_t) { return collective("send", n, t, c); }
ncclResult_t ncclRecv(void *, size_t n, ncclDataType_t t, int, ncclComm_t c, cudaStream_t) { return collective("recv", n, t, c); }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) { *op = ncclNumOps; return 0; }
