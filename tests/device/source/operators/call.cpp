#include "operators/call.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>

#include "machine/count.h"
#include "machine/duration.h"
#include "machine/fault.h"
#include "machine/generator.h"
#include "machine/memory.h"
#include "operators/operator.h"
#include "operators/resize.h"
#include "operators/shape.h"

namespace sim {
namespace {

using Arguments = std::vector<c10::IValue>;

// The device that a call works on, and that all its tensors must be on; tensors of one element may be on the CPU, and
// so may the indices of an indexing operator, as for CUDA.
c10::DeviceIndex device_of_call(const Operator& op, const Arguments& arguments) {
  c10::DeviceIndex device = -1;
  auto look = [&](c10::Device other) {
    if (device < 0) device = other.has_index() ? other.index() : current_device();
    TORCH_CHECK(
        !other.has_index() || other.index() == device, "Expected all tensors to be on the same device, but ", op.name,
        " got some on sim:", int(device), " and some on sim:", int(other.index()), "! Move them: tensor.to('sim:",
        int(device), "')");
  };
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) look(tensor.device());
    });
    if (argument.isDevice() && argument.toDevice().type() == kSim) look(argument.toDevice());
  }
  return device < 0 ? current_device() : device;
}

void check_places(const Operator& op, const Arguments& arguments, c10::DeviceIndex device) {
  for (const auto& argument : arguments) {
    if (argument.isOptionalTensorList()) continue;
    each_tensor(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          is_ours(tensor) || tensor.dim() == 0, "Expected all tensors to be on the same device, but ", op.name,
          " got some on sim:", int(device), " and one of shape ", tensor.sizes(), " on ", tensor.device(),
          "! Move it: tensor.to('sim:", int(device), "')");
    });
  }
}

void check_kernel(const c10::OperatorHandle& handle, const Operator& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), op.name, " has no kernel for the CPU, and so none "
      "for sim, whose operators run there. Write it in operators that have one: tests/device/source/operators/cell.cpp "
      "shows how.");
}

// What a call does in the thread of its stream.
class Work {
 public:
  Work(const c10::OperatorHandle& handle, const Operator& op, const Arguments& arguments, c10::DeviceIndex device)
      : handle_(handle), op_(op) {
    for (size_t place = 0; place < arguments.size(); place++) {
      arguments_.push_back(int(place) == op.generator ? drawn(arguments[place], device) : aliased(arguments[place]));
    }
  }

  // What a fresh return is copied into; an undefined tensor for others.
  void returns_into(std::vector<std::vector<at::Tensor>> results) { results_ = std::move(results); }
  // In place of an argument that changes its size, which only the CPU's allocator can.
  void replace(size_t place, at::Tensor tensor) { arguments_[place] = std::move(tensor); }
  at::Tensor on_cpu(const at::Tensor& tensor) { return on_cpu_(tensor); }

  // The CPU's own kernel. Returns what that returned.
  Arguments run() const {
    auto stack = arguments_;
    handle_.callBoxed(&stack);
    return stack;
  }

  void run_and_copy() const {
    auto stack = run();
    for (size_t place = 0; place < results_.size(); place++) {
      size_t member = 0;
      if (stack[place].isTensor()) {
        copy(stack[place].toTensor(), results_[place], member);
      } else {
        each_tensor(stack[place], [&](const at::Tensor& tensor) { copy(tensor, results_[place], member); });
      }
    }
  }

 private:
  c10::IValue aliased(const c10::IValue& argument) {
    return replaced(argument, [this](const at::Tensor& tensor) { return seen(tensor); }, c10::kCPU);
  }

  // A tensor of the CPU is read now, as its values may be others when the stream comes to it.
  at::Tensor seen(const at::Tensor& tensor) {
    if (is_ours(tensor)) return on_cpu_(tensor);
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.detach().clone();
  }

  static c10::IValue drawn(const c10::IValue& given, c10::DeviceIndex device) {
    return drawn_generator(given.isNone() ? std::nullopt : std::optional(given.toGenerator()), device);
  }

  void copy(const at::Tensor& value, const std::vector<at::Tensor>& results, size_t& member) const {
    if (member >= results.size() || !results[member].defined()) return;
    const auto& result = results[member++];
    TORCH_CHECK(
        value.defined() && value.sizes() == result.sizes() && value.dtype() == result.dtype(),
        "its kernel for meta foretold ", result.sizes(), " of ", result.dtype(), ", not what the CPU returned");
    result.copy_(value);
  }

  const c10::OperatorHandle handle_;
  const Operator& op_;
  OnCpu on_cpu_;
  Arguments arguments_;
  std::vector<std::vector<at::Tensor>> results_;
};

double seconds_of(const Operator& op, const Arguments& arguments, const Arguments& outputs) {
  if (!durations_are_set()) return 0;
  double bytes = 0;
  auto add = [&](const at::Tensor& tensor) { bytes += double(tensor.nbytes()); };
  for (const auto& value : arguments) each_tensor(value, add);
  for (const auto& value : outputs) each_tensor(value, add);
  return operator_seconds(op.name, flops_of(op, arguments), bytes);
}

void note_writers(
    const Operator& op, const Arguments& arguments, const Arguments& outputs, Queue& queue, uint64_t number) {
  auto note = [&](const at::Tensor& tensor) {
    if (is_ours(tensor)) note_writer(tensor.storage().data_ptr(), op.name.c_str(), queue, number);
  };
  for (auto place : op.written) each_tensor(arguments[place], note);
  for (const auto& output : outputs) each_tensor(output, note);
}

// Queued ------------------------------------------------------------------------------------------------------------

// A fresh output is made; one that is written gets the size that it will have; a view is made.
c10::IValue output_of(
    const Operator& op, size_t place, const Arguments& arguments, const std::vector<Shape>& shapes) {
  if (op.returns[place] == Operator::Return::kWritten) {
    const auto& written = arguments[op.returned[place]];
    if (op.is_out[op.returned[place]] && written.isTensor()) resize_to(written.toTensor(), shapes.at(0).sizes);
    return written;
  }
  if (op.returns[place] == Operator::Return::kView) {
    const auto& shape = shapes.at(0);
    return view_of(arguments[op.returned[place]].toTensor(), shape.sizes, shape.strides, shape.offset);
  }
  c10::List<at::Tensor> list;
  for (const auto& shape : shapes) {
    list.push_back(shape.is_defined ? made(shape.sizes, shape.strides, shape.dtype) : at::Tensor());
  }
  return op.is_list[place] ? c10::IValue(list) : c10::IValue(list.get(0));
}

void queue(
    const c10::OperatorHandle& handle, const Operator& op, const Arguments& arguments, c10::DeviceIndex device,
    const Shapes& shapes, Arguments& outputs) {
  for (size_t place = 0; place < op.returns.size(); place++) {
    outputs.push_back(output_of(op, place, arguments, shapes.returns[place]));
  }
  if (!op.returns.empty() && op.returns[0] == Operator::Return::kView) return;
  auto work = std::make_shared<Work>(handle, op, arguments, device);
  std::vector<std::vector<at::Tensor>> results(outputs.size());
  for (size_t place = 0; place < outputs.size(); place++) {
    if (op.returns[place] != Operator::Return::kFresh) continue;
    auto alias = [&](const at::Tensor& tensor) { results[place].push_back(work->on_cpu(tensor)); };
    each_tensor(outputs[place], alias);
  }
  work->returns_into(std::move(results));
  auto seconds = seconds_of(op, arguments, outputs);
  auto& stream = current_queue(device);
  auto number = stream.push({.name = op.name.c_str(), .work = [work] { work->run_and_copy(); }, .seconds = seconds});
  note_writers(op, arguments, outputs, stream, number);
  count_queued();
}

// Waited for --------------------------------------------------------------------------------------------------------

// What the CPU returned, on the device. Its stream has nothing to do now.
c10::IValue on_device(const c10::IValue& value) {
  auto moved = [](const at::Tensor& tensor) {
    auto fresh = made(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    on_cpu(fresh).copy_(tensor);
    return fresh;
  };
  return replaced(value, moved, c10::kCPU);
}

Arguments run_in_stream(const Operator& op, const std::shared_ptr<Work>& work, Queue& stream, double seconds) {
  auto results = std::make_shared<Arguments>();
  auto error = std::make_shared<std::exception_ptr>();
  auto run = [=] {
    try {
      *results = work->run();
    } catch (...) {
      *error = std::current_exception();
    }
  };
  stream.push({.name = op.name.c_str(), .work = run, .seconds = seconds});
  stream.synchronize();
  if (*error) std::rethrow_exception(*error);  // of its own type, as on the CPU
  return *results;
}

void run_now(
    const c10::OperatorHandle& handle, const Operator& op, const Arguments& arguments, c10::DeviceIndex device,
    Arguments& outputs) {
  auto work = std::make_shared<Work>(handle, op, arguments, device);
  for (size_t place = 0; place < op.is_out.size(); place++) {
    if (!op.is_out[place] || !arguments[place].isTensor()) continue;
    work->replace(place, at::detail::empty_cpu({0}, arguments[place].toTensor().scalar_type()));
  }
  auto results = run_in_stream(op, work, current_queue(device), seconds_of(op, arguments, {}));
  for (size_t place = 0; place < results.size(); place++) {
    auto source = op.returned[place];
    TORCH_CHECK_NOT_IMPLEMENTED(op.returns[place] != Operator::Return::kView, op.name, " cannot be viewed on sim");
    if (op.returns[place] == Operator::Return::kFresh) {
      outputs.push_back(on_device(results[place]));
      continue;
    }
    outputs.push_back(arguments[source]);
    if (!op.is_out[source]) continue;
    auto target = arguments[source].toTensor();
    resize_to(target, results[place].toTensor().sizes());
    on_cpu(target).copy_(results[place].toTensor());
  }
  count_synchronous(op.name);
}

}  // namespace

void call(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  raise_faults();
  auto& op = known(handle);
  auto arguments = torch::jit::last(*stack, op.arguments).vec();
  auto device = device_of_call(op, arguments);
  check_places(op, arguments, device);
  check_kernel(handle, op);
  c10::DeviceGuard guard(c10::Device(kSim, device));
  Arguments outputs;
  auto shapes = op.is_queueable ? shapes_of(handle, op, arguments) : nullptr;
  if (shapes) {
    queue(handle, op, arguments, device, *shapes, outputs);
  } else {
    run_now(handle, op, arguments, device, outputs);
  }
  torch::jit::drop(*stack, op.arguments);
  for (auto& output : outputs) stack->push_back(std::move(output));
}

}  // namespace sim
