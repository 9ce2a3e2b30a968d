#include "machine/mark.h"

#include <c10/util/StringUtil.h>

#include <atomic>

namespace sim {
namespace {
std::atomic<uint64_t> marks{0};
}

Mark::Mark(c10::DeviceIndex device, c10::StreamId stream) : number_(++marks), device_(device), stream_(stream) {}

void Mark::complete(Clock::time_point at) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_complete_ = true;
  at_ = at;
  completed_.notify_all();
}

bool Mark::is_complete() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_complete_;
}

bool Mark::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return completed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return is_complete_; });
}

Clock::time_point Mark::at() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_;
}

std::string Mark::described() const {
  if (is_of_host()) return "the host, which holds it";
  return c10::str("event ", number_, ", recorded on stream ", stream_, " of sim:", int(device_));
}

}  // namespace sim
