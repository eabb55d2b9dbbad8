// Attention, the row-wise kernels and the sampler as Python functions.
//
// Addresses of 0 are absent tensors. Strides count elements from one row to the next; an element is 0 (float32) or 1
// (bfloat16). Everything that a kernel would trust, block ids and slots too, is checked before it runs.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "attention_call.h"
#include "checks.h"
#include "dispatch.h"
#include "pool.h"
#include "rows_call.h"

namespace nb = nanobind;

namespace penstock {
namespace {

constexpr int64_t kMostWidth = int64_t{1} << 30;

ConstRows read(uintptr_t address, int64_t stride, int element) {
    return {pointer<void>(address), stride, element_of(element)};
}
Rows written(uintptr_t address, int64_t stride, int element) {
    return {pointer<void>(address), stride, element_of(element)};
}

template <class AnyRows>
bool fits(const AnyRows& rows, int64_t count, int64_t width) {
    return rows.data != nullptr && (count <= 1 || rows.stride >= width);
}

// ---- attention ------------------------------------------------------------------------------------------------------

void attention(uintptr_t q, int64_t q_stride, int q_element, uintptr_t out, int64_t out_stride, int out_element,
               int64_t tokens, int q_heads, uintptr_t keys, uintptr_t values, int kv_element, bool packed,
               int64_t num_blocks, int block_size, int kv_heads, int head_dim, int rows, uintptr_t q_start,
               uintptr_t kv_len, uintptr_t block_table, int64_t table_width, float scale, uintptr_t scratch,
               int64_t scratch_bytes, float softcap, int window, uintptr_t sinks) {
    const KvCache cache{pointer<void>(keys), pointer<void>(values), kv_element_of(kv_element), packed,
                        block_size,          kv_heads,              head_dim};
    const AttentionCall call{read(q, q_stride, q_element),
                             written(out, out_stride, out_element),
                             cache,
                             q_heads,
                             rows,
                             pointer<int32_t>(q_start),
                             pointer<int32_t>(kv_len),
                             pointer<int32_t>(block_table),
                             table_width,
                             scale,
                             pointer<uint8_t>(scratch),
                             size_t(scratch_bytes),
                             softcap,
                             window,
                             pointer<float>(sinks)};
    check_heads(kv_heads, head_dim);
    check_cache(cache, num_blocks);
    require(rows >= 0 && tokens >= 0 && tokens < kMostRows, "rows and tokens must not be negative");
    require(q_heads >= 1 && q_heads % kv_heads == 0, "q_heads must be a multiple of kv_heads");
    require(softcap >= 0.0f && softcap < __builtin_inff(), "softcap must be finite and not negative; 0 is none");
    require(window >= 0, "window must not be negative; 0 is none");
    if (rows == 0) return;
    require(fits(call.q, tokens, int64_t(q_heads) * head_dim), "q must be given, its rows apart");
    require(fits(call.out, tokens, int64_t(q_heads) * head_dim), "out must be given, its rows apart");
    require(q_start && kv_len && block_table && table_width >= 1, "q_start, kv_len and block_table must be given");
    check_ragged_rows(call, tokens, num_blocks);
    require(scratch != 0 && scratch % 64 == 0 && scratch_bytes >= int64_t(attention_scratch(rows)),
            "scratch must be aligned to 64 bytes and have attention_scratch_bytes()");
    nb::gil_scoped_release released;
    kernels().attention(call, pool());
}

// Bytes of scratch with which threads share long contexts; with fewer the result is the same.
int64_t attention_scratch_bytes(int rows, int64_t tokens, int q_heads, int kv_heads, int head_dim, int longest,
                                int window) {
    require(rows >= 0 && tokens >= rows && q_heads >= 1 && longest >= 0 && window >= 0, "sizes must not be negative");
    check_heads(kv_heads, head_dim);
    return int64_t(
        attention_scratch_wanted(rows, tokens, q_heads, kv_heads, head_dim, longest, pool().threads(), window));
}

// ---- rotation and storing -------------------------------------------------------------------------------------------

void rotate_and_store(int64_t tokens, int q_heads, int kv_heads, int head_dim, uintptr_t q, int64_t q_stride,
                      int q_element, uintptr_t q_out, int64_t q_out_stride, int q_out_element, uintptr_t k,
                      int64_t k_stride, int k_element, uintptr_t v, int64_t v_stride, int v_element, uintptr_t keys,
                      uintptr_t values, int kv_element, bool packed, int64_t num_blocks, int block_size,
                      uintptr_t write_slots, uintptr_t positions, int64_t num_positions, uintptr_t cos,
                      uintptr_t sin, uintptr_t q_norm, int q_norm_element, uintptr_t k_norm, int k_norm_element,
                      float eps, int rotary_dim) {
    const KvCache cache{pointer<void>(keys), pointer<void>(values), kv_element_of(kv_element), packed,
                        block_size,          kv_heads,              head_dim};
    const RotaryCall call{tokens,
                          read(q, q_stride, q_element),
                          read(k, k_stride, k_element),
                          read(v, v_stride, v_element),
                          written(q_out, q_out_stride, q_out_element),
                          cache,
                          q_heads,
                          pointer<int64_t>(write_slots),
                          pointer<int64_t>(positions),
                          pointer<float>(cos),
                          pointer<float>(sin),
                          read(q_norm, 0, q_norm_element),
                          read(k_norm, 0, k_norm_element),
                          eps,
                          rotary_dim};
    require(tokens >= 0 && tokens < kMostRows, "tokens must be between 0 and 2^31 - 1");
    check_heads(kv_heads, head_dim);
    require((cos == 0) == (sin == 0), "cos and sin go together");
    require(rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0,
            "rotary_dim must be even and at most head_dim; 0 is head_dim");
    require(cos == 0 || rotary_dim > 0 || head_dim % 2 == 0, "a head that is rotated whole must have an even head_dim");
    if (tokens == 0) return;
    if (q != 0) {
        require(q_heads >= 1 && fits(call.q, tokens, int64_t(q_heads) * head_dim), "q must have its rows apart");
        require(fits(call.q_out, tokens, int64_t(q_heads) * head_dim), "q_out must be given, its rows apart");
    }
    require((k == 0) == (v == 0), "k and v go together");
    if (k != 0) {
        require(fits(call.k, tokens, int64_t(kv_heads) * head_dim), "k must have its rows apart");
        require(fits(call.v, tokens, int64_t(kv_heads) * head_dim), "v must have its rows apart");
        check_cache(cache, num_blocks);
        require(write_slots != 0, "write_slots must be given");
        check_slots(call.write_slots, tokens, num_blocks * block_size);
    }
    if (cos != 0 && positions == 0) require(num_positions >= tokens, "cos and sin must have a row for each token");
    if (cos != 0 && positions != 0) check_positions(call.positions, tokens, num_positions);
    nb::gil_scoped_release released;
    kernels().rotate_and_store(call, pool());
}

// ---- rows -----------------------------------------------------------------------------------------------------------

template <void (*KernelTable::*kernel)(const NormCall&, Pool&)>
void norm(int64_t rows, int64_t width, uintptr_t stream, int64_t stream_stride, int stream_element, uintptr_t residual,
          int64_t residual_stride, int residual_element, uintptr_t weight, int weight_element, uintptr_t bias,
          int bias_element, float eps, uintptr_t out, int64_t out_stride, int out_element) {
    const NormCall call{rows,
                        width,
                        written(stream, stream_stride, stream_element),
                        read(residual, residual_stride, residual_element),
                        read(weight, 0, weight_element),
                        read(bias, 0, bias_element),
                        eps,
                        written(out, out_stride, out_element)};
    require(rows >= 0 && rows < kMostRows, "rows must be between 0 and 2^31 - 1");
    require(width >= 1 && width < kMostWidth, "width must be between 1 and 2^30");
    if (rows == 0) return;
    require(fits(call.stream, rows, width), "stream must be given, its rows apart");
    require(fits(call.out, rows, width), "out must be given, its rows apart");
    require(residual == 0 || fits(call.residual, rows, width), "residual must have its rows apart");
    require(residual == 0 || (out != stream && out != residual), "with a residual, out must be memory of its own");
    require(weight != 0, "weight must be given");
    nb::gil_scoped_release released;
    (kernels().*kernel)(call, pool());
}

template <void (*KernelTable::*kernel)(const ActivationCall&, Pool&), int halves>
void activation(int64_t rows, int64_t width, uintptr_t x, int64_t x_stride, int x_element, uintptr_t out,
                int64_t out_stride, int out_element) {
    const ActivationCall call{rows, width, read(x, x_stride, x_element), written(out, out_stride, out_element)};
    require(rows >= 0 && rows < kMostRows, "rows must be between 0 and 2^31 - 1");
    require(width >= 1 && width < kMostWidth, "width must be between 1 and 2^30");
    if (rows == 0) return;
    require(fits(call.x, rows, halves * width), "x must be given, its rows apart");
    require(fits(call.out, rows, width), "out must be given, its rows apart");
    nb::gil_scoped_release released;
    (kernels().*kernel)(call, pool());
}

void sample(int64_t rows, int64_t vocabulary, uintptr_t logits, int64_t stride, uintptr_t temperature, uintptr_t top_k,
            uintptr_t top_p, uintptr_t min_p, uintptr_t uniform, uintptr_t wants_logprob, uintptr_t tokens,
            uintptr_t logprobs, uintptr_t failed, uintptr_t scratch) {
    const SampleCall call{rows,
                          vocabulary,
                          pointer<float>(logits),
                          stride,
                          pointer<float>(temperature),
                          pointer<int32_t>(top_k),
                          pointer<double>(top_p),
                          pointer<float>(min_p),
                          pointer<double>(uniform),
                          pointer<uint8_t>(wants_logprob),
                          pointer<int64_t>(tokens),
                          pointer<float>(logprobs),
                          pointer<uint8_t>(failed),
                          pointer<float>(scratch)};
    require(rows >= 0 && rows < 1 << 15, "rows must be between 0 and 32767");
    require(vocabulary >= 1 && vocabulary < kMostRows, "vocabulary must be between 1 and 2^31 - 1");
    if (rows == 0) return;
    require(logits != 0 && (rows == 1 || stride >= vocabulary), "logits must be given, their rows apart");
    require(temperature && top_k && top_p && min_p && uniform && wants_logprob, "every column must be given");
    require(tokens && logprobs && failed, "tokens, logprobs and failed must be given");
    for (int64_t row = 0; row < rows; row++) {
        require(call.temperature[row] >= 0, "temperature must not be negative");
        if (call.temperature[row] == 0) continue;
        require(scratch != 0, "rows that are drawn at random want scratch");
        require(call.top_k[row] >= 0, "top_k must not be negative");
        require(call.top_p[row] > 0 && call.top_p[row] <= 1, "top_p must be above 0 and at most 1");
        require(call.min_p[row] >= 0 && call.min_p[row] <= 1, "min_p must be between 0 and 1");
        require(call.uniform[row] >= 0 && call.uniform[row] < 1, "uniform must be in [0, 1)");
    }
    nb::gil_scoped_release released;
    kernels().sample(call, pool());
}

}  // namespace
}  // namespace penstock

void bind_attention(nb::module_& module) {
    using namespace penstock;
    module.def("attention", &attention, "Attention of ragged rows over a cache in blocks.");
    module.def("attention_scratch_bytes", &attention_scratch_bytes, "Bytes of scratch for attention().");
    module.def("rotate_and_store", &rotate_and_store, "Norm and rotate queries and keys; store keys and values.");
    module.def("rms_norm", &norm<&KernelTable::rms_norm>, "stream += residual; out = RMS norm of stream.");
    module.def("layer_norm", &norm<&KernelTable::layer_norm>, "stream += residual; out = layer norm of stream.");
    module.def("silu_and_mul", &activation<&KernelTable::silu_and_mul, 2>, "silu(gate) * up of rows [gate | up].");
    module.def("gelu_new_and_mul", &activation<&KernelTable::gelu_new_and_mul, 2>, "gelu_new(gate) * up.");
    module.def("gelu_new", &activation<&KernelTable::gelu_new, 1>, "GELU by tanh.");
    module.def("gelu", &activation<&KernelTable::gelu, 1>, "GELU by the normal distribution.");
    module.def("relu", &activation<&KernelTable::relu, 1>, "max(x, 0).");
    module.def("sample", &sample, "One token a row of logits.");
}
