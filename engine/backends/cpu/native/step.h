// Vectors of sixteen floats, conversion to bf16, and the step that all kernels receive. Vectors are GCC's, for every instruction
// set.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512BF16__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using bf16 = uint16_t;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
constexpr int64_t kLanes = 16;

inline vec load(const bf16* from) {
    hvec half;
    std::memcpy(&half, from, sizeof half);
    const uvec bits = __builtin_convertvector(half, uvec) << 16;
    vec wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

#ifndef __AVX512BF16__
// The nearest bf16, rounded half to even, in the upper half of each lane; the lower half is 0. A NaN stays NaN.
inline uvec nearest(vec wide) {
    uvec bits;
    std::memcpy(&bits, &wide, sizeof bits);
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    const uvec is_nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    return (rounded & ~is_nan) | (0x7fc00000 & is_nan);
}
#endif

// Rounds half to even; a NaN stays NaN. The AVX-512 instruction flushes subnormal numbers (below 1e-38) to zero.
inline hvec narrow(vec wide) {
#ifdef __AVX512BF16__
    return (hvec)_mm512_cvtneps_pbh((__m512)wide);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Two instructions. From generic code GCC makes sixteen single moves.
    const uvec halves = nearest(wide) >> 16;
    __m256i low, high;
    std::memcpy(&low, &halves, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&halves) + sizeof low, sizeof high);
    return (hvec)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
    return __builtin_convertvector(nearest(wide) >> 16, hvec);
#endif
}

inline void store(bf16* to, vec wide) {
    const hvec half = narrow(wide);
    std::memcpy(to, &half, sizeof half);
}

inline vec rounded(vec wide) {
#ifdef __AVX512BF16__
    const uvec bits = __builtin_convertvector(narrow(wide), uvec) << 16;
#else
    const uvec bits = nearest(wide);
#endif
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline float sum(vec wide) {
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    const half eight = __builtin_shufflevector(wide, wide, 0, 1, 2, 3, 4, 5, 6, 7) +
                       __builtin_shufflevector(wide, wide, 8, 9, 10, 11, 12, 13, 14, 15);
    const quarter four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

inline float greatest(vec wide) {
    float lanes[kLanes], found = wide[0];
    std::memcpy(lanes, &wide, sizeof lanes);
    for (float lane : lanes) found = std::max(found, lane);
    return found;
}

// A head's rows in a block are a short run of memory, far from the next block's, so hardware prefetchers do not help.
inline void prefetch(const bf16* from, int64_t elements) {
    for (int64_t at = 0; at < elements; at += 32) __builtin_prefetch(from + at);
}

// exp by 2^n * p(r), |r| <= ln2 / 2, within 2 ulp; p is the Taylor polynomial of degree 6. x is clamped to the range of fp32.
inline vec exponential(vec x) {
    const vec low = vec{} - 87.0f, high = vec{} + 88.0f;
    x = x > low ? x : low;
    x = x < high ? x : high;
    const vec scaled = x * 1.44269504088896f;
    const ivec n = __builtin_convertvector(scaled + (scaled > 0.0f ? vec{} + 0.5f : vec{} - 0.5f), ivec);
    const vec steps = __builtin_convertvector(n, vec);
    const vec r = (x - steps * 0.693359375f) + steps * 2.12194440e-4f;
    vec p = vec{} + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const ivec bits = (n + 127) << 23;
    vec power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

}  // namespace

// The values that all layers share. Addresses are of contiguous memory. kvrelay.engine.backends.cpu.native.library has the same
// fields.
struct Step {
    bf16* pool;                   // blocks of layers; a layer: keys [kv_heads, block_size, key_size], then values
    const bf16* cos;              // [max_model_len, rotary_size]
    const bf16* sin;              // the first half negative
    const int64_t* positions;     // [num_tokens]
    const int64_t* slots;         // [num_tokens]: block * block_size + offset
    const int64_t* block_tables;  // [num_rows, max_blocks]
    const int64_t* seq_lens;      // [num_rows], this step's tokens included
    const int64_t* query_starts;  // [num_rows + 1]: each row's first token, then the end
    const int64_t* last_seen;     // null, or [num_tokens]: the last position that a token sees, not before its own
    int64_t num_tokens, num_rows, max_blocks;
    int64_t block_stride, q_heads, kv_heads, block_size, key_size, value_size;  // block_stride in elements
    int64_t rotary_size;  // the first dimensions of a key, which rotate
};

namespace {

[[maybe_unused]] int64_t keys_of_layer(const Step* step) { return step->kv_heads * step->block_size * step->key_size; }
[[maybe_unused]] int64_t layer_stride(const Step* step) { return keys_of_layer(step) + step->kv_heads * step->block_size * step->value_size; }

}  // namespace
