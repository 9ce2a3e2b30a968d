// What PyTorch asks of a device: its current stream, and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "machine/fault.h"
#include "machine/memory.h"
#include "machine/stream.h"

namespace sim {
namespace {

c10::Stream stream_on(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

Queue& queue_for(const c10::Stream& stream) { return sim::queue_of(stream.device_index(), stream.id()); }

// An event is a pointer to its last mark.
MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

}  // namespace

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;

  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override { return {kSim, exchange_device(device.index())}; }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < device_count()) exchange_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override {
    auto index = checked(device.index());
    return stream_on(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_on(checked(device.index()), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = checked(device.index());
    return stream_on(index, new_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto device = checked(stream.device_index());
    return stream_on(device, exchange_stream(device, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_for(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_for(stream).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto mark = std::make_shared<Mark>(stream.device_index(), stream.id());
    if (!*event) *event = new MarkPtr;
    mark_of(*event) = mark;
    queue_for(stream).push({.completed = mark});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && !mark_of(event)->is_complete()) queue_for(stream).push({.awaited = mark_of(event)});
  }
  bool queryEvent(void* event) const override { return !event || mark_of(event)->is_complete(); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_mark(mark_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(mark_of(to)->at() - mark_of(from)->at()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_reader(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace sim
