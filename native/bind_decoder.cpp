// The decoder as a Python class: built once from addresses and sizes, then run step by step.
//
// A weight is (kind, outputs, inputs, address, bias address, bias element), a vector (address, element), a norm its
// weight and its bias; addresses of 0 are absent tensors. Everything that a kernel would trust is checked before the
// first of them runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "checks.h"
#include "decoder.h"
#include "dispatch.h"
#include "pool.h"

namespace nb = nanobind;

namespace penstock {
namespace {

using Vector = std::tuple<uintptr_t, int>;
using NormVectors = std::tuple<Vector, Vector>;
using Weight = std::tuple<int, int64_t, int64_t, uintptr_t, uintptr_t, int>;

ConstRows vector_of(const Vector& vector) {
    const auto [address, element] = vector;
    return {pointer<void>(address), 0, element_of(element)};
}

NormWeights norm_of(const NormVectors& vectors, Norm kind) {
    const auto& [weight, bias] = vectors;
    require(std::get<0>(weight) != 0, "the weight of a norm must be given");
    require(kind == Norm::layer || std::get<0>(bias) == 0, "an RMS norm has no bias");
    return {vector_of(weight), vector_of(bias)};
}

Norm norm_kind_of(int kind) {
    require(kind >= 0 && kind <= static_cast<int>(Norm::layer), "norms must be 0 (RMS) or 1 (layer norm)");
    return static_cast<Norm>(kind);
}

Activation activation_of(int activation) {
    require(activation >= 0 && activation <= static_cast<int>(Activation::relu),
            "activation must be 0 (silu_and_mul), 1 (gelu_new), 2 (gelu) or 3 (relu)");
    return static_cast<Activation>(activation);
}

Projection projection_of(const Weight& weight, int64_t outputs, int64_t inputs) {
    const auto [kind, given_outputs, given_inputs, address, bias, bias_element] = weight;
    check_sizes(outputs, inputs);
    require(given_outputs == outputs && given_inputs == inputs, "a weight does not have the sizes of its place");
    require(address != 0, "weight must be given");
    return {kind_of(kind), outputs, inputs, pointer<uint8_t>(address), vector_of({bias, bias_element})};
}

void make_plan(DecoderPlan* place, int64_t hidden, int64_t inner, int q_heads, int kv_heads, int head_dim, float eps,
               int norms, int activation, int qkv_element, const NormVectors& norm, uintptr_t cos, uintptr_t sin,
               int64_t num_positions) {
    check_heads(kv_heads, head_dim);
    require(hidden >= 1 && hidden <= kMostInputs && inner >= 1 && inner <= kMostInputs,
            "hidden and inner must be between 1 and 65536");
    require(q_heads >= 1 && q_heads <= kMostInputs && q_heads % kv_heads == 0,
            "q_heads must be a multiple of kv_heads, up to 65536");
    const Norm kind = norm_kind_of(norms);
    const bool rotates = cos != 0;
    require(rotates == (sin != 0) && rotates == (num_positions >= 1) && (!rotates || head_dim % 2 == 0),
            "rotation wants cos, sin and an even head_dim");
    new (place) DecoderPlan{hidden,
                            inner,
                            q_heads,
                            kv_heads,
                            head_dim,
                            eps,
                            kind,
                            activation_of(activation),
                            element_of(qkv_element),
                            norm_of(norm, kind),
                            pointer<float>(cos),
                            pointer<float>(sin),
                            num_positions,
                            {}};
}

void add_layer(DecoderPlan& plan, const NormVectors& attention_norm, const Weight& qkv, const Vector& q_norm,
               const Vector& k_norm, const Weight& output, const NormVectors& mlp_norm, const Weight& gate_up,
               const Weight& down) {
    plan.layers.push_back({norm_of(attention_norm, plan.norms), norm_of(mlp_norm, plan.norms),
                           vector_of(q_norm), vector_of(k_norm),
                           projection_of(qkv, plan.qkv_width(), plan.hidden),
                           projection_of(output, plan.hidden, plan.q_width()),
                           projection_of(gate_up, plan.up_width(), plan.hidden),
                           projection_of(down, plan.hidden, plan.inner)});
}

int64_t scratch_bytes(const DecoderPlan& plan, int64_t tokens, int rows, int longest) {
    require(rows >= 0 && tokens >= rows && tokens < kMostRows && longest >= 0, "sizes must not be negative");
    return decoder_scratch(plan, tokens, rows, longest, pool().threads());
}

void check_caches(const DecoderStep& step, const DecoderPlan& plan, const std::vector<uintptr_t>& keys,
                  const std::vector<uintptr_t>& values, int64_t num_blocks) {
    require(keys.size() == plan.layers.size() && values.size() == plan.layers.size(),
            "there must be keys and values for each layer");
    for (size_t i = 0; i < keys.size(); i++) {
        KvCache cache = step.cache;
        cache.keys = pointer<void>(keys[i]);
        cache.values = pointer<void>(values[i]);
        check_cache(cache, num_blocks);
    }
}

void run(const DecoderPlan& plan, int64_t tokens, uintptr_t stream, uintptr_t out, int out_element,
         uintptr_t positions, uintptr_t write_slots, const std::vector<uintptr_t>& keys, const std::vector<uintptr_t>& values,
         int kv_element, bool packed, int64_t num_blocks, int block_size, int rows, uintptr_t q_start,
         uintptr_t kv_len, uintptr_t block_table, int64_t table_width, float scale, uintptr_t scratch,
         int64_t scratch_bytes) {
    const KvCache cache{nullptr,    nullptr,       kv_element_of(kv_element), packed,
                        block_size, plan.kv_heads, plan.head_dim};
    const DecoderStep step{tokens,
                           pointer<float>(stream),
                           {pointer<void>(out), plan.hidden, element_of(out_element)},
                           pointer<int64_t>(positions),
                           pointer<int64_t>(write_slots),
                           keys.data(),
                           values.data(),
                           cache,
                           rows,
                           pointer<int32_t>(q_start),
                           pointer<int32_t>(kv_len),
                           pointer<int32_t>(block_table),
                           table_width,
                           scale,
                           pointer<uint8_t>(scratch),
                           scratch_bytes};
    require(rows >= 0 && tokens >= 0 && tokens < kMostRows, "rows and tokens must not be negative");
    require((rows == 0) == (tokens == 0), "there must be tokens where there are rows");
    check_caches(step, plan, keys, values, num_blocks);
    if (rows == 0) return;
    require(stream && out && positions && write_slots, "stream, out, positions and write_slots must be given");
    require(q_start && kv_len && block_table && table_width >= 1, "q_start, kv_len and block_table must be given");
    AttentionCall described{};
    described.cache = cache;
    described.rows = rows;
    described.q_start = step.q_start;
    described.kv_len = step.kv_len;
    described.block_table = step.block_table;
    described.table_width = table_width;
    check_ragged_rows(described, tokens, num_blocks);
    check_slots(step.write_slots, tokens, num_blocks * block_size);
    if (plan.cos) check_positions(step.positions, tokens, plan.num_positions);
    require(scratch != 0 && scratch % 64 == 0 && scratch_bytes >= decoder_scratch(plan, tokens, rows, 0, 1),
            "scratch must be aligned to 64 bytes and have scratch_bytes()");
    nb::gil_scoped_release released;
    run_decoder(plan, step, kernels(), pool());
}

}  // namespace
}  // namespace penstock

void bind_decoder(nb::module_& module) {
    using namespace penstock;
    nb::class_<DecoderPlan>(module, "Decoder", "A decoder's weights and sizes, and its whole forward as one call.")
        .def("__init__", &make_plan)
        .def("add_layer", &add_layer, "The next layer; its tensors must outlive the plan.")
        .def("scratch_bytes", &scratch_bytes, "Bytes of scratch with which run() is quickest.")
        .def("run", &run, "From embeddings to hidden states after the last norm; keys and values are stored.");
}
