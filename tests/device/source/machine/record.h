// The record: what ran, where and when. For charts, and for tests of order.
#pragma once

#include <string>
#include <vector>

#include "machine/device.h"
#include "machine/mark.h"

namespace sim {

struct Entry {
  int device;
  int64_t stream;
  const char* name;
  double start_seconds, end_seconds;  // since the record began
};

void start_record();
// In the order of their starts.
std::vector<Entry> stop_record();
void record(
    c10::DeviceIndex device, c10::StreamId stream, const char* name, Clock::time_point start, Clock::time_point end);

}  // namespace sim
