// Floating-point operations of products, convolutions and attention, by the shapes of a call.
#include "operators/operator.h"

#include "operators/tensor.h"

namespace sim {
namespace {

using Inputs = c10::ArrayRef<c10::IValue>;

double last(const at::Tensor& tensor, int64_t back) { return double(tensor.size(tensor.dim() - back)); }

// Of two matrices, or two batches of them.
double product(const at::Tensor& left, const at::Tensor& right) {
  return 2 * double(left.numel()) * (right.dim() > 1 ? last(right, 1) : 1);
}

// ``positions`` are those of the output, or for a transposed convolution, of the input.
double convolution(const at::Tensor& positions, const at::Tensor& weight) {
  auto channels = double(positions.size(1));
  return 2 * double(positions.numel()) / channels * double(weight.numel());
}

double convolution_forward(Inputs in) {
  const auto &input = in[0].toTensor(), &weight = in[1].toTensor();
  if (in[6].toBool()) return convolution(input, weight);  // transposed
  auto stride = in[3].toIntVector(), padding = in[4].toIntVector(), dilation = in[5].toIntVector();
  double positions = double(input.size(0));
  for (int64_t place = 0; place < input.dim() - 2; place++) {
    auto at = [&](const std::vector<int64_t>& values) { return values[values.size() == 1 ? 0 : place]; };
    auto reach = at(dilation) * (weight.size(place + 2) - 1) + 1;
    positions *= double((input.size(place + 2) + 2 * at(padding) - reach) / at(stride) + 1);
  }
  return 2 * positions * double(weight.numel());
}

double convolution_backward(Inputs in) {
  const auto &grad = in[0].toTensor(), &input = in[1].toTensor(), &weight = in[2].toTensor();
  auto once = convolution(in[7].toBool() ? input : grad, weight);
  auto mask = in[10].toBoolList();
  return once * (double(mask.get(0)) + double(mask.get(1)));
}

double attention(const at::Tensor& query, const at::Tensor& key, int products) {
  return products * 2 * double(query.numel()) * last(key, 2);
}

}  // namespace

double flops_of(const Operator& op, Inputs in) {
  auto name = op.name.back() == '_' ? op.name.substr(0, op.name.size() - 1) : op.name;  // in place: the same
  auto tensor = [&](size_t place) -> const at::Tensor& { return in[place].toTensor(); };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::mv" || name == "aten::dot") {
    return product(tensor(0), tensor(1));
  }
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmv") return product(tensor(1), tensor(2));
  if (name == "aten::convolution") return convolution_forward(in);
  if (name == "aten::convolution_backward") return convolution_backward(in);
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") return attention(tensor(0), tensor(1), 2);
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") return attention(tensor(1), tensor(2), 5);
  return 0;
}

}  // namespace sim
