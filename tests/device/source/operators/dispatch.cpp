// Which operators are queued: all that the CPU has a kernel for, and all others that nobody has split into such.
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "operators/call.h"
#include "machine/device.h"

namespace sim {
namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// Those that are split into others by the CPU itself, by what it knows of its tensors.
const std::vector<c10::OperatorName> kWhole = {
    {"aten::convolution", ""}, {"aten::convolution_backward", ""}, {"aten::_convolution", ""}};

auto kernel() { return c10::KernelFunction::makeFromBoxedFunction<&call>(); }

}  // namespace

// PyTorch would split many operators in a device's place. As one, each runs the kernel that it runs on the CPU, and has
// its result to the bit.
void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  kept.push_back(dispatcher.registerFallback(kKey, kernel(), "sim"));
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU);
  names.insert(names.end(), kWhole.begin(), kWhole.end());
  for (const auto& name : names) {
    auto handle = dispatcher.findSchema(name);
    bool is_ours = handle && name.getNamespace() == "aten" && !handle->hasKernelForDispatchKey(kKey);
    if (is_ours) kept.push_back(dispatcher.registerImpl(name, kKey, kernel(), std::nullopt, nullptr, "sim"));
  }
}

}  // namespace sim
