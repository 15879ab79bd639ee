// The interface by which host_experts.cpp computes the experts of a request. mixture_of.h implements it for weights of
// one form; the forms are in several files, so that they compile in parallel.
#pragma once
#include <memory>

#include "../thread_pool.h"

struct Linear {
    int64_t values, scales, bias;  // offsets in a record in bytes; bias < 0: there is none
};

enum Type { kFloat32, kBfloat16, kFloat16 };

// The numbers of ExpertLayout.numbers, in its order, and tile_rows.
struct Layout {
    int64_t form;  // 0 to 2: dense, of that Type; 3: fp8; 4: mxfp4; 5 to 7: 4 bits in groups of 32, 64, 128; 8 to 10:
                   // 8 bits likewise; 11 to 14: codes of GGUF files
    int64_t bias_type;
    int64_t hidden, inner, experts, record_bytes;
    int64_t clamped;  // rows of gate and up alternate, and SwiGLU is clamped
    Linear gate_up, down;
    int64_t tile_rows;  // number of rows from which an expert is computed in tiles; 0: never
};

struct Request {
    const uint8_t* records;  // the layer's first record
    const float* x;          // [tokens, hidden]
    const int32_t* pairs;    // [count, 4]: token, expert, and two unused numbers
    float* out;              // [count, hidden]
    int64_t tokens, count;
};

// The job of sending a request's rows through their experts.
class Mixture : public Job {
  public:
    virtual ~Mixture() = default;
    // Sets up the request and the number of chunks per phase. Returns false if a token or expert does not exist.
    virtual bool prepare(const Request& request, int64_t (&chunks)[ThreadPool::kPhases]) = 0;
};

// Constructors of mixtures; `which`: Layout::form less the first form of the constructor's kind.
using MakeMixture = std::unique_ptr<Mixture>(int64_t which, const Layout& layout, float limit, int threads, int64_t grain);
MakeMixture make_float_mixture, make_small_float_mixture, make_int4_mixture, make_int8_mixture, make_gguf_mixture;
constexpr int64_t kFloatForms = 0, kSmallFloatForms = 3, kInt4Forms = 5, kInt8Forms = 8, kGgufForms = 11;
