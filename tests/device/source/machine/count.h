// Since the last reset: how many operators were queued, and by name how many had to be waited for instead; how often
// the host waited for a stream, an event or a device, and how often it pinned memory.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace sim {

struct Counts {
  int64_t queued = 0;
  std::map<std::string, int64_t> synchronous;
  int64_t waits = 0, pins = 0;
};

Counts counts();
void reset_counts();
void count_queued();
void count_synchronous(const std::string& name);
void count_wait();
void count_pin();

}  // namespace sim
