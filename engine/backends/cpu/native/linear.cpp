// Products of bf16 rows with a weight matrix, cut into panels (linear.h).

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
    Product product{hidden, panels, bias, out, rows, outputs, inputs};
    const std::unique_ptr<uint32_t[]> expanded = expanded_rows(product);
    product.expanded = expanded.get();
#pragma omp parallel for collapse(2)
    for (int64_t panel = 0; panel < (outputs + kPanel - 1) / kPanel; ++panel)
        for (int64_t first = 0; first < rows; first += kRowsAtOnce)
            multiply_panel(product, panel, first, std::min(rows, first + kRowsAtOnce));
}

}  // extern "C"
