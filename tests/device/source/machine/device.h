// The devices: how many there are, and which device and stream are current in a thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

// The count is set once, before anything else is asked.
void set_device_count(int count);
int device_count();

// The index itself, or the current device's for -1. Throws for a device that does not exist.
c10::DeviceIndex checked(c10::DeviceIndex index);

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

c10::StreamId current_stream(c10::DeviceIndex device);
c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream);

// True as soon as a stream or memory was asked for in this process, as for CUDA.
bool is_used();
// Throws in a process that was forked from one that used a device: the threads of its streams are not there.
void use();
bool is_bad_fork();

}  // namespace sim
