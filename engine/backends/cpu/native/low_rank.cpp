// Adds adapters (LoRA) to a product's outputs: scaling * B (A x), each row with its own adapter. Rows of one adapter form a group,
// whose matrices are read once for up to four rows. Each sum has one order, whatever else is in the step.

#include <algorithm>
#include <memory>
#include <vector>

#include "step.h"

namespace {

constexpr int64_t kOutputs = 32;      // outputs of B in one panel
constexpr int64_t kInputs = 32;       // inputs of A in one stretch
constexpr int64_t kTile = 4;          // rows, and ranks, of a tile
constexpr int64_t kParallel = 32768;  // multiplications from which several threads pay off

}  // namespace

// One adapter's matrices for some outputs of a product. kvrelay.engine.backends.cpu.low_rank fills it.
struct LowRankPart {
    const bf16* a;  // [ceil(rank / kTile), ceil(inputs / kInputs), kTile, kInputs], zero-padded; null: the adapter has none
    const bf16* b;  // [ceil(outputs / kOutputs), rank, kOutputs], zero-padded
    int64_t rank, first, outputs;
    double scaling;
};

namespace {

struct Task {
    const LowRankPart* part;
    const int64_t* rows;  // the group's rows, `num_rows` of them
    int64_t num_rows;
    float* lowered;  // [num_rows, rank]
    int64_t first;   // rank, or panel of outputs
};

// Multiplies one stretch of inputs of R rows with kTile ranks. The ranks' stretches are adjacent, so memory is read in order.
template <int R>
inline void multiply(const bf16* const (&rows)[R], const bf16* a, vec (&sums)[R][kTile]) {
#ifdef __AVX512BF16__
    __m512bh values[R];
    for (int r = 0; r < R; ++r) std::memcpy(&values[r], rows[r], sizeof values[r]);
    for (int k = 0; k < kTile; ++k) {
        __m512bh weights;
        std::memcpy(&weights, a + k * kInputs, sizeof weights);
        for (int r = 0; r < R; ++r) sums[r][k] = (vec)_mm512_dpbf16_ps((__m512)sums[r][k], values[r], weights);
    }
#else
    for (int64_t half = 0; half < kInputs; half += kLanes) {
        vec values[R];
        for (int r = 0; r < R; ++r) values[r] = load(rows[r] + half);
        for (int k = 0; k < kTile; ++k) {
            const vec weights = load(a + k * kInputs + half);
            for (int r = 0; r < R; ++r) sums[r][k] += values[r] * weights;
        }
    }
#endif
}

// Multiplies R rows with kTile ranks, from task.first on.
template <int R>
void lower_rows(const Task& task, const bf16* hidden, int64_t inputs, int64_t row) {
    const bf16* of[R];
    for (int r = 0; r < R; ++r) of[r] = hidden + task.rows[row + r] * inputs;
    const bf16* a = task.part->a + task.first * ((inputs + kInputs - 1) / kInputs * kInputs);
    vec sums[R][kTile] = {};
    const int64_t whole = inputs / kInputs * kInputs;
    for (int64_t at = 0; at < whole; at += kInputs, a += kTile * kInputs) {
        prefetch(a + 8 * kTile * kInputs, kTile * kInputs);
        multiply<R>(of, a, sums);
        for (int r = 0; r < R; ++r) of[r] += kInputs;
    }
    if (whole < inputs) {
        bf16 rest[R][kInputs] = {};
        for (int r = 0; r < R; ++r) {
            std::memcpy(rest[r], of[r], (inputs - whole) * sizeof(bf16));
            of[r] = rest[r];
        }
        multiply<R>(of, a, sums);
    }
    const int64_t count = std::min(kTile, task.part->rank - task.first);
    for (int r = 0; r < R; ++r)
        for (int64_t k = 0; k < count; ++k)
            task.lowered[(row + r) * task.part->rank + task.first + k] = sum(sums[r][k]) * static_cast<float>(task.part->scaling);
}

// Adds to R rows of `out` their products with one panel of outputs.
template <int R>
void raise(const Task& task, bf16* out, int64_t width, int64_t row) {
    const LowRankPart& part = *task.part;
    const bf16* b = part.b + task.first * part.rank * kOutputs;
    vec sums[R][2] = {};
    for (int64_t rank = 0; rank < part.rank; ++rank, b += kOutputs) {
        const vec low = load(b), high = load(b + kLanes);
        __builtin_prefetch(b + 2 * part.rank * kOutputs);  // the panel after the next one
        for (int r = 0; r < R; ++r) {
            uint32_t bits;  // 0.0f + x would be a real addition, since it turns -0.0 into 0.0
            std::memcpy(&bits, task.lowered + (row + r) * part.rank + rank, sizeof bits);
            const vec value = (vec)(uvec{} + bits);
            sums[r][0] += value * low;
            sums[r][1] += value * high;
        }
    }
    const int64_t count = std::min(kOutputs, part.outputs - task.first * kOutputs);
    for (int r = 0; r < R; ++r) {
        bf16* to = out + task.rows[row + r] * width + part.first + task.first * kOutputs;
        bf16 panel[kOutputs] = {};
        bf16* of = count == kOutputs ? to : panel;
        if (of != to) std::memcpy(of, to, count * sizeof(bf16));
        for (int64_t half = 0; half < 2; ++half) store(of + half * kLanes, load(of + half * kLanes) + sums[r][half]);
        if (of != to) std::memcpy(to, of, count * sizeof(bf16));
    }
}

}  // namespace

extern "C" {

// out [rows, width] += products of hidden [rows, inputs] with the adapters of `table` [slots, num_parts]. Group g has the rows
// rows[starts[g]] .. rows[starts[g + 1] - 1] and the adapter in slots[g].
void kvrelay_add_low_rank(const LowRankPart* table, int64_t num_parts, const int64_t* slots, const int64_t* starts,
                          const int64_t* rows, int64_t num_groups, const bf16* hidden, int64_t inputs, bf16* out, int64_t width) {
    int64_t num_lowered = 0, num_steps = 0;
    const auto each_part = [&](auto&& take) {
        for (int64_t group = 0; group < num_groups; ++group)
            for (int64_t index = 0; index < num_parts; ++index) {
                const LowRankPart& part = table[slots[group] * num_parts + index];
                if (part.a != nullptr) take(part, rows + starts[group], starts[group + 1] - starts[group]);
            }
    };
    each_part([&](const LowRankPart& part, const int64_t*, int64_t num_rows) {
        num_lowered += num_rows * part.rank;
        num_steps += num_rows * part.rank * (inputs + part.outputs);
    });
    const std::unique_ptr<float[]> lowered(new float[num_lowered]);
    std::vector<Task> lowering, raising;
    float* next = lowered.get();
    each_part([&](const LowRankPart& part, const int64_t* of, int64_t num_rows) {
        for (int64_t rank = 0; rank < part.rank; rank += kTile) lowering.push_back({&part, of, num_rows, next, rank});
        for (int64_t panel = 0; panel * kOutputs < part.outputs; ++panel) raising.push_back({&part, of, num_rows, next, panel});
        next += num_rows * part.rank;
    });
#pragma omp parallel if (num_steps > kParallel)
    {
#pragma omp for
        for (size_t index = 0; index < lowering.size(); ++index) {
            const Task& task = lowering[index];
            int64_t row = 0;
            for (; row + kTile <= task.num_rows; row += kTile) lower_rows<kTile>(task, hidden, inputs, row);
            for (; row < task.num_rows; ++row) lower_rows<1>(task, hidden, inputs, row);
        }
#pragma omp for
        for (size_t index = 0; index < raising.size(); ++index) {
            const Task& task = raising[index];
            int64_t row = 0;
            for (; row + kTile <= task.num_rows; row += kTile) raise<kTile>(task, out, width, row);
            for (; row < task.num_rows; ++row) raise<1>(task, out, width, row);
        }
    }
}

}  // extern "C"
