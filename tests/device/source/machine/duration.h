// Durations: how long an operator and a copy take on the device that is simulated.
#pragma once

#include <atomic>
#include <map>
#include <string>

#include "machine/mark.h"

namespace sim {

// A rate of 0 is no limit. All 0, which is the default: an operator takes what it takes on the CPU.
struct Rates {
  double flops_per_second = 0, bytes_per_second = 0, seconds_per_operator = 0;
  double link_bytes_per_second = 0, seconds_per_copy = 0;
};

void set_rates(const Rates& rates);
// All operators of that name take so long; negative: as the rates say.
void set_seconds(const std::string& name, double seconds);
bool durations_are_set();

double operator_seconds(const std::string& name, double flops, double bytes);
double copy_seconds(const std::string& name, double bytes);

// From one device to another, one way. One copy occupies it at a time.
class Link {
 public:
  // From when on it is occupied, for so long, by a copy that could start at ``start``.
  Clock::time_point taken(Clock::time_point start, Clock::duration duration);

 private:
  std::mutex mutex_;
  std::map<Clock::time_point, Clock::time_point> taken_;  // from when until when
};

constexpr int kHost = -1;
Link* link_between(int from, int to);

// By how much a stream was behind its clock at most since the last reset: the machine was too slow for the rates.
void note_lateness(Clock::duration lateness);
double most_lateness_seconds();
void reset_lateness();

}  // namespace sim
