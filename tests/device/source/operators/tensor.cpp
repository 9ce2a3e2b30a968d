#include "operators/tensor.h"

#include <ATen/EmptyTensor.h>

#include "machine/memory.h"

namespace sim {
namespace {

// What an operator reads of a tensor beside its bytes.
at::Tensor described_as(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto fresh = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = fresh.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) fresh._set_conj(true);
  if (tensor.is_neg()) fresh._set_neg(true);
  return fresh;
}

}  // namespace

c10::Storage OnCpu::storage(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  for (auto& [known, alias] : storages_) {
    if (known == impl) return alias;
  }
  c10::DataPtr bytes(bytes_at(storage.data()), c10::kCPU);
  c10::Storage alias(c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(bytes), nullptr, false);
  storages_.emplace_back(impl, alias);
  return alias;
}

at::Tensor OnCpu::operator()(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  for (auto& [known, alias] : tensors_) {
    if (known == impl) return alias;
  }
  auto alias = described_as(tensor, storage(tensor.storage()), c10::DispatchKey::CPU);
  tensors_.emplace_back(impl, alias);
  return alias;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  c10::DataPtr none(nullptr, c10::kMeta);
  auto* allocator = c10::GetAllocator(c10::kMeta);  // for an output that gets another size
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(), std::move(none), allocator, true);
  return described_as(tensor, std::move(storage), c10::DispatchKey::Meta);
}

at::Tensor made(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, allocator(), keys, dtype);
}

void each_tensor(const c10::IValue& argument, const std::function<void(const at::Tensor&)>& visit) {
  auto if_defined = [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  if (argument.isTensor()) {
    if_defined(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorList()) if_defined(tensor);
  } else if (argument.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorList()) {
      if (tensor) if_defined(*tensor);
    }
  }
}

c10::IValue replaced(
    const c10::IValue& argument, const std::function<at::Tensor(const at::Tensor&)>& replace, c10::Device device) {
  auto if_defined = [&](const at::Tensor& tensor) { return tensor.defined() ? replace(tensor) : tensor; };
  if (argument.isTensor()) return if_defined(argument.toTensor());
  if (argument.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : argument.toTensorList()) list.push_back(if_defined(tensor));
    return list;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(if_defined(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (argument.isDevice() && argument.toDevice().type() == kSim) return device;
  return argument;
}

}  // namespace sim
