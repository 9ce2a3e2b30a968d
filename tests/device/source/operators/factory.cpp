// Empty tensors.
#include <ATen/EmptyTensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "machine/memory.h"
#include "operators/tensor.h"

namespace sim {
namespace {

using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Device = std::optional<c10::Device>;

c10::Device checked_options(Layout layout, Device device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned, not of sim: device='cpu'");
  auto wanted = layout.value_or(c10::kStrided);
  TORCH_CHECK(wanted == c10::kStrided, "sim has strided tensors only: layout=torch.strided, not ", wanted);
  return device.value_or(c10::Device(kSim));
}

at::Tensor empty(
    at::IntArrayRef sizes, Dtype dtype, Layout layout, Device device, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(checked_options(layout, device, pin_memory));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, Dtype dtype, Layout layout, Device device,
    std::optional<bool> pin_memory) {
  c10::DeviceGuard guard(checked_options(layout, device, pin_memory));
  return made(sizes, strides, c10::dtype_or_default(dtype));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
}

}  // namespace sim
