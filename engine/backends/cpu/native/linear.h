// The weight layout and the division of work that all products of bf16 rows with a weight matrix share.
//
// A panel is 48 outputs of a weight, with inputs in pairs: a vector gives each of its outputs the next pair of inputs, which is
// multiplied with the broadcast pair of a row. A tile is rows by vectors of outputs, with a register for each sum. One row reads
// weights at memory speed; many rows find the panel in the cache. Each output is summed in one order for any number of rows, so a
// row's result does not depend on other rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

namespace kvrelay {

using bf16 = uint16_t;
constexpr int64_t kPanel = 48;  // outputs; kvrelay.engine.backends.cpu.native.library has the same number
// Rows that use a panel before the next panel is read.
#ifdef __AVX512BF16__
constexpr int64_t kRowsAtOnce = 64;
#else
constexpr int64_t kRowsAtOnce = 96;  // the panel is expanded once for these rows
#endif

struct Product {
    const bf16* hidden;  // [rows, inputs]
    const bf16* panels;  // [ceil(outputs / kPanel), inputs / 2, kPanel, 2], zero-padded
    const float* bias;   // [outputs], or null
    bf16* out;           // [rows, outputs]
    int64_t rows, outputs, inputs;
    const uint32_t* expanded = nullptr;  // hidden as floats' bits, if multiply_panel needs them
};

// The content of `product.expanded` during a multiplication, or null if it is not needed.
std::unique_ptr<uint32_t[]> expanded_rows(const Product& product);

// Multiplies rows first .. last-1, at most kRowsAtOnce, with one panel. In linear_dot_products.cpp or linear_portable.cpp.
void multiply_panel(const Product& product, int64_t panel, int64_t first, int64_t last);

}  // namespace kvrelay
