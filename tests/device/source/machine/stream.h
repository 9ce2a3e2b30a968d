// A stream: a queue of tasks, and a thread that does them in order.
#pragma once

#include <deque>
#include <functional>
#include <string>

#include "machine/device.h"
#include "machine/mark.h"

namespace sim {

constexpr c10::StreamId kMostStreams = 1024;  // per device; then old ones come again, as with CUDA's pool

class Link;

struct Task {
  // Of the operator, for the log; lives as long as the process. Null: not shown, and never delayed.
  const char* name = nullptr;
  std::function<void()> work;
  // How long it takes, beside what ``work`` takes. Its result is there at the end.
  double seconds = 0;
  Link* link = nullptr;  // what it occupies for that time
  MarkPtr awaited, completed;
  Clock::time_point issued;
};

class Queue {
 public:
  Queue(c10::DeviceIndex device, c10::StreamId stream) : device(device), stream(stream) {}

  // Returns the number of the task.
  uint64_t push(Task task);
  bool is_idle();
  bool has_done(uint64_t number);
  // Waits for all that was pushed so far; throws what failed meanwhile, and after the timeout.
  void synchronize();
  // What it does, for a message; empty where it does nothing.
  std::string described();

  const c10::DeviceIndex device;
  const c10::StreamId stream;

 private:
  void serve();
  void perform(const Task& task);
  void work(const Task& task);
  void await(const MarkPtr& mark);

  std::mutex mutex_;
  std::condition_variable pushed_, done_;
  std::deque<Task> tasks_;
  bool is_served_ = false;
  uint64_t count_pushed_ = 0, count_done_ = 0;
  int waiting_ = 0;              // threads that wait for done_
  const char* doing_ = nullptr;  // the operator that runs
  MarkPtr awaiting_;
  // The rest is the serving thread's own.
  Clock::time_point clock_;  // when the last task ended, by the durations that are set
  uint64_t epoch_ = 0, delayed_ = 0;
};

Queue& queue_of(c10::DeviceIndex device, c10::StreamId stream);
// That of the stream that is current in this thread.
Queue& current_queue(c10::DeviceIndex device);
c10::StreamId new_stream(c10::DeviceIndex device);
c10::StreamId count_streams(c10::DeviceIndex device);

// The stream goes no further than here until the host completes the mark.
MarkPtr hold(c10::DeviceIndex device, c10::StreamId stream);
void synchronize_device(c10::DeviceIndex device);
// The host waits for an event.
void synchronize_mark(const MarkPtr& mark);
// What every stream that has work does, a line for each.
std::string all_described();
// How long a stream or the host waits before it says who waits for what.
void set_timeout(double seconds);
double timeout_seconds();
// Lets the streams end what they do; to be called before the interpreter ends.
void shut_down();
bool is_shut_down();

// Gives the interpreter's lock up, if this thread holds it: a stream may need it to drop what a tensor holds.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_ = nullptr;
};

}  // namespace sim
