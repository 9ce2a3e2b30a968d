// Recurrent cells. PyTorch asks accelerators for them as one operator, and the CPU has none: here they are a few.
#include <ATen/ops/cat.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// Of sigmoid and tanh, from what they returned.
Tensor sigmoid_slope(const Tensor& result) { return result * (1 - result); }
Tensor tanh_slope(const Tensor& result) { return 1 - result * result; }

Tensor or_zeros(const OptionalTensor& grad, const Tensor& like) {
  return grad && grad->defined() ? *grad : like.new_zeros(like.sizes());
}

Tensor sum_of_rows(const Tensor& grad, bool is_wanted) { return is_wanted ? grad.sum(0) : Tensor(); }

std::tuple<Tensor, Tensor, Tensor> lstm(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
  auto next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(
    const OptionalTensor& grad_hidden, const OptionalTensor& grad_next, const Tensor& cell, const Tensor& next,
    const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &fresh = gates[2], &out = gates[3];
  auto reach = next.tanh(), hidden = or_zeros(grad_hidden, next);
  auto grad = or_zeros(grad_next, next) + hidden * out * tanh_slope(reach);
  auto grad_gates = at::cat(
      {grad * fresh * sigmoid_slope(in), grad * cell * sigmoid_slope(forget), grad * in * tanh_slope(fresh),
       hidden * reach * sigmoid_slope(out)}, 1);
  return {grad_gates, grad * forget, sum_of_rows(grad_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto inputs = with_bias(input_gates, input_bias).chunk(3, 1);
  auto hiddens = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (inputs[0] + hiddens[0]).sigmoid(), keep = (inputs[1] + hiddens[1]).sigmoid();
  auto fresh = (inputs[2] + reset * hiddens[2]).tanh();
  return {fresh + keep * (hidden - fresh), at::cat({reset, keep, fresh, hidden, hiddens[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &keep = parts[1], &fresh = parts[2], &hidden = parts[3], &hidden_new = parts[4];
  auto grad_new = grad * (1 - keep) * tanh_slope(fresh);
  auto grad_reset = grad_new * hidden_new * sigmoid_slope(reset);
  auto grad_keep = grad * (hidden - fresh) * sigmoid_slope(keep);
  auto inputs = at::cat({grad_reset, grad_keep, grad_new}, 1);
  auto hiddens = at::cat({grad_reset, grad_keep, grad_new * reset}, 1);
  return {inputs, hiddens, grad * keep, sum_of_rows(inputs, has_bias), sum_of_rows(hiddens, has_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", lstm);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
  library.impl("_thnn_fused_gru_cell", gru);
  library.impl("_thnn_fused_gru_cell_backward", gru_backward);
}

}  // namespace sim
