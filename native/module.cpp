// penstock._native: the CPU kernels as methods of a Cpu, which take addresses and sizes.
//
// Every method checks its arguments before it writes anything, and releases the GIL while it works. The caller ensures
// that addresses stay valid and have the stated shapes; penstock.kernels is the only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"

namespace nb = nanobind;
using namespace nb::literals;

using BoundCpu = nb::class_<penstock::Cpu>;

void bind_values(nb::module_& module);
void bind_linear(nb::module_& module, BoundCpu& cpu);
void bind_attention(nb::module_& module, BoundCpu& cpu);
void bind_experts(nb::module_& module, BoundCpu& cpu);
void bind_program(nb::module_& module);
void bind_recurrent(nb::module_& module, BoundCpu& cpu);
void bind_peak(BoundCpu& cpu);

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a program may outlive the interpreter, in a frozen heap or held by a thread
    module.def("isas", &penstock::isas, "Instruction sets that this build has and this machine can run, best first.");
    bind_values(module);
    BoundCpu cpu(module, "Cpu", "The kernels of one instruction set, and threads of its own to run them on.");
    cpu.def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
            "`isa` is one of isas(), or empty for the best of them; `threads` counts the caller's.");
    cpu.def_prop_ro("isa", [](const penstock::Cpu& self) { return std::string(self.kernels().isa); },
                    "The instruction set of its kernels.");
    cpu.def_prop_ro("threads", &penstock::Cpu::threads, "Threads that its kernels run on, the caller's included.");
    bind_linear(module, cpu);
    bind_attention(module, cpu);
    bind_experts(module, cpu);
    bind_recurrent(module, cpu);
    bind_program(module);
    bind_peak(cpu);
}
