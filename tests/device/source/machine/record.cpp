#include "machine/record.h"

#include <algorithm>
#include <atomic>

namespace sim {
namespace {

std::mutex record_mutex;
std::atomic<bool> record_is_on{false};
std::vector<Entry> entries;
Clock::time_point origin;

double since_origin(Clock::time_point at) { return std::chrono::duration<double>(at - origin).count(); }

}  // namespace

void start_record() {
  std::lock_guard<std::mutex> lock(record_mutex);
  entries.clear();
  origin = Clock::now();
  record_is_on = true;
}

std::vector<Entry> stop_record() {
  std::lock_guard<std::mutex> lock(record_mutex);
  record_is_on = false;
  auto by_start = [](const Entry& one, const Entry& other) { return one.start_seconds < other.start_seconds; };
  std::stable_sort(entries.begin(), entries.end(), by_start);
  return std::move(entries);
}

void record(
    c10::DeviceIndex device, c10::StreamId stream, const char* name, Clock::time_point start, Clock::time_point end) {
  if (!record_is_on) return;
  std::lock_guard<std::mutex> lock(record_mutex);
  entries.push_back({device, stream, name, since_origin(start), since_origin(end)});
}

}  // namespace sim
