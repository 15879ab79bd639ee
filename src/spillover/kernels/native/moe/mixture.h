// One request's rows through their experts: what host_experts.cpp asks for. mixture_of.h computes it, for weights in one form;
// the forms are compiled in several files, side by side.
#pragma once
#include <memory>

#include "../crew.h"

struct Linear {
    int64_t values, scales, bias;  // where they lie in a record; bias < 0: there is none
};

enum Type { kFloat32, kBfloat16, kFloat16 };

// As ExpertLayout.numbers lists it, and tile_rows.
struct Layout {
    int64_t form;  // 0 to 2: dense, of that type; 3: fp8; 4: mxfp4; 5 to 7: 4 bits, groups of 32, 64, 128; 8 to 10: 8 bits;
                   // 11 to 14: as GGUF files have them
    int64_t bias_type;
    int64_t hidden, inner, experts, record_bytes;
    int64_t clamped;  // rows of gate and up alternate, and SwiGLU is clamped
    Linear gate_up, down;
    int64_t tile_rows;  // an expert of as many rows is computed in tiles; 0: none is
};

struct Request {
    const uint8_t* records;  // of the layer
    const float* x;          // [tokens, hidden]
    const int32_t* pairs;    // [count, 4]: token, expert, and two that are not looked at
    float* out;              // [count, hidden]
    int64_t tokens, count;
};

// One request's rows through their experts.
class Mixture : public Job {
  public:
    virtual ~Mixture() = default;
    // Whether all that is asked for is there.
    virtual bool prepare(const Request& request, int64_t (&chunks)[Crew::kPhases]) = 0;
};

// Mixtures of forms: Layout::form less the first of these.
using MakeMixture = std::unique_ptr<Mixture>(int64_t which, const Layout& layout, float limit, int threads, int64_t grain);
MakeMixture make_float_mixture, make_small_float_mixture, make_int4_mixture, make_int8_mixture, make_gguf_mixture;
constexpr int64_t kFloatForms = 0, kSmallFloatForms = 3, kInt4Forms = 5, kInt8Forms = 8, kGgufForms = 11;
