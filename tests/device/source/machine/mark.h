// A mark: one recording of an event, which the thread of its stream completes.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

namespace sim {

using Clock = std::chrono::steady_clock;

class Mark {
 public:
  Mark(c10::DeviceIndex device, c10::StreamId stream);
  Mark() : Mark(-1, 0) {}  // one that the host completes

  void complete(Clock::time_point at);
  bool is_complete();
  // False where it was not complete within that time.
  bool wait(double seconds);
  // When it was completed.
  Clock::time_point at();
  bool is_of_host() const { return device_ < 0; }
  // Such as "event 7, recorded on stream 0 of sim:1", or "the host".
  std::string described() const;

 private:
  const uint64_t number_;
  const c10::DeviceIndex device_;
  const c10::StreamId stream_;
  std::mutex mutex_;
  std::condition_variable completed_;
  bool is_complete_ = false;
  Clock::time_point at_;
};

using MarkPtr = std::shared_ptr<Mark>;

}  // namespace sim
