// The operations between a decoder's matrix products and attention, for bf16 on the CPU. In torch these are dozens of tiny
// operations per layer, and a call costs more than its computation. Here a norm, a rotation or an activation is one call.
//
// All sums are fp32. Results are rounded to bf16 where the torch operations round (kvrelay.engine.backends.cpu.ops).

#include <algorithm>

#include "step.h"

namespace {

// Below this number of elements, a second thread costs more than it saves.
constexpr int64_t kParallelElements = 16384;

}  // namespace

extern "C" {

// residual += hidden (if hidden is not null), then out = norm(residual) * weight. All [rows, width], width a multiple of 16.
void kvrelay_rms_norm(const bf16* hidden, bf16* residual, const bf16* weight, bf16* out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        bf16* of = residual + row * width;
        vec squares = {};
        for (int64_t at = 0; at < width; at += kLanes) {
            vec wide = load(of + at);
            if (hidden != nullptr) {
                wide = rounded(wide + load(hidden + row * width + at));
                store(of + at, wide);
            }
            squares += wide * wide;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps);
        for (int64_t at = 0; at < width; at += kLanes)
            store(out + row * width + at, rounded(load(of + at) * scale) * load(weight + at));
    }
}

// out = silu(gate) * up of [rows, 2 * width], width a multiple of 16.
void kvrelay_silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* gate = gate_up + row * 2 * width;
        for (int64_t at = 0; at < width; at += kLanes) {
            const vec wide = load(gate + at);
            const vec silu = rounded(wide / (1.0f + exponential(-wide)));
            store(out + row * width + at, silu * load(gate + width + at));
        }
    }
}

// out = (up + 1) * gate * sigmoid(alpha * gate) of [rows, 2 * width], gate <= limit, |up| <= limit, width a multiple of 16.
void kvrelay_clamped_swiglu(const bf16* gate_up, bf16* out, int64_t rows, int64_t width, float alpha, float limit) {
    const vec high = vec{} + limit, low = -high;
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* gates = gate_up + row * 2 * width;
        for (int64_t at = 0; at < width; at += kLanes) {
            vec gate = load(gates + at), up = load(gates + width + at);
            gate = gate > high ? high : gate;
            up = up > high ? high : up < low ? low : up;
            store(out + row * width + at, (up + 1.0f) * gate / (1.0f + exponential(gate * -alpha)));
        }
    }
}

// tokens[row]: the index of the greatest logit of [rows, width], the first one if several are equal. NaN is never greatest.
void kvrelay_argmax(const bf16* logits, int64_t* tokens, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* of = logits + row * width;
        ivec lane_index = {};
        for (int64_t lane = 0; lane < kLanes; ++lane) lane_index[lane] = lane;
        vec best = vec{} - std::numeric_limits<float>::infinity();
        ivec index = {};
        const int64_t whole = width / kLanes * kLanes;
        for (int64_t at = 0; at < whole; at += kLanes) {
            const vec wide = load(of + at);
            const ivec is_greater = (ivec)(wide > best);
            best = is_greater ? wide : best;
            index = is_greater ? lane_index + static_cast<int32_t>(at) : index;
        }
        float greatest_yet = best[0];
        int64_t token = index[0];
        for (int64_t lane = 1; lane < kLanes; ++lane) {
            if (best[lane] > greatest_yet || (best[lane] == greatest_yet && index[lane] < token)) {
                greatest_yet = best[lane];
                token = index[lane];
            }
        }
        for (int64_t at = whole; at < width; ++at) {
            const uint32_t bits = static_cast<uint32_t>(of[at]) << 16;
            float wide;
            std::memcpy(&wide, &bits, sizeof wide);
            if (wide > greatest_yet) {
                greatest_yet = wide;
                token = at;
            }
        }
        tokens[row] = token;
    }
}

// Writes q, rotated, to rotated [num_tokens, q_heads, head_dim], and k, rotated, and v to the pool. Strides are per token.
void kvrelay_rotary_kv_write(const Step* step, int64_t layer, const bf16* query, const bf16* key, const bf16* value,
                             int64_t query_stride, int64_t key_stride, int64_t value_stride, bf16* rotated) {
    const int64_t dim = step->key_size, turning = step->rotary_size, half = turning / 2, values = step->value_size;
    const int64_t heads = step->q_heads + step->kv_heads;
#pragma omp parallel for if (step->num_tokens * heads * dim > kParallelElements)
    for (int64_t token = 0; token < step->num_tokens; ++token) {
        const bf16* cos = step->cos + step->positions[token] * turning;
        const bf16* sin = step->sin + step->positions[token] * turning;
        const int64_t block = step->slots[token] / step->block_size, offset = step->slots[token] % step->block_size;
        bf16* layer_keys = step->pool + block * step->block_stride + layer * layer_stride(step);
        bf16* place = layer_keys + offset * dim;
        for (int64_t head = 0; head < heads; ++head) {
            const bool is_key = head >= step->q_heads;
            const int64_t kv_head = head - step->q_heads;
            const bf16* from = is_key ? key + token * key_stride + kv_head * dim : query + token * query_stride + head * dim;
            bf16* to = is_key ? place + kv_head * step->block_size * dim : rotated + (token * step->q_heads + head) * dim;
            for (int64_t at = 0; at < dim; at += kLanes) {
                hvec bits;
                if (at < turning) {
                    const int64_t other = at < half ? at + half : at - half;
                    bits = narrow(rounded(load(from + at) * load(cos + at)) + rounded(load(from + other) * load(sin + at)));
                } else {
                    std::memcpy(&bits, from + at, sizeof bits);
                }
                // NaN and infinity are written as 0: later steps would use them, and the prefix cache would keep them.
                if (is_key) bits = (bits & 0x7f80) == 0x7f80 ? hvec{} : bits;
                std::memcpy(to + at, &bits, sizeof bits);
            }
        }
        for (int64_t head = 0; head < step->kv_heads; ++head) {
            bf16* to = layer_keys + keys_of_layer(step) + (head * step->block_size + offset) * values;
            for (int64_t at = 0; at < values; at += kLanes) {
                hvec bits;
                std::memcpy(&bits, value + token * value_stride + head * values + at, sizeof bits);
                bits = (bits & 0x7f80) == 0x7f80 ? hvec{} : bits;
                std::memcpy(to + at, &bits, sizeof bits);
            }
        }
    }
}

}  // extern "C"
