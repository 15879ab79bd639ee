// Experts in the codes of GGUF files (mixture_of.h).
#include "mixture_of.h"

std::unique_ptr<Mixture> make_gguf_mixture(int64_t which, const Layout& layout, float limit, int threads, int64_t grain) {
    return nth_mixture<GgufForm<4, false, true>, GgufForm<8, false, true>, GgufForm<8, true, false>, GgufForm<8, true, true>>(which, layout, limit, threads, grain);
}
