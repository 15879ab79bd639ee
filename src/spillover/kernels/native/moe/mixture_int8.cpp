// Experts in integers of 8 bits (mixture_of.h).
#include "mixture_of.h"

std::unique_ptr<Mixture> make_int8_mixture(int64_t which, const Layout& layout, float limit, int threads, int64_t grain) {
    return nth_mixture<IntForm<8, 32>, IntForm<8, 64>, IntForm<8, 128>>(which, layout, limit, threads, grain);
}
