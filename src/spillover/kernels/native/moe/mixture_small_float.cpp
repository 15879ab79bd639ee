// Experts in FP8 and MXFP4 (mixture_of.h).
#include "mixture_of.h"

std::unique_ptr<Mixture> make_small_float_mixture(int64_t which, const Layout& layout, float limit, int threads, int64_t grain) {
    return nth_mixture<Fp8Form, Mxfp4Form>(which, layout, limit, threads, grain);
}
