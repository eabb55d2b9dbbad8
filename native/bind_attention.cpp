// Attention, the row-wise kernels and the sampler as methods of a Cpu.
//
// Everything that kernels rely on, block ids and slots too, is checked before they run.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "attention_call.h"
#include "bind_values.h"
#include "checks.h"
#include "cpu.h"
#include "rows_call.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

constexpr int64_t kMostWidth = int64_t{1} << 30;

// ---- attention ------------------------------------------------------------------------------------------------------

void attention(const Cpu& cpu, const Rows& q, const Rows& out, int q_heads, const Cache& held, const RaggedRows& rows,
               const ScoreRule& rule, const Memory& scratch) {
    const KvCache& cache = held.cache;
    const AttentionCall call{reading(&q),
                             out,
                             cache,
                             q_heads,
                             rows.rows,
                             rows.q_start,
                             rows.kv_len,
                             rows.block_table,
                             rows.table_width,
                             rule.scale,
                             scratch.data(),
                             size_t(scratch.bytes),
                             rule.softcap,
                             rule.window,
                             rule.sinks,
                             rule.ahead};
    require(rule.ahead == 0 || !cache.latent(), "a latent cache is not read ahead");
    require(q_heads >= 1 && q_heads % cache.kv_heads == 0, "q_heads must be a multiple of kv_heads");
    if (rows.rows == 0) return;
    check_rows(call.q, rows.tokens, int64_t(q_heads) * cache.head_dim, "q must be given, its rows apart");
    const int64_t width = cache.latent() ? cache.value_dim : cache.head_dim;
    check_rows(call.out, rows.tokens, q_heads * width, "out must be given, its rows apart");
    check_ragged_rows(call, rows.tokens, held.num_blocks);
    require(scratch.holds(int64_t(attention_scratch(rows.rows))),
            "scratch must be aligned to 64 bytes and have attention_scratch_bytes()");
    nb::gil_scoped_release released;
    cpu.kernels().attention(call, cpu.pool());
}

// Bytes of scratch that let threads share long contexts; the result is the same with fewer. A token sees at most
// `reach` positions; 0: all.
int64_t attention_scratch_bytes(const Cpu& cpu, int rows, int64_t tokens, const Heads& heads, int longest, int reach) {
    require(rows >= 0 && tokens >= rows && longest >= 0 && reach >= 0, "sizes must not be negative");
    if (heads.value_dim > 0) return int64_t(attention_scratch(rows));
    return int64_t(attention_scratch_wanted(rows, tokens, heads.queries, heads.keys, heads.dim, longest, cpu.threads(),
                                            reach));
}

// ---- rotation and storing -------------------------------------------------------------------------------------------

// Queries [tokens][heads][head_dim], and their destination.
struct Queries {
    Rows x, out;
    int32_t heads;
};

void make_queries(Queries* place, const Rows& x, const Rows& out, int heads) { new (place) Queries{x, out, heads}; }

// Keys and values [tokens][kv_heads][head_dim], and their destination.
struct KeysAndValues {
    Rows k, v;
    Cache cache;
    const int64_t* write_slots;
};

void make_keys_and_values(KeysAndValues* place, const Rows& k, const Rows& v, const Cache& cache, uintptr_t slots) {
    new (place) KeysAndValues{k, v, cache, pointer<int64_t>(slots)};
}

// Without positions, token t has row t of the tables.
void rotate_and_store(const Cpu& cpu, int64_t tokens, int head_dim, const Queries* queries,
                      const KeysAndValues* stored, const Rotation* rotation, uintptr_t positions,
                      const HeadNorms* norms) {
    const Rotation angles = rotation ? *rotation : Rotation{};
    const HeadNorms normed = norms ? *norms : HeadNorms{};
    RotaryCall call{};
    call.tokens = tokens;
    call.cache.kv_heads = 1;
    call.cache.head_dim = head_dim;
    call.positions = pointer<int64_t>(positions);
    call.cos = angles.cos;
    call.sin = angles.sin;
    call.q_norm = normed.q.rows();
    call.k_norm = normed.k.rows();
    call.eps = normed.eps;
    call.rotary_dim = angles.rotary_dim;
    require(tokens >= 0 && tokens < kMostRows, "tokens must be between 0 and 2^31 - 1");
    const bool latent = stored && stored->cache.cache.latent();
    latent ? check_latent_heads(1, head_dim, stored->cache.cache.value_dim) : check_heads(1, head_dim);
    require(angles.rotary_dim <= head_dim, "rotary_dim must be even and at most head_dim");
    if (tokens == 0) return;
    if (queries) {
        call.q = reading(&queries->x);
        call.q_out = queries->out;
        call.q_heads = queries->heads;
        const int64_t width = int64_t(queries->heads) * head_dim;
        require(queries->heads >= 1, "q must have its rows apart");
        check_rows(call.q, tokens, width, "q must have its rows apart");
        check_rows(call.q_out, tokens, width, "q_out must be given, its rows apart");
    }
    if (stored) {
        call.k = reading(&stored->k);
        call.v = reading(&stored->v);
        call.cache = stored->cache.cache;
        call.write_slots = stored->write_slots;
        require(call.cache.head_dim == head_dim, "the cache must have heads of head_dim");
        const int64_t width = int64_t(call.cache.kv_heads) * head_dim;
        check_rows(call.k, tokens, width, "k must have its rows apart");
        if (!latent) check_rows(call.v, tokens, width, "v must have its rows apart");
        require(call.write_slots != nullptr, "write_slots must be given");
        check_slots(call.write_slots, tokens, stored->cache.num_blocks * call.cache.block_size);
    }
    if (rotation && !positions) require(angles.num_positions >= tokens, "cos and sin must have a row for each token");
    if (rotation && positions) check_positions(call.positions, tokens, angles.num_positions);
    nb::gil_scoped_release released;
    cpu.kernels().rotate_and_store(call, cpu.pool());
}

// ---- rows -----------------------------------------------------------------------------------------------------------

template <void (*KernelTable::*kernel)(const NormCall&, Pool&)>
void norm(const Cpu& cpu, int64_t rows, int64_t width, const Rows& stream, const Rows* residual, const Vector& weight,
          const Vector* bias, float eps, const Rows& out) {
    const NormCall call{rows, width, stream, reading(residual), weight.rows(), one_row(bias), eps, out};
    require(rows >= 0 && rows < kMostRows, "rows must be between 0 and 2^31 - 1");
    require(width >= 1 && width < kMostWidth, "width must be between 1 and 2^30");
    if (rows == 0) return;
    check_rows(stream, rows, width, "stream must be given, its rows apart");
    check_rows(out, rows, width, "out must be given, its rows apart");
    check_optional_rows(call.residual, rows, width, "residual must have its rows apart");
    require(residual == nullptr || (out.data != stream.data && out.data != residual->data),
            "with a residual, out must be memory of its own");
    require(weight.address != 0, "weight must be given");
    nb::gil_scoped_release released;
    (cpu.kernels().*kernel)(call, cpu.pool());
}

template <void (*KernelTable::*kernel)(const ActivationCall&, Pool&), int halves>
void activation(const Cpu& cpu, int64_t rows, int64_t width, const Rows& x, const Rows& out) {
    const ActivationCall call{rows, width, reading(&x), out};
    require(rows >= 0 && rows < kMostRows, "rows must be between 0 and 2^31 - 1");
    require(width >= 1 && width < kMostWidth, "width must be between 1 and 2^30");
    if (rows == 0) return;
    check_rows(x, rows, halves * width, "x must be given, its rows apart");
    check_rows(out, rows, width, "out must be given, its rows apart");
    nb::gil_scoped_release released;
    (cpu.kernels().*kernel)(call, cpu.pool());
}

// ---- sampling -------------------------------------------------------------------------------------------------------

// The sampling parameters of rows: a column [rows] for each parameter.
struct SamplingColumns {
    const float* temperature;
    const int32_t* top_k;
    const double* top_p;
    const float* min_p;
    const uint8_t* wants_logprob;
};

void make_sampling_columns(SamplingColumns* place, uintptr_t temperature, uintptr_t top_k, uintptr_t top_p,
                           uintptr_t min_p, uintptr_t wants_logprob) {
    new (place) SamplingColumns{pointer<float>(temperature), pointer<int32_t>(top_k), pointer<double>(top_p),
                                pointer<float>(min_p), pointer<uint8_t>(wants_logprob)};
}

// Where the results go, [rows] each.
struct SampledColumns {
    int64_t* tokens;
    float* logprobs;
    uint8_t* failed;
    double* normalizers;
};

void make_sampled_columns(SampledColumns* place, uintptr_t tokens, uintptr_t logprobs, uintptr_t failed,
                          uintptr_t normalizers) {
    new (place) SampledColumns{pointer<int64_t>(tokens), pointer<float>(logprobs), pointer<uint8_t>(failed),
                               pointer<double>(normalizers)};
}

void check_sampling(const SampleCall& call) {
    for (int64_t row = 0; row < call.rows; row++) {
        require(call.temperature[row] >= 0, "temperature must not be negative");
        if (call.temperature[row] == 0) continue;
        require(call.scratch != nullptr, "rows that are drawn at random want scratch");
        require(call.top_k[row] >= 0, "top_k must not be negative");
        require(call.top_p[row] > 0 && call.top_p[row] <= 1, "top_p must be above 0 and at most 1");
        require(call.min_p[row] >= 0 && call.min_p[row] <= 1, "min_p must be between 0 and 1");
        require(call.uniform[row] >= 0 && call.uniform[row] < 1, "uniform must be in [0, 1)");
    }
}

void rule_out(const Cpu& cpu, int64_t width, uintptr_t x, const nb::bytes& allowed, uintptr_t out) {
    require(width >= 0 && width < kMostRows, "width must be between 0 and 2^31 - 1");
    require(x != 0 && out != 0, "x and out must be given");
    require(int64_t(allowed.size()) >= divide_up(width, 8), "allowed must have a bit for each number");
    cpu.kernels().rule_out({width, pointer<float>(x), static_cast<const uint8_t*>(allowed.data()), pointer<float>(out)});
}

// `scratch` is [rows][vocabulary], or 0 if all rows are greedy.
void sample(const Cpu& cpu, int64_t rows, int64_t vocabulary, const Rows& logits, const SamplingColumns& columns,
            uintptr_t uniform, const SampledColumns& out, uintptr_t scratch) {
    const SampleCall call{rows,
                          vocabulary,
                          static_cast<const float*>(logits.data),
                          logits.stride,
                          columns.temperature,
                          columns.top_k,
                          columns.top_p,
                          columns.min_p,
                          pointer<double>(uniform),
                          columns.wants_logprob,
                          out.tokens,
                          out.logprobs,
                          out.failed,
                          out.normalizers,
                          pointer<float>(scratch)};
    require(rows >= 0 && rows < 1 << 15, "rows must be between 0 and 32767");
    require(vocabulary >= 1 && vocabulary < kMostRows, "vocabulary must be between 1 and 2^31 - 1");
    if (rows == 0) return;
    require(logits.element == Element::f32, "logits must be float32");
    check_rows(logits, rows, vocabulary, "logits must be given, their rows apart");
    require(call.temperature && call.top_k && call.top_p && call.min_p && uniform && call.wants_logprob,
            "every column must be given");
    require(call.tokens && call.logprobs && call.failed && call.normalizers,
            "tokens, logprobs, failed and normalizers must be given");
    check_sampling(call);
    nb::gil_scoped_release released;
    cpu.kernels().sample(call, cpu.pool());
}

void bind_attention_values(nb::module_& module) {
    nb::class_<Queries>(module, "Queries", "Queries and where they go once they are rotated.")
        .def("__init__", &make_queries, "x"_a, "out"_a, "heads"_a);
    nb::class_<KeysAndValues>(module, "KeysAndValues", "Keys, values and the slots of a cache that they go to.")
        .def("__init__", &make_keys_and_values, "k"_a, "v"_a, "cache"_a, "write_slots"_a);
    nb::class_<SamplingColumns>(module, "SamplingColumns", "How each row chooses.")
        .def("__init__", &make_sampling_columns, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "wants_logprob"_a);
    nb::class_<SampledColumns>(module, "SampledColumns", "Where what came of the rows goes.")
        .def("__init__", &make_sampled_columns, "tokens"_a, "logprobs"_a, "failed"_a, "normalizers"_a);
}

}  // namespace
}  // namespace penstock

void bind_attention(nb::module_& module, nb::class_<penstock::Cpu>& cpu) {
    using namespace penstock;
    bind_attention_values(module);
    cpu.def("attention", &attention, "q"_a, "out"_a, "q_heads"_a, "cache"_a, "rows"_a, "rule"_a, "scratch"_a,
            "Attention of ragged rows over a cache in blocks.");
    cpu.def("attention_scratch_bytes", &attention_scratch_bytes, "rows"_a, "tokens"_a, "heads"_a, "longest"_a,
            "reach"_a, "Bytes of scratch for attention().");
    cpu.def("rotate_and_store", &rotate_and_store, "tokens"_a, "head_dim"_a, "queries"_a.none(), "stored"_a.none(),
            "rotation"_a.none(), "positions"_a, "norms"_a.none(),
            "Norm and rotate queries and keys; store keys and values.");
    const auto norms = [&cpu](const char* name, auto kernel, const char* doc) {
        cpu.def(name, kernel, "rows"_a, "width"_a, "stream"_a, "residual"_a.none(), "weight"_a, "bias"_a.none(),
                "eps"_a, "out"_a, doc);
    };
    norms("rms_norm", &norm<&KernelTable::rms_norm>, "stream += residual; out = RMS norm of stream.");
    norms("layer_norm", &norm<&KernelTable::layer_norm>, "stream += residual; out = layer norm of stream.");
    const auto activations = [&cpu](const char* name, auto kernel, const char* doc) {
        cpu.def(name, kernel, "rows"_a, "width"_a, "x"_a, "out"_a, doc);
    };
    activations("silu_and_mul", &activation<&KernelTable::silu_and_mul, 2>, "silu(gate) * up of rows [gate | up].");
    activations("gelu_new_and_mul", &activation<&KernelTable::gelu_new_and_mul, 2>, "gelu_new(gate) * up.");
    activations("gelu_and_mul", &activation<&KernelTable::gelu_and_mul, 2>, "gelu(gate) * up.");
    activations("clamped_swiglu_and_mul", &activation<&KernelTable::clamped_swiglu_and_mul, 2>,
                "SwiGLU of gpt-oss, clamped.");
    activations("gelu_new", &activation<&KernelTable::gelu_new, 1>, "GELU by tanh.");
    activations("gelu", &activation<&KernelTable::gelu, 1>, "GELU by the normal distribution.");
    activations("relu", &activation<&KernelTable::relu, 1>, "max(x, 0).");
    cpu.def("rule_out", &rule_out, "width"_a, "x"_a, "allowed"_a, "out"_a,
            "A row of float32 with -inf where a bit of `allowed` is not set.");
    cpu.def("sample", &sample, "rows"_a, "vocabulary"_a, "logits"_a, "columns"_a, "uniform"_a, "out"_a, "scratch"_a,
            "One token a row of logits.");
}
