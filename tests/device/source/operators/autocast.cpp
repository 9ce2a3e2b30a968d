// Autocast: each operator by the policy that PyTorch has for accelerators, from its own lists.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "operators/tensor.h"

namespace sim {
namespace {

constexpr auto kAutocast = c10::DispatchKey::AutocastPrivateUse1;

enum class Policy { kLower, kFloat, kFloatResult, kWidest };

at::ScalarType target(Policy policy, c10::ArrayRef<c10::IValue> arguments) {
  auto lower = at::autocast::get_autocast_dtype(kSim);
  if (policy == Policy::kFloat) return at::kFloat;
  auto widest = lower;
  auto widen = [&](const at::Tensor& tensor) { widest = at::autocast::prioritize(widest, tensor, kSim); };
  if (policy == Policy::kWidest) {
    for (const auto& argument : arguments) each_tensor(argument, widen);
  }
  return widest;
}

class Cast final : public c10::OperatorKernel {
 public:
  explicit Cast(Policy policy) : policy_(policy) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard off(kAutocast);
    auto count = handle.schema().arguments().size();
    auto arguments = torch::jit::last(*stack, count).vec();
    if (policy_ == Policy::kFloatResult) {
      widen_result(handle.schema(), arguments);
    } else {
      auto dtype = target(policy_, arguments);
      auto cast = [&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kSim); };
      for (auto& argument : arguments) argument = replaced(argument, cast, c10::Device(kSim));
    }
    torch::jit::drop(*stack, count);
    for (auto& argument : arguments) stack->push_back(std::move(argument));
    handle.callBoxed(stack);
  }

 private:
  // Sums and the like take what they get, and return a float unless the caller says otherwise.
  static void widen_result(const c10::FunctionSchema& schema, std::vector<c10::IValue>& arguments) {
    auto dtype = schema.argumentIndexWithName("dtype");
    bool is_eligible = arguments[0].isTensor() && at::autocast::is_eligible(arguments[0].toTensor(), kSim);
    if (dtype && is_eligible && arguments[*dtype].isNone()) arguments[*dtype] = at::kFloat;
  }

  Policy policy_;
};

std::string full_name(const char* name) { return name; }
std::string full_name(const char* name, const char* overload) { return std::string(name) + "." + overload; }

void add(std::vector<c10::RegistrationHandleRAII>& kept, const std::string& name, Policy policy) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto place = name.find('.');
  auto overload = place == std::string::npos ? "" : name.substr(place + 1);
  c10::OperatorName operator_name("aten::" + name.substr(0, place), overload);
  if (!dispatcher.findSchema(operator_name)) return;  // the lists have names of other releases too
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Cast>(policy));
  kept.push_back(dispatcher.registerImpl(operator_name, kAutocast, std::move(kernel), std::nullopt, nullptr, "sim"));
}

}  // namespace

#define SIM_NAME_1(name) full_name(#name)
#define SIM_NAME_2(name, overload) full_name(#name, #overload)
#define SIM_PICK(_1, _2, which, ...) which
#define SIM_NAME(...) SIM_PICK(__VA_ARGS__, SIM_NAME_2, SIM_NAME_1, )(__VA_ARGS__)
#define SIM_LOWER(...) add(kept, SIM_NAME(__VA_ARGS__), Policy::kLower);
#define SIM_FLOAT(...) add(kept, SIM_NAME(__VA_ARGS__), Policy::kFloat);
#define SIM_RESULT(...) add(kept, SIM_NAME(__VA_ARGS__), Policy::kFloatResult);
#define SIM_WIDEST(...) add(kept, SIM_NAME(__VA_ARGS__), Policy::kWidest);

void register_autocast() {
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  auto through = c10::KernelFunction::makeFallthrough();
  kept.push_back(c10::Dispatcher::singleton().registerFallback(kAutocast, std::move(through), "sim"));
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_RESULT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dim"}) add(kept, name, Policy::kFloat);
}

}  // namespace sim
