#include "machine/delay.h"

#include <array>
#include <atomic>
#include <mutex>

#include "machine/stream.h"

namespace sim {
namespace {

struct Setting {
  uint64_t epoch = 0, seed = 0;
  double most_seconds = 0, share = 0;
  std::array<c10::StreamId, kMostDevices> first = {};  // number of the first stream that was made since, by device
};

std::mutex delay_mutex;
Setting delay_setting;
std::atomic<bool> delays_are_set{false};

double uniform(uint64_t bits) { return double(bits >> 11) / double(1ull << 53); }

}  // namespace

void set_delays(uint64_t seed, double most_seconds, double share) {
  Setting fresh{0, seed, most_seconds, share, {}};
  for (int device = 0; device < device_count(); device++) fresh.first[device] = count_streams(device);
  std::lock_guard<std::mutex> lock(delay_mutex);
  fresh.epoch = delay_setting.epoch + 1;
  delay_setting = fresh;
  delays_are_set = most_seconds > 0 && share > 0;
}

double drawn_delay_seconds(c10::DeviceIndex device, c10::StreamId stream, uint64_t& epoch, uint64_t& count) {
  if (!delays_are_set) return 0;
  Setting now;
  {
    std::lock_guard<std::mutex> lock(delay_mutex);
    now = delay_setting;
  }
  if (epoch != now.epoch) {
    epoch = now.epoch;
    count = 0;
  }
  // A stream is known by when it was made: by how many numbers it comes after the first one that was new then. Numbers
  // begin again after kMostStreams.
  auto after = (stream - now.first[device]) % kMostStreams;
  uint64_t name = stream == 0 ? 0 : (after + kMostStreams) % kMostStreams + 1;
  auto bits = mixed(mixed(mixed(now.seed) + uint64_t(device)) + name) + count++;
  bool is_late = uniform(mixed(bits)) < now.share;
  return is_late ? uniform(mixed(~bits)) * now.most_seconds : 0;
}

}  // namespace sim
