// Since the last reset: how many operators were queued, and by name how many had to be waited for instead.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace sim {

struct Counts {
  int64_t queued = 0;
  std::map<std::string, int64_t> synchronous;
};

Counts counts();
void reset_counts();
void count_queued();
void count_synchronous(const std::string& name);

}  // namespace sim
