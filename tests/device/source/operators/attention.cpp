// Attention chooses its kernel as on the CPU, whose kernels run it.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <torch/library.h>

#include "operators/tensor.h"

namespace at::native {
namespace {

int64_t choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto seen = [](const Tensor& tensor) { return sim::on_cpu(tensor).set_requires_grad(tensor.requires_grad()); };
  auto mask_seen = mask && mask->defined() ? std::optional(seen(*mask)) : mask;
  return at::_fused_sdp_choice(seen(query), seen(key), seen(value), mask_seen, dropout_p, is_causal, scale, enable_gqa);
}

}  // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choice)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("_fused_sdp_choice", choice); }

}  // namespace at::native
