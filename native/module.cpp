// penstock._native: the CPU kernels as Python functions of addresses and sizes.
//
// Every function checks what it is told before it writes anything, and releases the GIL while it works. What the
// addresses point at is the caller's to keep alive and of the stated shape: penstock.kernels is the only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "dispatch.h"
#include "pool.h"

namespace nb = nanobind;

void bind_linear(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_program(nb::module_& module);
void bind_peak(nb::module_& module);

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a program may outlive the interpreter: in a frozen heap, or held by a thread
    module.def("isas", &penstock::isas, "Instruction sets that this build has and this machine can run, best first.");
    module.def("isa", [] { return std::string(penstock::kernels().isa); }, "The instruction set in use.");
    module.def(
        "set_isa",
        [](const std::string& name) {
            if (!penstock::use_isa(name)) throw std::invalid_argument("there are no kernels for " + name + " here");
        },
        nb::arg("name"), "Choose one of isas(). Not while kernels run.");
    module.def("threads", [] { return penstock::pool().threads(); }, "Threads that kernels run on.");
    module.def(
        "set_threads",
        [](int threads) {
            if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
            nb::gil_scoped_release released;
            penstock::set_threads(threads);
        },
        nb::arg("threads"), "Resize the pool. Not while kernels run.");
    bind_linear(module);
    bind_attention(module);
    bind_experts(module);
    bind_program(module);
    bind_peak(module);
}
