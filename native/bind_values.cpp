// The argument types of other bindings, as Python classes.
#include "bind_values.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

void make_rows(Rows* place, uintptr_t address, int64_t stride, int element) {
    new (place) Rows{pointer<void>(address), stride, element_of(element)};
}

void make_memory(Memory* place, uintptr_t address, int64_t bytes) {
    require(bytes >= 0, "bytes must not be negative");
    new (place) Memory{address, bytes};
}

void make_weight(Weight* place, int kind, int64_t outputs, int64_t inputs, uintptr_t address) {
    check_weight(kind_of(kind), outputs, inputs);
    require(address != 0, "weight must be given");
    new (place) Weight{kind_of(kind), outputs, inputs, pointer<uint8_t>(address)};
}

void make_cache(Cache* place, uintptr_t keys, uintptr_t values, int element, bool packed, int64_t num_blocks,
                int block_size, int kv_heads, int head_dim, int value_dim) {
    value_dim == 0 ? check_heads(kv_heads, head_dim) : check_latent_heads(kv_heads, head_dim, value_dim);
    const KvCache cache{pointer<void>(keys), pointer<void>(values), kv_element_of(element), packed,
                        block_size,          kv_heads,              head_dim,
                        value_dim};
    check_cache(cache, num_blocks);
    new (place) Cache{cache, num_blocks};
}

void make_ragged_rows(RaggedRows* place, int64_t tokens, int rows, uintptr_t q_start, uintptr_t kv_len,
                      uintptr_t block_table, int64_t table_width) {
    require(rows >= 0 && tokens >= 0 && tokens < kMostRows, "rows and tokens must not be negative");
    require((rows == 0) == (tokens == 0), "there must be tokens where there are rows");
    require(rows == 0 || (q_start && kv_len && block_table && table_width >= 1),
            "q_start, kv_len and block_table must be given");
    new (place) RaggedRows{tokens,
                           rows,
                           pointer<int32_t>(q_start),
                           pointer<int32_t>(kv_len),
                           pointer<int32_t>(block_table),
                           table_width};
}

void make_heads(Heads* place, int queries, int keys, int dim, int value_dim) {
    value_dim == 0 ? check_heads(keys, dim) : check_latent_heads(keys, dim, value_dim);
    require(queries >= 1 && queries <= kMostInputs && queries % keys == 0,
            "q_heads must be a multiple of kv_heads, up to 65536");
    new (place) Heads{queries, keys, dim, value_dim};
}

void make_score_rule(ScoreRule* place, float scale, float softcap, int window, uintptr_t sinks, int ahead) {
    require(softcap >= 0.0f && softcap < __builtin_inff(), "softcap must be finite and not negative; 0 is none");
    require(window >= 0, "window must not be negative; 0 is none");
    require(ahead >= 0, "ahead must not be negative");
    new (place) ScoreRule{scale, softcap, window, pointer<float>(sinks), ahead};
}

void make_rotation(Rotation* place, uintptr_t cos, uintptr_t sin, int64_t num_positions, int rotary_dim) {
    require((cos == 0) == (sin == 0) && num_positions >= 0, "cos and sin go together");
    require(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= kMostHeadDim,
            "rotation wants an even rotary_dim of at most head_dim");
    new (place) Rotation{pointer<float>(cos), pointer<float>(sin), num_positions, rotary_dim};
}

void make_head_norms(HeadNorms* place, const Vector* q, const Vector* k, float eps) {
    const Vector none{};
    new (place) HeadNorms{q ? *q : none, k ? *k : none, eps};
}

void make_vector(Vector* place, uintptr_t address, int element) {
    element_of(element);
    new (place) Vector{address, element};
}

}  // namespace
}  // namespace penstock

void bind_values(nb::module_& module) {
    using namespace penstock;
    nb::class_<Rows>(module, "Rows", "Rows of floats, `stride` elements apart.")
        .def("__init__", &make_rows, "address"_a, "stride"_a, "element"_a);
    nb::class_<Vector>(module, "Vector", "A tensor of one row.")
        .def("__init__", &make_vector, "address"_a, "element"_a);
    nb::class_<Memory>(module, "Memory", "A piece of memory.")
        .def("__init__", &make_memory, "address"_a, "bytes"_a);
    nb::class_<Weight>(module, "Weight", "A packed weight [outputs, inputs].")
        .def("__init__", &make_weight, "kind"_a, "outputs"_a, "inputs"_a, "address"_a);
    nb::class_<Cache>(module, "Cache", "Keys and values of one layer in blocks.")
        .def("__init__", &make_cache, "keys"_a, "values"_a, "element"_a, "packed"_a, "num_blocks"_a, "block_size"_a,
             "kv_heads"_a, "head_dim"_a, "value_dim"_a = 0);
    nb::class_<RaggedRows>(module, "RaggedRows", "The rows of a step and the blocks of each.")
        .def("__init__", &make_ragged_rows, "tokens"_a, "rows"_a, "q_start"_a, "kv_len"_a, "block_table"_a,
             "table_width"_a);
    nb::class_<Heads>(module, "Heads", "Heads of queries, of keys, and their width; of values in a latent cache.")
        .def("__init__", &make_heads, "queries"_a, "keys"_a, "dim"_a, "value_dim"_a = 0);
    nb::class_<ScoreRule>(module, "ScoreRule", "What attention does with a score; 0 is no softcap, window or sinks.")
        .def("__init__", &make_score_rule, "scale"_a, "softcap"_a, "window"_a, "sinks"_a, "ahead"_a);
    nb::class_<Rotation>(module, "Rotation", "Tables of angles [num_positions][rotary_dim / 2].")
        .def("__init__", &make_rotation, "cos"_a, "sin"_a, "num_positions"_a, "rotary_dim"_a);
    nb::class_<HeadNorms>(module, "HeadNorms", "RMS norms of query and key heads.")
        .def("__init__", &make_head_norms, "q"_a.none(), "k"_a.none(), "eps"_a);
}
