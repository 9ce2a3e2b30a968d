#include "machine/device.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

#include "machine/fault.h"

namespace sim {
namespace {

std::atomic<int> devices{0};
std::atomic<bool> used{false};
std::atomic<bool> bad_fork{false};

thread_local c10::DeviceIndex device_now = 0;
thread_local c10::StreamId streams_now[kMostDevices] = {};

}  // namespace

void set_device_count(int count) {
  TORCH_CHECK(0 < count && count <= kMostDevices, "sim: 1 to ", kMostDevices, " devices, not ", count);
  devices = count;
}

int device_count() { return devices; }

c10::DeviceIndex checked(c10::DeviceIndex index) {
  if (index == -1) return device_now;
  TORCH_CHECK(
      0 <= index && index < devices, "there is no sim:", int(index), ": this process has ", devices.load(),
      " simulated devices, sim:0 to sim:", devices.load() - 1, ". Use one of those, as in torch.zeros(2, device='sim:",
      devices.load() - 1, "'), or ask for more before the first use: tests.device.load(devices=", int(index) + 1, ").");
  return index;
}

c10::DeviceIndex current_device() { return device_now; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  auto before = device_now;
  device_now = checked(index);
  return before;
}

c10::StreamId current_stream(c10::DeviceIndex index) { return streams_now[index]; }

c10::StreamId exchange_stream(c10::DeviceIndex index, c10::StreamId stream) {
  auto before = streams_now[index];
  streams_now[index] = stream;
  return before;
}

bool is_used() { return used; }
bool is_bad_fork() { return bad_fork; }

void use() {
  TORCH_CHECK(
      !bad_fork, "sim: a device was used before this process was forked, and the threads of its streams stayed in the "
                 "parent. Start the process with multiprocessing.get_context('spawn').");
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
    watch_faults();
    used = true;
  });
}

}  // namespace sim
