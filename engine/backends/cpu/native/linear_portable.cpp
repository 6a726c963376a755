// linear.h without bf16 dot products. A bf16 is the upper half of a float, so a shift and a mask make two floats of a pair of
// inputs. Weights stay bf16 in memory, half the bytes of floats. Vectors are GCC's: one source for every instruction set.

#ifndef __AVX512BF16__
#include <cstring>

#include "linear.h"
#include "step.h"

namespace kvrelay {
namespace {

#ifdef __AVX512F__
constexpr int64_t kFloats = 16, kTall = 8, kWide = 3;  // rows and vectors of a tile: sums for 32 registers
#else
constexpr int64_t kFloats = 8, kTall = 6, kWide = 2;  // for 16 registers
#endif
constexpr int64_t kFewRows = 4;              // up to this, weights are expanded where used; above, once for all rows
constexpr int64_t kDeep = 256;               // inputs expanded at a time: a tile's weights fit the first-level cache
constexpr int64_t kManyNumbers = 32 * 1024;  // from this size on, several threads expand rows
constexpr int64_t kPart = kWide * kFloats;   // outputs of a tile

typedef uint32_t bits __attribute__((vector_size(4 * kFloats)));
typedef float fvec __attribute__((vector_size(4 * kFloats)));
typedef uint32_t loose_bits __attribute__((vector_size(4 * kFloats), aligned(2), may_alias));
typedef float loose_fvec __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));
typedef uint32_t loose_pair __attribute__((aligned(2), may_alias));

inline fvec even(bits pairs) { return (fvec)(pairs << 16); }
inline fvec odd(bits pairs) { return (fvec)(pairs & 0xffff0000u); }

// The same value in all lanes. It uses integers, because 0.0f + x is a real addition: it turns -0.0 into 0.0.
inline bits all(uint32_t value) { return bits{} + value; }

// Multiplies R rows from `row` with V vectors of a panel's outputs, from `output` on. Expands weights and rows where it uses them.
template <int R, int V>
void multiply_few(const Product& product, int64_t row, int64_t panel, int64_t output, float* sums) {
    fvec sum[R][V] = {};
    const bf16* hidden = product.hidden + row * product.inputs;
    const bf16* weight = product.panels + panel * kPanel * product.inputs + 2 * output;
    for (int64_t input = 0; input < product.inputs; input += 2, weight += 2 * kPanel) {
        fvec outputs[V];
        for (int v = 0; v < V; ++v) outputs[v] = even(*(const loose_bits*)(weight + 2 * v * kFloats));
        for (int r = 0; r < R; ++r) {
            const fvec value = even(all(*(const loose_pair*)(hidden + r * product.inputs + input)));
            for (int v = 0; v < V; ++v) sum[r][v] += outputs[v] * value;
        }
        for (int v = 0; v < V; ++v) outputs[v] = odd(*(const loose_bits*)(weight + 2 * v * kFloats));
        for (int r = 0; r < R; ++r) {
            const fvec value = odd(all(*(const loose_pair*)(hidden + r * product.inputs + input)));
            for (int v = 0; v < V; ++v) sum[r][v] += outputs[v] * value;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) *(loose_fvec*)(sums + r * kPanel + output + v * kFloats) = sum[r][v];
}

// Multiplies R = `rows` rows. One or two rows take all of a panel at once, so it is read in order.
template <int R>
void multiply_few_rows(int64_t rows, const Product& product, int64_t row, int64_t panel, float* sums) {
    if (rows == R) {
        constexpr int V = R <= 2 ? kPanel / kFloats : 3;
        for (int64_t output = 0; output < kPanel; output += V * kFloats) multiply_few<R, V>(product, row, panel, output, sums);
    } else if constexpr (R > 1)
        multiply_few_rows<R - 1>(rows, product, row, panel, sums);
}

// Adds to `sums` R expanded rows of `depth` inputs, `stride` floats apart, times expanded weights [depth, kPart].
template <int R>
void multiply_tile(const uint32_t* hidden, int64_t stride, const float* weights, int64_t depth, float* sums) {
    fvec sum[R][kWide];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kWide; ++v) sum[r][v] = *(const loose_fvec*)(sums + r * kPanel + v * kFloats);
    for (int64_t input = 0; input < depth; ++input, weights += kPart) {
        fvec outputs[kWide];
        for (int v = 0; v < kWide; ++v) outputs[v] = *(const loose_fvec*)(weights + v * kFloats);
        for (int r = 0; r < R; ++r) {
            const fvec value = (fvec)all(hidden[r * stride + input]);
            for (int v = 0; v < kWide; ++v) sum[r][v] += outputs[v] * value;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kWide; ++v) *(loose_fvec*)(sums + r * kPanel + v * kFloats) = sum[r][v];
}

template <int R>
void multiply_rows(int64_t rows, const uint32_t* hidden, int64_t stride, const float* weights, int64_t depth, float* sums) {
    if (rows == R)
        multiply_tile<R>(hidden, stride, weights, depth, sums);
    else if constexpr (R > 1)
        multiply_rows<R - 1>(rows, hidden, stride, weights, depth, sums);
}

// Expands `depth` inputs of a panel, from `from` on, to weights [kPanel / kPart, kDeep, kPart].
void expand_weights(const bf16* from, int64_t depth, float* weights) {
    for (int64_t input = 0; input < depth; input += 2, from += 2 * kPanel)
        for (int64_t part = 0; part < kPanel; part += kPart)
            for (int64_t lane = 0; lane < kPart; lane += kFloats) {
                const bits pairs = *(const loose_bits*)(from + 2 * (part + lane));
                float* to = weights + part * kDeep + input * kPart + lane;
                *(loose_fvec*)to = even(pairs);
                *(loose_fvec*)(to + kPart) = odd(pairs);
            }
}

void multiply_many(const Product& product, int64_t panel, int64_t first, int64_t num_rows, float* sums) {
    float weights[kPanel * kDeep];
    const int64_t tiles = (num_rows + kTall - 1) / kTall;
    for (int64_t begin = 0; begin < product.inputs; begin += kDeep) {
        const int64_t depth = std::min(kDeep, product.inputs - begin);
        expand_weights(product.panels + (panel * product.inputs + begin) * kPanel, depth, weights);
        const uint32_t* hidden = product.expanded + first * product.inputs + begin;
        for (int64_t part = 0; part < kPanel; part += kPart)
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t row = num_rows * tile / tiles, rows = num_rows * (tile + 1) / tiles - row;
                multiply_rows<kTall>(rows, hidden + row * product.inputs, product.inputs, weights + part * kDeep, depth,
                                     sums + row * kPanel + part);
            }
    }
}

}  // namespace

std::unique_ptr<uint32_t[]> expanded_rows(const Product& product) {
    if (product.rows <= kFewRows) return nullptr;
    const int64_t size = product.rows * product.inputs;
    std::unique_ptr<uint32_t[]> expanded(new uint32_t[size]);
    uint32_t* to = expanded.get();
#pragma omp parallel for if (size >= kManyNumbers)
    for (int64_t index = 0; index < size; ++index) to[index] = static_cast<uint32_t>(product.hidden[index]) << 16;
    return expanded;
}

void multiply_panel(const Product& product, int64_t panel, int64_t first, int64_t last) {
    float sums[kRowsAtOnce * kPanel] = {};
    if (last - first <= kFewRows)
        multiply_few_rows<kFewRows>(last - first, product, first, panel, sums);
    else
        multiply_many(product, panel, first, last - first, sums);
    const int64_t output = panel * kPanel, num_outputs = std::min(kPanel, product.outputs - output);
    for (int64_t row = first; row < last; ++row) {
        float* sum = sums + (row - first) * kPanel;
        bf16* out = product.out + row * product.outputs + output;
        if (product.bias != nullptr)
            for (int64_t index = 0; index < num_outputs; ++index) sum[index] += product.bias[output + index];
        for (int64_t index = 0; index < num_outputs; index += kLanes) {
            vec wide;
            std::memcpy(&wide, sum + index, sizeof wide);
            const hvec half = narrow(wide);
            std::memcpy(out + index, &half, std::min(kLanes, num_outputs - index) * sizeof(bf16));
        }
    }
}

}  // namespace kvrelay

#endif
