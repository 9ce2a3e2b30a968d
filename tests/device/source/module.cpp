// What Python sees. tests/device/module.py makes a device module of it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

#include "machine/count.h"
#include "machine/delay.h"
#include "machine/duration.h"
#include "machine/fault.h"
#include "machine/generator.h"
#include "machine/record.h"
#include "start.h"
#include "machine/stream.h"

namespace py = pybind11;

namespace {

void start(int devices) {
  sim::set_device_count(devices);
  sim::register_hooks();
  sim::register_operators();
  sim::register_autocast();
}

py::list stopped_record() {
  py::list entries;
  for (const auto& entry : sim::stop_record()) {
    entries.append(py::make_tuple(entry.device, entry.stream, entry.name, entry.start_seconds, entry.end_seconds));
  }
  return entries;
}

void sleep_on(int device, double seconds) {
  sim::current_queue(sim::checked(c10::DeviceIndex(device))).push({.name = "sim::sleep", .seconds = seconds});
}

py::object generator(int device) {
  const auto& one = sim::default_generator(c10::DeviceIndex(device));
  return py::reinterpret_steal<py::object>(THPGenerator_Wrap(one));
}

py::tuple counted() {
  auto now = sim::counts();
  return py::make_tuple(now.queued, now.synchronous, now.waits, now.pins);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<sim::Mark, sim::MarkPtr>(module, "Mark").def("complete", [](sim::Mark& mark) {
    mark.complete(sim::Clock::now());
  });
  module.def("hold", [](int device, int64_t stream) { return sim::hold(c10::DeviceIndex(device), stream); });
  module.def("start", &start);
  module.def("shut_down", &sim::shut_down);
  module.def("device_count", &sim::device_count);
  module.def("is_used", &sim::is_used);
  module.def("is_bad_fork", &sim::is_bad_fork);
  module.def("use", &sim::use);
  module.def("checked", [](int device) { return int(sim::checked(c10::DeviceIndex(device))); });
  module.def("generator", &generator);
  module.def("sleep", &sleep_on);
  module.def("raise_faults", &sim::raise_faults);
  module.def("described", &sim::all_described);
  module.def("set_timeout", &sim::set_timeout);
  module.def("timeout", &sim::timeout_seconds);
  module.def("set_delays", &sim::set_delays);
  module.def("set_seconds", &sim::set_seconds);
  module.def("set_rates", [](double flops, double bytes, double per_operator, double link_bytes, double per_copy) {
    sim::set_rates({flops, bytes, per_operator, link_bytes, per_copy});
  });
  module.def("most_lateness", &sim::most_lateness_seconds);
  module.def("reset_lateness", &sim::reset_lateness);
  module.def("start_record", &sim::start_record);
  module.def("stop_record", &stopped_record);
  module.def("counts", &counted);
  module.def("reset_counts", &sim::reset_counts);
}
