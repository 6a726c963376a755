// Products of bf16 rows with a weight matrix, or with those of experts, stored in panels (linear.h).

#include <vector>

#include "linear.h"

using namespace kvrelay;

extern "C" {

int kvrelay_has_bf16_dot_products() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// Packs weight [outputs, inputs], with an even number of inputs, into panels (see Product).
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
    Product product{hidden, panels, bias, out, rows, outputs, inputs};
    const std::unique_ptr<uint32_t[]> expanded = expanded_rows(product);
    product.expanded = expanded.get();
#pragma omp parallel for collapse(2)
    for (int64_t panel = 0; panel < (outputs + kPanel - 1) / kPanel; ++panel)
        for (int64_t first = 0; first < rows; first += kRowsAtOnce)
            multiply_panel(product, panel, first, std::min(rows, first + kRowsAtOnce));
}

// Rows are sorted by expert: expert e has rows starts[e] .. starts[e + 1] - 1. `panels` and `bias` of the experts follow each
// other; only those of experts with rows are read.
void kvrelay_grouped_linear(const bf16* hidden, const bf16* panels, const float* bias, bf16* out, const int64_t* starts,
                            int64_t experts, int64_t outputs, int64_t inputs) {
    const int64_t num_panels = (outputs + kPanel - 1) / kPanel;
    const std::unique_ptr<uint32_t[]> expanded = expanded_rows({hidden, panels, bias, out, starts[experts], outputs, inputs});
    struct Piece {
        int64_t expert, first, last;
    };
    std::vector<Piece> pieces;
    for (int64_t expert = 0; expert < experts; ++expert)
        for (int64_t first = starts[expert]; first < starts[expert + 1]; first += kRowsAtOnce)
            pieces.push_back({expert, first, std::min(starts[expert + 1], first + kRowsAtOnce)});
    const int64_t num_pieces = static_cast<int64_t>(pieces.size());
    // Experts have different numbers of rows, so threads take work dynamically.
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
    for (int64_t index = 0; index < num_pieces; ++index)
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            const Piece& piece = pieces[index];
            const Product product{hidden, panels + piece.expert * num_panels * kPanel * inputs,
                                  bias == nullptr ? nullptr : bias + piece.expert * outputs, out, starts[experts], outputs, inputs,
                                  expanded.get()};
            multiply_panel(product, panel, piece.first, piece.last);
        }
}

}  // extern "C"
