// Products of several inputs with weights of one shape and format, computed at once: y = x W^T + b for each.
//
// One product with few rows is too small for many threads, and the threads wait for each other after it. The bits of a
// product do not depend on the others.
#pragma once
#include <cstdint>

struct Product {
    const float* x;     // [M, K]
    const void* w;      // panels
    const float* bias;  // [N], or null
    float* y;           // [M, N]
    int64_t M;
};

void linear_products(const Product* list, int64_t count, int64_t N, int64_t K);
void coded_products(const Product* list, int64_t count, int64_t N, int64_t K);
void fp8_products(const Product* list, int64_t count, int64_t N, int64_t K);

// `kind`: of panels, as numbered in kernels/formats/packed.py.
inline void products(int64_t kind, const Product* list, int64_t count, int64_t N, int64_t K) {
    (kind == 0 ? linear_products : kind == 1 ? coded_products : fp8_products)(list, count, N, K);
}
