// What products of bf16 rows with a weight matrix share, whatever instructions multiply: the weight's layout, and how work is cut.
//
// A panel is 48 outputs of a weight, its inputs taken two by two: whole vectors give as many outputs their next pair of inputs,
// which meet a pair of a row, broadcast. Rows by vectors of outputs are as many sums as there are registers. One row reads the
// weights as fast as memory gives them; many rows find the panel in the cache. Each output is summed up in one order,
// whatever the number of rows: a row's result does not depend on what is beside it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

namespace kvrelay {

using bf16 = uint16_t;
constexpr int64_t kPanel = 48;       // outputs; kvrelay.engine.backends.cpu.native.library knows the number, too
// Rows that meet a panel before the next one is read.
#ifdef __AVX512BF16__
constexpr int64_t kRowsAtOnce = 64;
#else
constexpr int64_t kRowsAtOnce = 96;  // each time, the panel is expanded
#endif

struct Product {
    const bf16* hidden;  // [rows, inputs]
    const bf16* panels;  // [ceil(outputs / kPanel), inputs / 2, kPanel, 2], zeros behind the last output
    const float* bias;   // [outputs], or null
    bf16* out;           // [rows, outputs]
    int64_t rows, outputs, inputs;
    const uint32_t* expanded = nullptr;  // hidden as floats' bits, if multiply_panel needs them
};

// What `product.expanded` is to be while it is multiplied; null where that is not needed.
std::unique_ptr<uint32_t[]> expanded_rows(const Product& product);

// Rows first .. last-1, kRowsAtOnce at most, with one panel. By linear_dot_products.cpp, or by linear_portable.cpp.
void multiply_panel(const Product& product, int64_t panel, int64_t first, int64_t last);

}  // namespace kvrelay
