// Dropout, which draws random numbers without an argument for a generator.
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "machine/count.h"
#include "machine/duration.h"
#include "machine/fault.h"
#include "machine/generator.h"
#include "machine/memory.h"
#include "operators/tensor.h"

namespace sim {
namespace {

// As the CPU's kernel, which draws from the CPU's default generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  raise_faults();
  auto device = input.device().index();
  c10::DeviceGuard guard(input.device());
  auto like = [&](c10::ScalarType dtype) { return at::empty_like(input, input.options().dtype(dtype)); };
  auto output = like(input.scalar_type()), mask = like(at::kBool);
  bool draws = p > 0 && train.value_or(true);
  auto generator = draws ? std::optional(drawn_generator(std::nullopt, device)) : std::nullopt;
  OnCpu on_cpu;
  auto work = [=, in = on_cpu(input), out = on_cpu(output), kept = on_cpu(mask)] {
    if (generator) {
      kept.bernoulli_(1 - p, generator);
    } else {
      kept.fill_(true);
    }
    out.copy_(in.mul(kept).mul_(!generator || p == 1 ? 1 : 1 / (1 - p)));
  };
  auto bytes = double(2 * input.nbytes() + mask.nbytes());
  auto& stream = current_queue(device);
  const char* name = "aten::native_dropout";
  auto number = stream.push({.name = name, .work = work, .seconds = operator_seconds(name, 0, bytes)});
  for (const auto& written : {output, mask}) note_writer(written.storage().data_ptr(), name, stream, number);
  count_queued();
  return {output, mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("native_dropout", native_dropout); }

}  // namespace sim
