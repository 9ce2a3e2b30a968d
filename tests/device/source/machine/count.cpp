#include "machine/count.h"

#include <atomic>
#include <mutex>

namespace sim {
namespace {

std::mutex counts_mutex;
std::map<std::string, int64_t> synchronous;
std::atomic<int64_t> queued{0}, waits{0}, pins{0};

}  // namespace

Counts counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return {queued, synchronous, waits, pins};
}

void reset_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  synchronous.clear();
  queued = waits = pins = 0;
}

void count_queued() { queued++; }
void count_wait() { waits++; }
void count_pin() { pins++; }

void count_synchronous(const std::string& name) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  synchronous[name]++;
}

}  // namespace sim
