// Delays: an adverse schedule, drawn from a seed. The same program gets the same delays, whatever the machine does.
#pragma once

#include "machine/device.h"

namespace sim {

// A share of the operators, 0 to 1, starts late by up to ``most_seconds``; 0 of them: no delays.
void set_delays(uint64_t seed, double most_seconds, double share);

// By how much the next operator of a stream starts late. ``epoch`` and ``count`` are the stream's own: which setting it
// has seen last, and how many operators it has had since.
double drawn_delay_seconds(c10::DeviceIndex device, c10::StreamId stream, uint64_t& epoch, uint64_t& count);

// A number that depends on all bits of ``value`` (the finalizer of splitmix64).
constexpr uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace sim
