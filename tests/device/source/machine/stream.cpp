#include <Python.h>

#include "machine/stream.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "machine/count.h"
#include "machine/delay.h"
#include "machine/duration.h"
#include "machine/fault.h"
#include "machine/record.h"

namespace sim {
namespace {

constexpr auto kIdle = std::chrono::milliseconds(200);  // a thread that has had no work for so long ends
constexpr auto kMoment = std::chrono::milliseconds(1);

std::atomic<double> timeout{60};
std::atomic<bool> ended{false};

Clock::duration ticks(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

struct Streams {
  std::mutex mutex;
  std::vector<Queue*> queues;  // by stream; they live as long as the process
  c10::StreamId next = 1;
};

// Not destroyed: threads may look at it while the process ends.
auto& streams = *new std::array<Streams, kMostDevices>;

std::vector<Queue*> queues_on(c10::DeviceIndex device) {
  auto& here = streams[device];
  std::lock_guard<std::mutex> lock(here.mutex);
  return here.queues;
}

}  // namespace

// A stream ----------------------------------------------------------------------------------------------------------

uint64_t Queue::push(Task task) {
  use();
  task.issued = Clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!is_served_) {
    is_served_ = true;
    std::thread([this] { serve(); }).detach();
  }
  pushed_.notify_one();
  return ++count_pushed_;
}

bool Queue::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_done_ == count_pushed_;
}

bool Queue::has_done(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_done_ >= number;
}

void Queue::synchronize() {
  count_wait();
  bool in_time;
  {
    WithoutGil without_gil;
    std::unique_lock<std::mutex> lock(mutex_);
    auto until = count_pushed_;
    waiting_++;
    in_time = done_.wait_for(lock, ticks(timeout), [&] { return count_done_ >= until; });
    waiting_--;
  }
  raise_faults();
  TORCH_CHECK(
      in_time, "stream ", stream, " of sim:", int(device), " was waited for, and is not done after ", timeout.load(),
      " s. What the streams do:", all_described());
}

std::string Queue::described() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (count_done_ == count_pushed_) return "";
  auto runs = doing_ ? std::string("runs ") + doing_ : "starts";
  auto doing = awaiting_ ? "waits for " + awaiting_->described() : runs;
  return c10::str("sim:", int(device), " stream ", stream, ": ", doing, ", tasks behind it: ", tasks_.size());
}

void Queue::serve() {
  at::init_num_threads();
  at::AutoDispatchBelowADInplaceOrView kernels_only;
  std::unique_lock<std::mutex> lock(mutex_);
  while (pushed_.wait_for(lock, kIdle, [this] { return !tasks_.empty(); })) {
    {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      doing_ = task.name;
      lock.unlock();
      perform(task);
    }  // what the task holds is dropped without the lock
    lock.lock();
    doing_ = nullptr;
    count_done_++;
    if (waiting_) done_.notify_all();
  }
  is_served_ = false;
}

void Queue::perform(const Task& task) {
  if (task.awaited) await(task.awaited);
  auto start = std::max(clock_, task.issued);
  if (task.name) start += ticks(drawn_delay_seconds(device, stream, epoch_, delayed_));
  if (task.link) start = task.link->taken(start, ticks(task.seconds));
  auto end = start + ticks(task.seconds);
  std::this_thread::sleep_until(end);
  auto began = Clock::now();
  if (task.work) work(task);
  auto ended = Clock::now();
  bool exact = task.seconds > 0 || durations_are_set();  // then the clock knows no jitter
  clock_ = exact ? end : ended;
  note_lateness(ended - clock_);
  if (task.name) record(device, stream, task.name, exact ? start : began, clock_);
  if (task.completed) task.completed->complete(clock_);
}

// Nobody is there to catch what an operator throws here.
void Queue::work(const Task& task) {
  auto say = [&](const std::string& text) {
    auto first_line = text.substr(0, text.find('\n'));
    auto* name = task.name ? task.name : "a task";
    add_fault(c10::str("sim:", int(device), " stream ", stream, ": ", name, ": ", first_line));
  };
  try {
    task.work();
  } catch (const c10::Error& error) {
    say(error.what_without_backtrace());
  } catch (const std::exception& error) {
    say(error.what());
  }
}

void Queue::await(const MarkPtr& mark) {
  if (!mark->is_complete()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      awaiting_ = mark;
    }
    auto limit = 2 * timeout;  // the host, if it waits for this stream, is told first
    while (!mark->wait(limit)) {
      if (mark->is_of_host()) continue;  // as long as it likes
      add_fault(c10::str(
          "stream ", stream, " of sim:", int(device), " has waited ", limit, " s for ", mark->described(),
          ", and goes on without it. What the streams do:", all_described()));
      break;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    awaiting_ = nullptr;
  }
  if (mark->is_complete()) clock_ = std::max(clock_, mark->at());
}

// All streams -------------------------------------------------------------------------------------------------------

Queue& queue_of(c10::DeviceIndex device, c10::StreamId stream) {
  auto& here = streams[checked(device)];
  std::lock_guard<std::mutex> lock(here.mutex);
  if (here.queues.size() <= size_t(stream)) here.queues.resize(stream + 1);
  auto& queue = here.queues[stream];
  if (!queue) queue = new Queue(device, stream);
  return *queue;
}

Queue& current_queue(c10::DeviceIndex device) { return queue_of(device, current_stream(device)); }

c10::StreamId new_stream(c10::DeviceIndex device) {
  use();
  auto& here = streams[checked(device)];
  std::lock_guard<std::mutex> lock(here.mutex);
  auto stream = here.next++;
  return (stream - 1) % kMostStreams + 1;
}

c10::StreamId count_streams(c10::DeviceIndex device) {
  auto& here = streams[device];
  std::lock_guard<std::mutex> lock(here.mutex);
  return here.next;
}

MarkPtr hold(c10::DeviceIndex device, c10::StreamId stream) {
  auto mark = std::make_shared<Mark>();
  queue_of(device, stream).push({.awaited = mark});
  return mark;
}

void synchronize_device(c10::DeviceIndex device) {
  count_wait();
  for (auto* queue : queues_on(checked(device))) {
    if (queue && !queue->is_idle()) queue->synchronize();
  }
  raise_faults();
}

void synchronize_mark(const MarkPtr& mark) {
  count_wait();
  bool in_time;
  {
    WithoutGil without_gil;
    in_time = mark->wait(timeout);
  }
  raise_faults();
  TORCH_CHECK(
      in_time, mark->described(), ", was waited for, and has not come after ", timeout.load(),
      " s. What the streams do:", all_described());
}

std::string all_described() {
  std::string lines;
  for (int device = 0; device < device_count(); device++) {
    for (auto* queue : queues_on(device)) {
      auto line = queue ? queue->described() : "";
      if (!line.empty()) lines += "\n  " + line;
    }
  }
  return lines.empty() ? " nothing." : lines;
}

void set_timeout(double seconds) { timeout = seconds; }
double timeout_seconds() { return timeout; }

void shut_down() {
  WithoutGil without_gil;
  ended = true;
  auto latest = Clock::now() + std::chrono::seconds(10);
  for (int device = 0; device < device_count(); device++) {
    for (auto* queue : queues_on(device)) {
      while (queue && !queue->is_idle() && Clock::now() < latest) std::this_thread::sleep_for(kMoment);
    }
  }
}

bool is_shut_down() { return ended; }

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace sim
