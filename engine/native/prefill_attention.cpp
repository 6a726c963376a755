// Attention of prompts over paged K/V, by AVX-512's bf16 dot products.
//
// A task is a tile of queries of one sequence and one KV head. It goes through the keys in chunks: a chunk's keys and values are
// packed once, as pairs, for all query heads and queries of the tile, which then take their turns with it, twelve rows at a time:
// scores, running maximum and sum, weights, output (online softmax: Milakov and Gimelshein 2018; Dao et al., "FlashAttention",
// 2022). Scores, sums and output are fp32; weights are rounded to bf16, as in the torch operations.

#include <algorithm>
#include <vector>

#include "step.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int64_t kQueries = 64;      // positions of a tile
constexpr int64_t kChunk = 128;       // keys packed at once
constexpr int64_t kPanel = 2 * kLanes;  // keys, or elements of a head, that a product computes at once
constexpr int64_t kRows = 12;         // 12 x 2 vectors of sums, and the registers are full
constexpr float kLowest = -1e30f;     // below every score, and its differences stay finite

// out [R, kPanel] (out_stride) = or += a [R, 2 * pairs] (a_stride) times b [pairs, kPanel, 2].
template <int R>
void multiply_tile(const bf16* a, int64_t a_stride, const bf16* b, int64_t pairs, float* out, int64_t out_stride, bool adds) {
    __m512 sum[R][2];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) sum[r][v] = adds ? _mm512_loadu_ps(out + r * out_stride + v * kLanes) : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair, b += 2 * kPanel) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(b), high = (__m512bh)_mm512_loadu_si512(b + kPanel);
        for (int r = 0; r < R; ++r) {
            int32_t both;
            std::memcpy(&both, a + r * a_stride + 2 * pair, sizeof both);
            const __m512bh wide = (__m512bh)_mm512_set1_epi32(both);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], low, wide);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], high, wide);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) _mm512_storeu_ps(out + r * out_stride + v * kLanes, sum[r][v]);
}

template <int R = kRows>
void multiply(int64_t rows, const bf16* a, int64_t a_stride, const bf16* b, int64_t pairs, float* out, int64_t out_stride, bool adds) {
    if (rows == R)
        multiply_tile<R>(a, a_stride, b, pairs, out, out_stride, adds);
    else if constexpr (R > 1)
        multiply<R - 1>(rows, a, a_stride, b, pairs, out, out_stride, adds);
}

struct Tile {
    int64_t row;             // of the batch
    int64_t query;           // its first, among the step's tokens
    int64_t position, count;  // of the first query; how many queries there are
    int64_t head;            // KV head
};

// A thread's memory. A "lane" is a query of one query head: group * count of them in a tile, all heads of a position together.
struct Scratch {
    std::vector<bf16> queries, keys, values, weights;
    std::vector<float> scores, outputs, highest, total;

    Scratch(int64_t lanes, int64_t dim)
        : queries(lanes * dim), keys(kChunk * dim), values(kChunk * dim), weights(kRows * kChunk), scores(kRows * kChunk),
          outputs(lanes * dim), highest(lanes), total(lanes) {}
};

// Keys (offset 0) or values of positions first .. first+count-1 of one head.
struct Paged {
    const bf16* base;
    const int64_t* table;
    int64_t block_size, block_stride, dim;

    const bf16* at(int64_t position) const {
        return base + table[position / block_size] * block_stride + position % block_size * dim;
    }
};

// [keys / kPanel, dim / 2, kPanel, 2]: pairs of a key's elements, 32 keys side by side. Zeros behind the last key.
void pack_keys(const Paged& keys, int64_t first, int64_t count, bf16* packed) {
    const int64_t pairs = keys.dim / 2, padded = (count + kPanel - 1) / kPanel * kPanel;
    for (int64_t index = 0; index < padded; ++index) {
        bf16* to = packed + index / kPanel * kPanel * keys.dim + index % kPanel * 2;
        const bf16* from = index < count ? keys.at(first + index) : nullptr;
        for (int64_t pair = 0; pair < pairs; ++pair, to += 2 * kPanel) {
            uint32_t both = 0;
            if (from != nullptr) std::memcpy(&both, from + 2 * pair, sizeof both);
            std::memcpy(to, &both, sizeof both);
        }
    }
}

// [dim / kPanel, kChunk / 2, kPanel, 2]: pairs of values that follow each other, 32 elements side by side. Zeros behind the last.
void pack_values(const Paged& values, int64_t first, int64_t count, bf16* packed) {
    alignas(64) static const bf16 zeros[256] = {};
    const int64_t padded = (count + kPanel - 1) / kPanel * kPanel;
    for (int64_t index = 0; index < padded; index += 2) {
        const bf16* even = index < count ? values.at(first + index) : zeros;
        const bf16* odd = index + 1 < count ? values.at(first + index + 1) : zeros;
        for (int64_t panel = 0; panel < values.dim / kPanel; ++panel) {
            bf16* to = packed + (panel * kChunk / 2 + index / 2) * 2 * kPanel;
            for (int64_t element = 0; element < kPanel; ++element) {
                to[2 * element] = even[panel * kPanel + element];
                to[2 * element + 1] = odd[panel * kPanel + element];
            }
        }
    }
}

// exp(x) for x <= 0, to 1e-6 of it: 2^n * 2^f, |f| <= 1/2, by the Taylor polynomial of degree 5.
inline __m512 exponential_of_negative(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(power, whole);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    for (float factor : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(p, whole);
}

// What a lane makes of its scores of the first `width` keys, of which it sees low .. high-1: weights, and by how much all earlier
// ones shrink.
float weigh(float* scores, int64_t width, int64_t low, int64_t high, float scale, float* highest, float* total, bf16* weights) {
    for (int64_t key = 0; key < std::min(low, width); ++key) scores[key] = kLowest;
    for (int64_t key = high; key < width; ++key) scores[key] = kLowest;
    __m512 highs = _mm512_set1_ps(kLowest);
    for (int64_t at = 0; at < width; at += kLanes) highs = _mm512_max_ps(highs, _mm512_loadu_ps(scores + at));
    const float before = *highest, now = std::max(before, _mm512_reduce_max_ps(highs) * scale);
    if (low >= high) {  // sees none of these keys
        std::fill_n(weights, width, 0);
        return 1.0f;
    }
    __m512 sums = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += kLanes) {
        const __m512 score = _mm512_fmsub_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(scale), _mm512_set1_ps(now));
        const __m512 weight = exponential_of_negative(score);  // 0 of the lowest
        sums = _mm512_add_ps(sums, weight);
        const __m256bh narrow = _mm512_cvtneps_pbh(weight);
        std::memcpy(weights + at, &narrow, sizeof narrow);
    }
    const float shrinks = _mm512_cvtss_f32(exponential_of_negative(_mm512_set1_ps(before - now)));
    *highest = now;
    *total = *total * shrinks + _mm512_reduce_add_ps(sums);
    return shrinks;
}

void attend(const Step* step, int64_t layer, const Tile& tile, const bf16* query, int64_t window, float scale, bf16* out, Scratch& scratch) {
    const int64_t dim = step->head_dim, group = step->q_heads / step->kv_heads, lanes = group * tile.count;
    const int64_t head_stride = step->block_size * dim;
    const bf16* base = step->pool + layer * layer_stride(step) + tile.head * head_stride;
    const Paged keys{base, step->block_tables + tile.row * step->max_blocks, step->block_size, step->num_layers * layer_stride(step), dim};
    Paged values = keys;
    values.base += step->kv_heads * head_stride;

    const int64_t offset = (tile.query * step->q_heads + tile.head * group) * dim, stride = step->q_heads * dim;
    for (int64_t index = 0; index < tile.count; ++index)
        std::memcpy(scratch.queries.data() + index * group * dim, query + offset + index * stride, group * dim * sizeof(bf16));
    std::fill_n(scratch.outputs.begin(), lanes * dim, 0.0f);
    std::fill_n(scratch.highest.begin(), lanes, kLowest);
    std::fill_n(scratch.total.begin(), lanes, 0.0f);

    const int64_t end = tile.position + tile.count;  // of the keys that the last query sees
    const int64_t begin = window > 0 ? std::max<int64_t>(0, tile.position - window + 1) : 0;
    for (int64_t first = begin; first < end; first += kChunk) {
        const int64_t count = std::min(kChunk, end - first);
        pack_keys(keys, first, count, scratch.keys.data());
        pack_values(values, first, count, scratch.values.data());
        for (int64_t lane = 0; lane < lanes; lane += kRows) {
            const int64_t rows = std::min(kRows, lanes - lane);
            const int64_t seen = std::min(count, tile.position + (lane + rows - 1) / group + 1 - first);
            if (seen <= 0) continue;
            const int64_t width = (seen + kPanel - 1) / kPanel * kPanel;
            for (int64_t key = 0; key < width; key += kPanel)
                multiply(rows, scratch.queries.data() + lane * dim, dim, scratch.keys.data() + key * dim, dim / 2,
                         scratch.scores.data() + key, kChunk, false);
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t position = tile.position + (lane + row) / group;
                const int64_t low = window > 0 ? position - window + 1 - first : 0;
                const int64_t high = std::clamp<int64_t>(position + 1 - first, 0, width);
                const float shrinks = weigh(scratch.scores.data() + row * kChunk, width, std::max<int64_t>(0, low), high, scale,
                                            &scratch.highest[lane + row], &scratch.total[lane + row],
                                            scratch.weights.data() + row * kChunk);
                float* output = scratch.outputs.data() + (lane + row) * dim;
                if (shrinks < 1.0f)
                    for (int64_t at = 0; at < dim; ++at) output[at] *= shrinks;
            }
            for (int64_t panel = 0; panel < dim / kPanel; ++panel)
                multiply(rows, scratch.weights.data(), kChunk, scratch.values.data() + panel * kChunk * kPanel, width / 2,
                         scratch.outputs.data() + lane * dim + panel * kPanel, dim, true);
        }
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
        bf16* to = out + offset + lane / group * stride + lane % group * dim;
        for (int64_t at = 0; at < dim; at += kLanes) {
            vec wide;
            std::memcpy(&wide, scratch.outputs.data() + lane * dim + at, sizeof wide);
            store(to + at, wide / scratch.total[lane]);
        }
    }
}

}  // namespace

extern "C" {

// Attention of the rows behind the leading num_decode_rows. query and out [num_tokens, q_heads, head_dim], contiguous; head_dim a
// multiple of 32, at most 256; window: positions that a query sees, 0 for all.
void kvrelay_prefill_attention(const Step* step, int64_t layer, const bf16* query, int64_t window, float scale, bf16* out) {
    std::vector<Tile> tiles;
    for (int64_t row = step->num_decode_rows; row < step->num_rows; ++row) {
        const int64_t start = step->query_starts[row], count = step->query_starts[row + 1] - start;
        for (int64_t done = 0; done < count; done += kQueries)
            for (int64_t head = 0; head < step->kv_heads; ++head)
                tiles.push_back({row, start + done, step->seq_lens[row] - count + done, std::min(kQueries, count - done), head});
    }
    // A tile's work grows with its position: the small ones last, so that the threads end together.
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.position > b.position; });
#pragma omp parallel if (tiles.size() > 1)
    {
        Scratch scratch(step->q_heads / step->kv_heads * kQueries, step->head_dim);
#pragma omp for schedule(dynamic, 1)
        for (size_t index = 0; index < tiles.size(); ++index) attend(step, layer, tiles[index], query, window, scale, out, scratch);
    }
}

}  // extern "C"

#else  // the processor has no such products

extern "C" void kvrelay_prefill_attention(const Step*, int64_t, const bf16*, int64_t, float, bf16*) {}

#endif
