// Attention of rows of a single token over paged K/V, which is read where it lies, once for all query heads that share it. Scores and
// weights stay fp32.

#include <algorithm>
#include <vector>

#include "step.h"

namespace {

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

extern "C" {

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
