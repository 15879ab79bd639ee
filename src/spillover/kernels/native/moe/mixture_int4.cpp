// Experts in integers of 4 bits (mixture_of.h).
#include "mixture_of.h"

std::unique_ptr<Mixture> make_int4_mixture(int64_t which, const Layout& layout, float limit, int threads, int64_t grain) {
    return nth_mixture<IntForm<4, 32>, IntForm<4, 64>, IntForm<4, 128>>(which, layout, limit, threads, grain);
}
