// Attention over paged K/V, for prompts and for single tokens.
//
// A task is a tile: queries of one sequence and one KV head. In a decode step a tile has one query. The tile goes through the keys
// in chunks. A chunk's keys and values are packed once for all query heads and queries of the tile. These then use the chunk a few
// rows at a time: scores, running maximum and sum, weights, output (online softmax: Milakov and Gimelshein 2018; Dao et al.,
// "FlashAttention", 2022). Scores, sums and output are fp32.
//
// A query's result has the same bits alone, in a batch, or in a prompt cut anywhere. Chunks begin at multiples of their size, not
// at the start of a tile. Every sum has one order. Hidden keys add zeros; keys after the tile's last query, or before its window,
// are not read. So an answer that is recomputed elsewhere, with its generated tokens as part of the prompt, continues with the same
// words. Where queries see later keys, this holds as long as these are in the same step.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "step.h"

namespace {

// Vectors are as wide as the processor's registers. A word is a lane's operand of one multiplication: a pair of bf16 if the
// processor has bf16 dot products, else one float.
#ifdef __AVX512F__
constexpr int64_t kWords = 16, kRows = 12;  // rows times two vectors of sums fill the registers
#else
constexpr int64_t kWords = 8, kRows = 6;
#endif
#ifdef __AVX512BF16__
constexpr int64_t kDepth = 2;  // numbers in a word
#else
constexpr int64_t kDepth = 1;
#endif
constexpr int64_t kQueries = 64;        // positions in a tile
constexpr int64_t kChunk = 128;         // keys in a chunk
constexpr int64_t kPanel = 2 * kWords;  // keys, or elements of a head, in one product
constexpr int64_t kMaxDim = 256;
constexpr float kLowest = -1e30f;  // below every score; differences stay finite

typedef uint32_t words __attribute__((vector_size(4 * kWords)));
typedef float sums __attribute__((vector_size(4 * kWords)));
typedef uint16_t halves __attribute__((vector_size(2 * kWords)));

template <typename To, typename From>
inline To read(const From* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename Value, typename To>
inline void write(To* to, Value value) {
    std::memcpy(to, &value, sizeof value);
}

inline words widened(const bf16* from) { return __builtin_convertvector(read<halves>(from), words); }

#ifdef __AVX512BF16__
inline words words_of(const bf16* from) { return read<words>(from); }

template <size_t... Lane>
inline void put_pairs(uint32_t* to, const bf16* even, const bf16* odd, std::index_sequence<Lane...>) {
    typedef uint16_t panel __attribute__((vector_size(2 * kPanel)));
    const panel a = read<panel>(even), b = read<panel>(odd);
    write(to, __builtin_shufflevector(a, b, (Lane / 2 + Lane % 2 * kPanel)...));
    write(to + kWords, __builtin_shufflevector(a, b, (kWords + Lane / 2 + Lane % 2 * kPanel)...));
}

// The words of a panel, from values that follow each other.
inline void put_values(uint32_t* to, const bf16* even, const bf16* odd) { put_pairs(to, even, odd, std::make_index_sequence<kPanel>()); }
inline sums add_product(sums sum, words a, words b) { return (sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
inline void put_weights(uint32_t* to, vec weights) { write(to, narrow(weights)); }
#else
inline words words_of(const bf16* from) { return widened(from) << 16; }
inline void put_values(uint32_t* to, const bf16* one, const bf16*) {
    for (int64_t at = 0; at < kPanel; at += kWords) write(to + at, words_of(one + at));
}
inline sums add_product(sums sum, words a, words b) { return sum + (sums)a * (sums)b; }
inline void put_weights(uint32_t* to, vec weights) { write(to, weights); }
#endif

// One step of a transposition: two rows swap blocks of S by S.
template <size_t S, size_t... Lane>
inline void swap_blocks(words& a, words& b, std::index_sequence<Lane...>) {
    const words low = __builtin_shufflevector(a, b, (Lane & S ? kWords + Lane - S : Lane)...);
    b = __builtin_shufflevector(a, b, (Lane & S ? kWords + Lane : Lane + S)...);
    a = low;
}

template <size_t S = 1>
inline void transpose(words (&rows)[kWords]) {
    for (size_t row = 0; row < kWords; ++row)
        if (!(row & S)) swap_blocks<S>(rows[row], rows[row | S], std::make_index_sequence<kWords>());
    if constexpr (2 * S < kWords) transpose<2 * S>(rows);
}

// out [R, P * kPanel] (out_stride) = or += a [R, depth] (a_stride) times P panels of b, each [depth, kPanel] (b_stride).
template <int R, int P>
void multiply_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth, float* out,
                   int64_t out_stride, bool adds) {
    constexpr int V = 2 * P;
    sums sum[R][V] = {};
    if (adds)
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sum[r][v] = read<sums>(out + r * out_stride + v * kWords);
    for (int64_t at = 0; at < depth; ++at, b += kPanel) {
        words panels[V];
        for (int v = 0; v < V; ++v) panels[v] = read<words>(b + v / 2 * b_stride + v % 2 * kWords);
        for (int r = 0; r < R; ++r) {
            const words all = words{} + a[r * a_stride + at];
            for (int v = 0; v < V; ++v) sum[r][v] = add_product(sum[r][v], panels[v], all);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) write(out + r * out_stride + v * kWords, sum[r][v]);
}

// Multiplies all panels. Few rows take two panels at once, because one has too few sums to keep the processor busy.
template <int R = kRows>
void multiply(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth, int64_t panels,
              float* out, int64_t out_stride, bool adds) {
    if (rows == R) {
        if constexpr (R <= kRows / 3)
            for (; panels >= 2; panels -= 2, b += 2 * b_stride, out += 2 * kPanel)
                multiply_tile<R, 2>(a, a_stride, b, b_stride, depth, out, out_stride, adds);
        for (; panels > 0; --panels, b += b_stride, out += kPanel)
            multiply_tile<R, 1>(a, a_stride, b, b_stride, depth, out, out_stride, adds);
    } else if constexpr (R > 1)
        multiply<R - 1>(rows, a, a_stride, b, b_stride, depth, panels, out, out_stride, adds);
}

struct Tile {
    int64_t row;              // row of the batch
    int64_t query;            // first query, among the step's tokens
    int64_t position, count;  // of the first query; number of queries
    int64_t head;             // KV head
};

// Uninitialised memory that begins at a cache line.
template <typename T>
class Lines {
    struct alignas(64) Line {
        T elements[64 / sizeof(T)];
    };
    std::unique_ptr<Line[]> lines_;

public:
    explicit Lines(int64_t size) : lines_(new Line[(size * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)]) {}
    T* data() { return lines_[0].elements; }
};

// A thread's memory. A "lane" is a query of one query head. A tile has group * count lanes, the heads of one position together.
struct Scratch {
    Lines<uint32_t> queries, keys, values, weights;
    Lines<float> scores, outputs, highest, total;
    const bf16 *key_rows[kChunk], *value_rows[kChunk];  // addresses of the chunk's keys and values

    Scratch(int64_t lanes, int64_t key_size, int64_t value_size)
        : queries(lanes * key_size / kDepth), keys(kChunk * key_size / kDepth), values(kChunk * value_size / kDepth), weights(kRows * kChunk / kDepth),
          scores(kRows * kChunk), outputs(lanes * value_size), highest(lanes), total(lanes) {}
};

alignas(64) const bf16 kZeros[kMaxDim] = {};

// Finds keys (or values) first .. first+count-1 of a head. After the last one, zeros fill the panel.
int64_t locate(const bf16* base, const int64_t* table, int64_t block_size, int64_t block_stride, int64_t dim, int64_t first,
               int64_t count, const bf16** rows) {
    int64_t offset = first % block_size;
    table += first / block_size;
    for (int64_t index = 0; index < count; offset = 0, ++table)
        for (const bf16* block = base + *table * block_stride; offset < block_size && index < count; ++offset, ++index)
            rows[index] = block + offset * dim;
    const int64_t padded = (count + kPanel - 1) / kPanel * kPanel;
    for (int64_t index = count; index < padded; ++index) rows[index] = kZeros;
    return padded;
}

// Packs keys as [keys / kPanel, dim / kDepth, kPanel]: a word of every key in a panel, side by side. Meanwhile it prefetches the
// values, whose places a hardware prefetcher does not foresee.
void pack_keys(const bf16* const* rows, const bf16* const* values, int64_t count, int64_t padded, int64_t dim, int64_t value_size,
               uint32_t* packed) {
    const int64_t depth = dim / kDepth;
    for (int64_t key = 0; key < padded; key += kWords) {
        for (int64_t index = key; index < std::min(key + kWords, count); ++index) prefetch(values[index], value_size);
        uint32_t* panel = packed + key / kPanel * kPanel * depth + key % kPanel;
        for (int64_t at = 0; at < depth; at += kWords) {
            words block[kWords];
            for (int64_t index = 0; index < kWords; ++index) block[index] = words_of(rows[key + index] + at * kDepth);
            transpose(block);
            for (int64_t index = 0; index < kWords; ++index) write(panel + (at + index) * kPanel, block[index]);
        }
    }
}

// Packs values as [dim / kPanel, kChunk / kDepth, kPanel]: a word of values that follow each other, for each element of a panel.
void pack_values(const bf16* const* rows, int64_t count, int64_t padded, int64_t dim, uint32_t* packed) {
    for (int64_t key = 0; key < padded; key += kDepth) {
        const bf16* one = key < count ? rows[key] : kZeros;
        const bf16* two = key + 1 < count ? rows[key + 1] : kZeros;
        for (int64_t at = 0; at < dim; at += kPanel) put_values(packed + (at / kPanel * kChunk + key) / kDepth * kPanel, one + at, two + at);
    }
}

// exp(x) for x <= 0, with relative error 4e-6, and 0 below -87: 2^n * 2^f, |f| <= 1/2, by the Taylor polynomial of degree 5.
inline vec exponential_of_negative(vec x) {
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds a number to an integer in the last bits
    const vec power = x * 1.44269504f;
    const vec shifted = power + shifter;
    const vec f = power - (shifted - shifter);
    vec p = vec{} + 1.33335581e-3f;
    for (float factor : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) p = p * f + factor;
    const uvec scaled = read<uvec>(&p) + (read<uvec>(&shifted) << 23);
    return x > -87.0f ? read<vec>(&scaled) : vec{};
}

// Turns a lane's scores of the first `width` keys into weights; it sees keys low .. high-1. Returns the factor for earlier weights.
float weigh(float* scores, int64_t width, int64_t low, int64_t high, float scale, float* highest, float* total, uint32_t* weights) {
    if (low >= high) {  // sees none of these keys
        std::fill_n(weights, width / kDepth, 0);
        return 1.0f;
    }
    std::fill_n(scores, low, kLowest);
    std::fill_n(scores + high, width - high, kLowest);
    vec highs = vec{} + kLowest;
    for (int64_t at = 0; at < width; at += kLanes) {
        const vec score = read<vec>(scores + at);
        highs = score > highs ? score : highs;
    }
    const float before = *highest, now = std::max(before, greatest(highs) * scale);
    vec sum_of = {};
    for (int64_t at = 0; at < width; at += kLanes) {
        const vec score = read<vec>(scores + at);
        vec weight = exponential_of_negative(score * scale - now);
        weight = score > kLowest ? weight : vec{};  // a query with NaN gets no weights, and the result 0 / 0
        sum_of += weight;
        put_weights(weights + at / kDepth, weight);
    }
    const float shrinks = exponential_of_negative(vec{} + (before - now))[0];
    *highest = now;
    *total = *total * shrinks + sum(sum_of);
    return shrinks;
}

// The positions that a query sees: all before it, the last `size`, or those of its own chunk of `size`.
struct Window {
    int64_t size;  // 0: all
    bool is_chunk;

    // The first position; below 0 if a window is not full yet.
    int64_t first_seen(int64_t position) const {
        if (size == 0) return 0;
        return is_chunk ? position - position % size : position - size + 1;
    }
};

void attend(const Step* step, int64_t layer, const Tile& tile, const bf16* query, const Window& window, float scale,
            const float* sinks, bf16* out, Scratch& scratch) {
    const int64_t dim = step->key_size, depth = dim / kDepth, group = step->q_heads / step->kv_heads, lanes = group * tile.count;
    const int64_t value_size = step->value_size;
    const bf16* of_layer = step->pool + layer * layer_stride(step);
    const bf16* keys = of_layer + tile.head * step->block_size * dim;
    const bf16* values = of_layer + keys_of_layer(step) + tile.head * step->block_size * value_size;
    const int64_t* table = step->block_tables + tile.row * step->max_blocks;

    const int64_t first_lane = tile.query * step->q_heads + tile.head * group;  // index among all tokens' query heads
    const auto place = [&](int64_t lane) { return first_lane + lane / group * step->q_heads + lane % group; };
    uint32_t *queries = scratch.queries.data(), *weights = scratch.weights.data();
    float *scores = scratch.scores.data(), *outputs = scratch.outputs.data();
    for (int64_t lane = 0; lane < lanes; ++lane)
        for (int64_t at = 0; at < depth; at += kWords)
            write(queries + lane * depth + at, words_of(query + place(lane) * dim + at * kDepth));
    std::fill_n(outputs, lanes * value_size, 0.0f);
    for (int64_t lane = 0; lane < lanes; ++lane) {  // a sink counts as a first key without a value
        scratch.highest.data()[lane] = sinks == nullptr ? kLowest : sinks[tile.head * group + lane % group];
        scratch.total.data()[lane] = sinks == nullptr ? 0.0f : 1.0f;
    }

    const auto last_seen = [&](int64_t index) {  // of a query of the tile
        return step->last_seen == nullptr ? tile.position + index : step->last_seen[tile.query + index];
    };
    const auto end_seen = [&](int64_t from, int64_t to) {  // end of the keys that any of these queries sees
        int64_t last = last_seen(to - 1);
        if (step->last_seen != nullptr)
            for (int64_t index = from; index < to; ++index) last = std::max(last, last_seen(index));
        return last + 1;
    };
    const int64_t end = end_seen(0, tile.count);
    const int64_t visible = std::max<int64_t>(0, window.first_seen(tile.position));  // first key that any query sees
    const int64_t begin = visible / kChunk * kChunk;
    for (int64_t first = begin; first < end; first += kChunk) {
        const int64_t count = std::min(kChunk, end - first);
        const int64_t padded = locate(keys, table, step->block_size, step->block_stride, dim, first, count, scratch.key_rows);
        locate(values, table, step->block_size, step->block_stride, value_size, first, count, scratch.value_rows);
        // Keys before the first visible one may belong to others and hold NaN, so the first visible key replaces them.
        if (visible > first)
            for (const bf16** rows : {scratch.key_rows, scratch.value_rows}) std::fill_n(rows, visible - first, rows[visible - first]);
        pack_keys(scratch.key_rows, scratch.value_rows, count, padded, dim, value_size, scratch.keys.data());
        pack_values(scratch.value_rows, count, padded, value_size, scratch.values.data());
        for (int64_t lane = 0; lane < lanes; lane += kRows) {
            const int64_t rows = std::min(kRows, lanes - lane);
            const int64_t seen = std::min(count, end_seen(lane / group, (lane + rows - 1) / group + 1) - first);
            if (seen <= 0) continue;
            const int64_t width = (seen + kPanel - 1) / kPanel * kPanel;
            multiply(rows, queries + lane * depth, depth, scratch.keys.data(), kPanel * depth, depth, width / kPanel, scores, kChunk,
                     false);
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t position = tile.position + (lane + row) / group;
                const int64_t low = std::max<int64_t>(0, window.first_seen(position) - first);
                const int64_t high = std::clamp<int64_t>(last_seen((lane + row) / group) + 1 - first, 0, width);
                const float shrinks = weigh(scores + row * kChunk, width, low, high, scale, scratch.highest.data() + lane + row,
                                            scratch.total.data() + lane + row, weights + row * kChunk / kDepth);
                float* output = outputs + (lane + row) * value_size;
                if (shrinks < 1.0f)
                    for (int64_t at = 0; at < value_size; ++at) output[at] *= shrinks;
            }
            multiply(rows, weights, kChunk / kDepth, scratch.values.data(), kChunk / kDepth * kPanel, width / kDepth,
                     value_size / kPanel, outputs + lane * value_size, value_size, true);
        }
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
        bf16* to = out + place(lane) * value_size;
        for (int64_t at = 0; at < value_size; at += kLanes)
            store(to + at, read<vec>(outputs + lane * value_size + at) / scratch.total.data()[lane]);
    }
}

}  // namespace

extern "C" {

// query [num_tokens, q_heads, key_size] and out [.., value_size], contiguous; sizes are multiples of 32, at most 256. window:
// number of positions that a query sees, 0 for all; is_chunk: it sees its own chunk of `window` positions instead of the last ones.
// sinks: null, or [q_heads], scores of one more key without a value.
void kvrelay_attention(const Step* step, int64_t layer, const bf16* query, int64_t window, int64_t is_chunk, float scale,
                       const float* sinks, bf16* out) {
    std::vector<Tile> tiles;
    int64_t longest = 0;
    for (int64_t row = 0; row < step->num_rows; ++row) {
        const int64_t start = step->query_starts[row], count = step->query_starts[row + 1] - start;
        longest = std::max(longest, std::min(kQueries, count));
        for (int64_t done = 0; done < count; done += kQueries)
            for (int64_t head = 0; head < step->kv_heads; ++head)
                tiles.push_back({row, start + done, step->seq_lens[row] - count + done, std::min(kQueries, count - done), head});
    }
    // A tile's work grows with its queries and their positions. Large tiles come first, so that threads end together.
    const auto work = [](const Tile& tile) { return (tile.position + tile.count) * tile.count; };
    std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) { return work(a) > work(b); });
#pragma omp parallel if (tiles.size() > 1)
    {
        Scratch scratch(step->q_heads / step->kv_heads * longest, step->key_size, step->value_size);
#pragma omp for schedule(dynamic, 1)
        for (size_t index = 0; index < tiles.size(); ++index) attend(step, layer, tiles[index], query, {window, is_chunk != 0}, scale, sinks, out, scratch);
    }
}

}  // extern "C"
