// linear.h with AVX-512's bf16 dot products: one load of a panel gives sixteen outputs their next pair of inputs. A tile's sums are
// eight rows by three vectors of outputs.

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <cstring>

#include "linear.h"

namespace kvrelay {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kVectors = kPanel / kLanes;
constexpr int64_t kRows = 8;
constexpr int64_t kInputsAtOnce = 2048;  // inputs of a piece, which stays in the second-level cache for all rows
// For few rows a piece must fit the first-level cache: two low tiles have no time to read it from the second level again.
constexpr int64_t kFewRows = 12, kInputsOfFewRows = 192;
constexpr int64_t kLine = 32;        // elements of a cache line
constexpr int64_t kPairsAhead = 32;  // how far a single tile prefetches: 6 KB

// Inputs begin .. end-1 of a panel, and the memory to prefetch meanwhile: `ahead` elements from `next` on for every pair of inputs.
struct Piece {
    int64_t panel, begin, end;
    const bf16* next;
    int64_t ahead;
};

// Multiplies R rows from `row` with a piece of a panel. `sums` [R, kPanel] has the sums of earlier inputs.
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
        for (int64_t line = 0; line < 2 * kPanel; line += kLine) __builtin_prefetch(next + line);
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

}  // namespace

std::unique_ptr<uint32_t[]> expanded_rows(const Product&) { return nullptr; }

// Cuts the rows into tiles of about the same height.
void multiply_panel(const Product& product, int64_t panel, int64_t first, int64_t last) {
    float sums[kRowsAtOnce * kPanel];
    const int64_t tiles = (last - first + kRows - 1) / kRows;
    const int64_t inputs = tiles > 1 && last - first <= kFewRows ? kInputsOfFewRows : kInputsAtOnce;
    for (int64_t begin = 0; begin < product.inputs; begin += inputs) {
        const int64_t end = std::min(product.inputs, begin + inputs);
        // Several tiles share the prefetch of the next piece. A single tile finishes its piece too soon for that.
        const int64_t fetched = tiles > 1 ? end : begin + 2 * kPairsAhead;
        const bf16* behind = product.panels + (panel * product.inputs + fetched) * kPanel;
        const int64_t ahead = 2 * kPanel / tiles;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = first + (last - first) * tile / tiles;
            const int64_t rows = first + (last - first) * (tile + 1) / tiles - row;
            const Piece piece{panel, begin, end, behind + ahead * (end - begin) / 2 * tile, ahead};
            multiply_rows<kRows>(rows, product, row, piece, sums + (row - first) * kPanel);
        }
    }
}

}  // namespace kvrelay

#endif
