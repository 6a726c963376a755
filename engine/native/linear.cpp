// Products of bf16 rows with a weight matrix, by AVX-512's bf16 dot products.
//
// A panel is 48 outputs of a weight, its inputs taken two by two: one load gives sixteen outputs their next pair of inputs, which
// meet a pair of a row, broadcast. Eight rows by three vectors of outputs are as many sums as there are registers. One row reads
// the weights as fast as memory gives them; many rows find the panel in the cache. Each output is summed up in one order,
// whatever the number of rows: a row's result does not depend on what is beside it.

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

using bf16 = uint16_t;
constexpr int64_t kLanes = 16;
constexpr int64_t kVectors = 3;
constexpr int64_t kPanel = kVectors * kLanes;  // outputs; kvrelay.engine.native.library knows the number, too
constexpr int64_t kRows = 8;
constexpr int64_t kRowsAtOnce = 64;    // that meet a panel before the next one is read
constexpr int64_t kInputsAtOnce = 2048;  // of a panel: what the second-level cache keeps while rows come and go

struct Product {
    const bf16* hidden;  // [rows, inputs]
    const bf16* panels;  // [ceil(outputs / kPanel), inputs / 2, kPanel, 2], zeros behind the last output
    const float* bias;   // [outputs], or null
    bf16* out;           // [rows, outputs]
    int64_t rows, outputs, inputs;
};

// Inputs begin .. end-1 of one panel, and what a tile fetches of the memory behind it, which is needed next: `ahead` elements from
// `next` on for every pair of inputs.
struct Piece {
    int64_t panel, begin, end;
    const bf16* next;
    int64_t ahead;
};

// R rows from `row` with a piece of a panel. `sums` [R, kPanel] carries what earlier inputs gave.
template <int R>
void multiply_tile(const Product& product, int64_t row, const Piece& piece, float* sums) {
    const int64_t begin = piece.begin, end = piece.end;
    __m512 sum[R][kVectors];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v)
            sum[r][v] = begin > 0 ? _mm512_loadu_ps(sums + r * kPanel + v * kLanes) : _mm512_setzero_ps();

    const bf16* hidden = product.hidden + row * product.inputs;
    const bf16* weight = product.panels + piece.panel * kPanel * product.inputs + begin * kPanel;
    const bf16* next = piece.next;
    for (int64_t input = begin; input < end; input += 2, weight += 2 * kPanel, next += piece.ahead) {
        __builtin_prefetch(next);
        __builtin_prefetch(next + 32);
        __m512bh pairs[kVectors];
        for (int v = 0; v < kVectors; ++v) pairs[v] = (__m512bh)_mm512_loadu_si512(weight + 2 * v * kLanes);
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, hidden + r * product.inputs + input, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], pairs[v], both);
        }
    }

    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVectors; ++v) {
            if (end < product.inputs) {
                _mm512_storeu_ps(sums + r * kPanel + v * kLanes, sum[r][v]);
                continue;
            }
            const int64_t output = piece.panel * kPanel + v * kLanes;
            const int64_t left = std::clamp<int64_t>(product.outputs - output, 0, kLanes);
            const __mmask16 mask = static_cast<__mmask16>((1u << left) - 1);
            if (product.bias != nullptr) sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_maskz_loadu_ps(mask, product.bias + output));
            const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(sum[r][v]);
            _mm256_mask_storeu_epi16(product.out + (row + r) * product.outputs + output, mask, narrow);
        }
    }
}

template <int R>
void multiply_rows(int64_t rows, const Product& product, int64_t row, const Piece& piece, float* sums) {
    if (rows == R)
        multiply_tile<R>(product, row, piece, sums);
    else if constexpr (R > 1)
        multiply_rows<R - 1>(rows, product, row, piece, sums);
}

// Rows first .. last-1 with one panel, in tiles of about the same height.
void multiply_panel(const Product& product, int64_t panel, int64_t first, int64_t last) {
    float sums[kRowsAtOnce * kPanel];
    const int64_t tiles = (last - first + kRows - 1) / kRows;
    for (int64_t begin = 0; begin < product.inputs; begin += kInputsAtOnce) {
        const int64_t end = std::min(product.inputs, begin + kInputsAtOnce);
        // A single tile waits for memory anyhow, and the processor sees by itself what comes next.
        const bf16* behind = tiles > 1 ? product.panels + (panel * product.inputs + end) * kPanel : product.hidden;
        const int64_t ahead = tiles > 1 ? 2 * kPanel / tiles : 0;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = first + (last - first) * tile / tiles;
            const int64_t rows = first + (last - first) * (tile + 1) / tiles - row;
            const Piece piece{panel, begin, end, behind + ahead * (end - begin) / 2 * tile, ahead};
            multiply_rows<kRows>(rows, product, row, piece, sums + (row - first) * kPanel);
        }
    }
}

}  // namespace

extern "C" {

int kvrelay_has_bf16_dot_products() { return 1; }

// weight [outputs, inputs], inputs even, to panels (see Product).
void kvrelay_pack_weight(const bf16* weight, bf16* panels, int64_t outputs, int64_t inputs) {
#pragma omp parallel for
    for (int64_t panel = 0; panel < (outputs + kPanel - 1) / kPanel; ++panel) {
        bf16* to = panels + panel * kPanel * inputs;
        for (int64_t input = 0; input < inputs; input += 2)
            for (int64_t output = panel * kPanel; output < (panel + 1) * kPanel; ++output, to += 2)
                for (int64_t half = 0; half < 2; ++half) to[half] = output < outputs ? weight[output * inputs + input + half] : 0;
    }
}

// out = hidden @ weight.T + bias.
void kvrelay_linear(const bf16* hidden, const bf16* panels, const float* bias, bf16* out, int64_t rows, int64_t outputs,
                    int64_t inputs) {
    const Product product{hidden, panels, bias, out, rows, outputs, inputs};
#pragma omp parallel for collapse(2)
    for (int64_t panel = 0; panel < (outputs + kPanel - 1) / kPanel; ++panel)
        for (int64_t first = 0; first < rows; first += kRowsAtOnce)
            multiply_panel(product, panel, first, std::min(rows, first + kRowsAtOnce));
}

}  // extern "C"

#else  // the processor has no such products

extern "C" int kvrelay_has_bf16_dot_products() { return 0; }
extern "C" void kvrelay_pack_weight(const uint16_t*, uint16_t*, int64_t, int64_t) {}
extern "C" void kvrelay_linear(const uint16_t*, const uint16_t*, const float*, uint16_t*, int64_t, int64_t, int64_t) {}

#endif
