#include "machine/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstring>
#include <mutex>

#include "machine/delay.h"
#include "machine/device.h"

namespace sim {

constexpr size_t kStateBytes = 2 * sizeof(uint64_t);  // the seed and the count, as CUDA's

Generator::Generator(c10::DeviceIndex device)
    : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  bool fits = state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
              state.numel() == kStateBytes && state.is_contiguous();
  TORCH_CHECK(
      fits, "the state of a generator of sim is ", kStateBytes, " contiguous bytes (torch.uint8) on the CPU, as "
      "get_state() returns them; received ", state.numel(), " elements of ", state.dtype(), " on ", state.device());
  std::memcpy(&seed_, state.data(), sizeof(seed_));
  std::memcpy(&offset_, static_cast<const char*>(state.data()) + sizeof(seed_), sizeof(offset_));
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::detail::empty_cpu({kStateBytes}, at::kByte);
  auto* bytes = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, sizeof(seed_));
  std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
  return state.getIntrusivePtr();
}

at::Generator Generator::next() {
  return at::make_generator<at::CPUGeneratorImpl>(mixed(mixed(seed_) + offset_++));
}

Generator* Generator::clone_impl() const {
  auto* clone = new Generator(device().index());
  clone->seed_ = seed_;
  clone->offset_ = offset_;
  return clone;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::array<at::Generator, kMostDevices>;
    for (int index = 0; index < kMostDevices; index++) (*all)[index] = at::make_generator<Generator>(index);
    return all;
  }();
  return (*generators)[checked(device)];
}

at::Generator drawn_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  auto generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      generator.device().type() == kSim, "an operator on sim:", int(device), " draws from a generator of sim, as "
      "torch.Generator('sim:", int(device), "'), not of ", generator.device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace sim
