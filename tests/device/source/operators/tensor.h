// Tensors of a device as its streams see them: tensors of the CPU on the same bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <utility>
#include <vector>

#include "machine/device.h"

namespace sim {

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The tensors of one operator. They hold no memory alive, as a kernel does not. Tensors that share a storage share one
// here too, as operators look for overlap.
class OnCpu {
 public:
  at::Tensor operator()(const at::Tensor& tensor);

 private:
  c10::Storage storage(const c10::Storage& storage);

  std::vector<std::pair<c10::TensorImpl*, at::Tensor>> tensors_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
};

inline at::Tensor on_cpu(const at::Tensor& tensor) { return OnCpu()(tensor); }

// The same sizes, strides and dtype on the device meta.
at::Tensor on_meta(const at::Tensor& tensor);

// An empty tensor on the current device.
at::Tensor made(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

// Calls visit on each tensor of an argument; undefined ones are left out.
void each_tensor(const c10::IValue& argument, const std::function<void(const at::Tensor&)>& visit);

// The argument with each tensor, and each of our devices, replaced.
c10::IValue replaced(
    const c10::IValue& argument, const std::function<at::Tensor(const at::Tensor&)>& replace, c10::Device device);

}  // namespace sim
