// Everything between a decoder's matrix products, for bf16 on the CPU.
//
// One step of a few sequences reads the weights once; what is left is some dozens of tiny operations per layer, and the K/V of the
// context. In torch each tiny operation costs more to call than to compute, and paged K/V must be gathered before a matrix
// product can read them. Here a norm, a rotation or an activation is one call, and attention reads K/V where they lie.
//
// All sums run in fp32. Results are rounded to bf16 where the torch operations beside this file round (kvrelay.engine.ops_cpu), but
// attention's scores and weights stay fp32. Vectors are GCC's own (sixteen floats): one source for every instruction set.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using bf16 = uint16_t;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
constexpr int64_t kLanes = 16;

// Elements below which a second thread costs more than it does.
constexpr int64_t kParallelElements = 16384;

inline vec load(const bf16* from) {
    hvec half;
    std::memcpy(&half, from, sizeof half);
    const uvec bits = __builtin_convertvector(half, uvec) << 16;
    vec wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Round to nearest even; a NaN stays one.
inline hvec narrow(vec wide) {
    uvec bits;
    std::memcpy(&bits, &wide, sizeof bits);
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uvec is_nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), hvec);
}

inline void store(bf16* to, vec wide) {
    const hvec half = narrow(wide);
    std::memcpy(to, &half, sizeof half);
}

inline vec rounded(vec wide) {
    const uvec bits = __builtin_convertvector(narrow(wide), uvec) << 16;
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

// A block's rows of one head are a short run of memory, far from the next block's: no hardware prefetcher sees that coming.
inline void prefetch(const bf16* from, int64_t elements) {
    for (int64_t at = 0; at < elements; at += 32) __builtin_prefetch(from + at);
}

// exp by 2^n * p(r), |r| <= ln2 / 2; p is the Taylor polynomial of degree 6: within 2 ulp. The argument is clamped to what fp32 holds.
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

// Attention of the G query heads of one KV head, at one position, over keys first .. end-1. scores: G * (end - first) floats.
template <int D, int G>
void attend(const bf16* query, const bf16* keys, const int64_t* table, int64_t first, int64_t end, int64_t block_size,
            int64_t block_stride, int64_t value_offset, float scale, float* scores, bf16* out) {
    constexpr int C = D / kLanes;
    const int64_t count = end - first;
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    vec q[G][C];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) q[g][c] = load(query + g * D + c * kLanes) * scale;

    prefetch(keys + table[first / block_size] * block_stride, block_size * D);
    for (int64_t position = first; position < end;) {
        const int64_t block = position / block_size, offset = position % block_size;
        const int64_t last = std::min(end, position - offset + block_size);
        const bf16* row = keys + table[block] * block_stride + offset * D;
        const bf16* next = last < end ? keys + table[block + 1] * block_stride
                                      : keys + table[first / block_size] * block_stride + value_offset;
        prefetch(next, block_size * D);
        for (; position < last; ++position, row += D) {
            vec dot[G] = {};
            for (int c = 0; c < C; ++c) {
                const vec key = load(row + c * kLanes);
                for (int g = 0; g < G; ++g) dot[g] += q[g][c] * key;
            }
            for (int g = 0; g < G; ++g) scores[g * padded + position - first] = sum(dot[g]);
        }
    }

    float total[G];
    for (int g = 0; g < G; ++g) {
        float* row = scores + g * padded;
        for (int64_t index = count; index < padded; ++index) row[index] = -std::numeric_limits<float>::infinity();
        vec highs = vec{} - std::numeric_limits<float>::infinity(), sums = {};
        for (int64_t index = 0; index < padded; index += kLanes) {
            vec score;
            std::memcpy(&score, row + index, sizeof score);
            highs = score > highs ? score : highs;
        }
        const float highest = greatest(highs);
        for (int64_t index = 0; index < padded; index += kLanes) {
            vec score;
            std::memcpy(&score, row + index, sizeof score);
            vec weight = exponential(score - highest);
            // What is clamped instead of vanishing: 1e-38, but of padding it must be nothing.
            weight = score > -std::numeric_limits<float>::max() ? weight : vec{};
            std::memcpy(row + index, &weight, sizeof weight);
            sums += weight;
        }
        total[g] = sum(sums);
    }

    vec result[G][C] = {};
    for (int64_t position = first; position < end;) {
        const int64_t block = position / block_size, offset = position % block_size;
        const int64_t last = std::min(end, position - offset + block_size);
        const bf16* row = keys + table[block] * block_stride + value_offset + offset * D;
        if (last < end) prefetch(keys + table[block + 1] * block_stride + value_offset, block_size * D);
        for (; position < last; ++position, row += D) {
            for (int c = 0; c < C; ++c) {
                const vec value = load(row + c * kLanes);
                for (int g = 0; g < G; ++g) result[g][c] += scores[g * padded + position - first] * value;
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) store(out + g * D + c * kLanes, result[g][c] / total[g]);
}

using Attend = void (*)(const bf16*, const bf16*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, float, float*, bf16*);

template <int D>
Attend attend_for(int64_t group) {
    switch (group) {
        case 1: return attend<D, 1>;
        case 2: return attend<D, 2>;
        case 3: return attend<D, 3>;
        default: return attend<D, 4>;
    }
}

}  // namespace

// What is the same in all layers of a step. Addresses are of contiguous memory. kvrelay.engine.native.library has the same fields.
struct Step {
    bf16* pool;                   // [num_blocks, num_layers, 2, kv_heads, block_size, head_dim]
    const bf16* cos;              // [max_model_len, head_dim]
    const bf16* sin;              // the first half negative
    const int64_t* positions;     // [num_tokens]
    const int64_t* slots;         // [num_tokens]: block * block_size + offset
    const int64_t* block_tables;  // [num_decode_rows, max_blocks]
    const int64_t* seq_lens;      // [num_decode_rows], this step's token included
    int64_t num_tokens, num_decode_rows, max_blocks;
    int64_t num_layers, q_heads, kv_heads, block_size, head_dim;
};

namespace {

int64_t layer_stride(const Step* step) { return 2 * step->kv_heads * step->block_size * step->head_dim; }

}  // namespace

extern "C" {

// residual += hidden (if hidden is not null), then out = norm(residual) * weight. All [rows, width], width a multiple of 16.
void kvrelay_rms_norm(const bf16* hidden, bf16* residual, const bf16* weight, bf16* out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        bf16* of = residual + row * width;
        vec squares = {};
        for (int64_t at = 0; at < width; at += kLanes) {
            vec wide = load(of + at);
            if (hidden != nullptr) {
                wide = rounded(wide + load(hidden + row * width + at));
                store(of + at, wide);
            }
            squares += wide * wide;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps);
        for (int64_t at = 0; at < width; at += kLanes)
            store(out + row * width + at, rounded(load(of + at) * scale) * load(weight + at));
    }
}

// out = silu(gate) * up of [rows, 2 * width], width a multiple of 16.
void kvrelay_silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* gate = gate_up + row * 2 * width;
        for (int64_t at = 0; at < width; at += kLanes) {
            const vec wide = load(gate + at);
            const vec silu = rounded(wide / (1.0f + exponential(-wide)));
            store(out + row * width + at, silu * load(gate + width + at));
        }
    }
}

// tokens[row]: where the row of [rows, width] is greatest, the first of equals. NaN is never greatest.
void kvrelay_argmax(const bf16* logits, int64_t* tokens, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* of = logits + row * width;
        ivec lane_index = {};
        for (int64_t lane = 0; lane < kLanes; ++lane) lane_index[lane] = lane;
        vec best = vec{} - std::numeric_limits<float>::infinity();
        ivec index = {};
        const int64_t whole = width / kLanes * kLanes;
        for (int64_t at = 0; at < whole; at += kLanes) {
            const vec wide = load(of + at);
            const ivec is_greater = (ivec)(wide > best);
            best = is_greater ? wide : best;
            index = is_greater ? lane_index + static_cast<int32_t>(at) : index;
        }
        float greatest_yet = best[0];
        int64_t token = index[0];
        for (int64_t lane = 1; lane < kLanes; ++lane) {
            if (best[lane] > greatest_yet || (best[lane] == greatest_yet && index[lane] < token)) {
                greatest_yet = best[lane];
                token = index[lane];
            }
        }
        for (int64_t at = whole; at < width; ++at) {
            const uint32_t bits = static_cast<uint32_t>(of[at]) << 16;
            float wide;
            std::memcpy(&wide, &bits, sizeof wide);
            if (wide > greatest_yet) {
                greatest_yet = wide;
                token = at;
            }
        }
        tokens[row] = token;
    }
}

// Rotates q into rotated [num_tokens, q_heads, head_dim] and k and v, the former rotated, into the pool. Strides are per token.
void kvrelay_rotary_kv_write(const Step* step, int64_t layer, const bf16* query, const bf16* key, const bf16* value,
                             int64_t query_stride, int64_t key_stride, int64_t value_stride, bf16* rotated) {
    const int64_t dim = step->head_dim, half = dim / 2;
    const int64_t heads = step->q_heads + step->kv_heads;
#pragma omp parallel for if (step->num_tokens * heads * dim > kParallelElements)
    for (int64_t token = 0; token < step->num_tokens; ++token) {
        const bf16* cos = step->cos + step->positions[token] * dim;
        const bf16* sin = step->sin + step->positions[token] * dim;
        const int64_t block = step->slots[token] / step->block_size, offset = step->slots[token] % step->block_size;
        bf16* place = step->pool + (block * step->num_layers + layer) * layer_stride(step) + offset * dim;
        for (int64_t head = 0; head < heads; ++head) {
            const bool is_key = head >= step->q_heads;
            const int64_t kv_head = head - step->q_heads;
            const bf16* from = is_key ? key + token * key_stride + kv_head * dim : query + token * query_stride + head * dim;
            bf16* to = is_key ? place + kv_head * step->block_size * dim : rotated + (token * step->q_heads + head) * dim;
            for (int64_t at = 0; at < dim; at += kLanes) {
                const int64_t other = at < half ? at + half : at - half;
                const vec turned = rounded(load(from + at) * load(cos + at)) + rounded(load(from + other) * load(sin + at));
                hvec bits = narrow(turned);
                // A broken sequence's NaN would outlive it in the pool: attention may read behind a sequence's end, under a mask.
                if (is_key) bits = (bits & 0x7f80) == 0x7f80 ? hvec{} : bits;
                std::memcpy(to + at, &bits, sizeof bits);
            }
        }
        for (int64_t head = 0; head < step->kv_heads; ++head) {
            bf16* to = place + (step->kv_heads + head) * step->block_size * dim;
            for (int64_t at = 0; at < dim; at += kLanes) {
                hvec bits;
                std::memcpy(&bits, value + token * value_stride + head * dim + at, sizeof bits);
                bits = (bits & 0x7f80) == 0x7f80 ? hvec{} : bits;
                std::memcpy(to + at, &bits, sizeof bits);
            }
        }
    }
}

// The leading num_decode_rows tokens' attention over the pool. query and out [num_decode_rows, q_heads, head_dim], contiguous;
// window: positions that a query sees, 0 for all. Returns 0, or 1 if there is no code for this head_dim.
int kvrelay_decode_attention(const Step* step, int64_t layer, const bf16* query, int64_t window, float scale, bf16* out) {
    const int64_t dim = step->head_dim, group = step->q_heads / step->kv_heads;
    Attend (*choose)(int64_t) = nullptr;
    switch (dim) {
        case 32: choose = attend_for<32>; break;
        case 64: choose = attend_for<64>; break;
        case 96: choose = attend_for<96>; break;
        case 128: choose = attend_for<128>; break;
        case 256: choose = attend_for<256>; break;
        default: return 1;
    }
    const int64_t head_stride = step->block_size * dim, block_stride = step->num_layers * layer_stride(step);
    const bf16* pool = step->pool + layer * layer_stride(step);
#pragma omp parallel if (step->num_decode_rows * step->kv_heads > 1)
    {
        std::vector<float> scores;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t row = 0; row < step->num_decode_rows; ++row) {
            for (int64_t head = 0; head < step->kv_heads; ++head) {
                const int64_t end = step->seq_lens[row], first = window > 0 ? std::max<int64_t>(0, end - window) : 0;
                scores.resize(4 * (end - first + kLanes));
                for (int64_t done = 0; done < group; done += 4) {
                    const int64_t at = (row * step->q_heads + head * group + done) * dim;
                    choose(std::min<int64_t>(4, group - done))(query + at, pool + head * head_stride,
                                                               step->block_tables + row * step->max_blocks, first, end,
                                                               step->block_size, block_stride, step->kv_heads * head_stride, scale,
                                                               scores.data(), out + at);
                }
            }
        }
    }
    return 0;
}

}  // extern "C"
