// The generator of a device: a seed, and how many operators have drawn from it.
//
// An operator is given its random numbers when it is queued: a CPU generator made from the seed and that count. So the
// draws follow from the order of the calls, however late the operators run.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace sim {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // A generator of the CPU for the next operator. The caller holds ``mutex_``, as everywhere in PyTorch.
  at::Generator next();

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(c10::DeviceIndex device);

// For an operator on that device that is queued now: from the generator that the caller gave, or else the default one.
at::Generator drawn_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

}  // namespace sim
