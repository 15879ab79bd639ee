// Experts in float32, bfloat16 and float16 (mixture_of.h).
#include "mixture_of.h"

std::unique_ptr<Mixture> make_float_mixture(int64_t which, const Layout& layout, float limit, int threads, int64_t grain) {
    return nth_mixture<Float32Form, Bfloat16Form, Float16Form>(which, layout, limit, threads, grain);
}
