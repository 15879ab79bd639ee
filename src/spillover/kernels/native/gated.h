// The gated activations of an MLP on vectors of gate and up.
#pragma once
#include "vector.h"

constexpr float kSwigluAlpha = 1.702f;  // the constant of gpt-oss

template <int W>
static inline typename Vec<W>::F silu(typename Vec<W>::F gate, typename Vec<W>::F up) {
    return gate / (1.0f + exponential<W>(-gate)) * up;
}

template <int W>
static inline typename Vec<W>::F swiglu(typename Vec<W>::F gate, typename Vec<W>::F up, float limit) {
    typedef typename Vec<W>::F F;
    const F high = splat<W>(limit), low = splat<W>(-limit);
    gate = gate > high ? high : gate;
    up = up > high ? high : up;
    up = up < low ? low : up;
    return (up + 1.0f) * (gate / (1.0f + exponential<W>(gate * -kSwigluAlpha)));
}
