// What PyTorch asks of an accelerator beside its streams, and memory of the host that is called pinned.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

#include "machine/count.h"
#include "machine/generator.h"
#include "machine/memory.h"

namespace sim {
namespace {

std::mutex pinned_mutex;
auto& pinned = *new std::map<const char*, size_t>;  // bytes, by address

// Memory of the host as any other, which is known to be pinned.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    count_pin();
    auto* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    if (data) pinned[static_cast<char*>(data)] = bytes;
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(static_cast<char*>(data));
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { use(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_used(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }

  at::Device getDeviceFromPtr(void* data) const override {
    auto device = device_of(data);
    TORCH_CHECK(device >= 0, "this address is of no simulated device: ", data);
    return {kSim, c10::DeviceIndex(device)};
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    return after != pinned.begin() && data < std::prev(after)->first + std::prev(after)->second;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedAllocator;
    return allocator;
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(checked(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

}  // namespace

void register_hooks() {
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
  c10::SetAllocator(kSim, allocator());
}

}  // namespace sim
