#include "machine/memory.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "machine/fault.h"

namespace sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

constexpr int kNaN = 0xff;                 // every byte: a NaN of any floating dtype, and -1
constexpr size_t kStep = size_t(1) << 22;  // bytes that are made usable at once

// The memory of one device.
struct Pool {
  std::mutex mutex;
  std::atomic<char*> base{nullptr};  // addresses base to base + kSpan; their bytes follow
  size_t used = 0, usable = 0;       // of the span, from its start
  std::map<char*, Block*> live;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<char*>> free;  // by stream and room
  c10::CachingDeviceAllocator::DeviceStats stats;
};

// Not destroyed: tensors may be freed while the process ends.
auto& pools = *new std::array<Pool, kMostDevices>;

Stat& all(StatArray& stats) { return stats[size_t(c10::CachingAllocator::StatType::AGGREGATE)]; }

// A few sizes for all, so that what is freed can be used again: four for each power of two.
size_t room_for(size_t bytes) {
  size_t step = 64;
  while (step * 8 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

void reserve(Pool& pool) {
  if (pool.base) return;
  auto* base = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(
      base != MAP_FAILED, "sim: a device needs ", 2 * kSpan >> 30, " GiB of addresses (not of memory), and mmap says: ",
      std::strerror(errno), ". Lift the limit: ulimit -v unlimited.");
  pool.base = static_cast<char*>(base);
}

// Fresh bytes at the end of what is used. They are NaN too: a reader that comes too early must not see zeros.
char* carve(Pool& pool, size_t room) {
  reserve(pool);
  TORCH_CHECK_WITH(OutOfMemoryError, pool.used + room <= kSpan, "sim: a device has ", kSpan >> 30, " GiB");
  if (pool.used + room > pool.usable) {
    auto more = (pool.used + room - pool.usable + kStep - 1) / kStep * kStep;
    auto failed = mprotect(bytes_at(pool.base + pool.usable), more, PROT_READ | PROT_WRITE);
    TORCH_CHECK_WITH(OutOfMemoryError, !failed, "sim: this machine has no memory for ", more >> 20, " MiB more");
    pool.usable += more;
  }
  auto* address = pool.base + pool.used;
  pool.used += room;
  std::memset(bytes_at(address), kNaN, room);
  return address;
}

// What was freed last on the stream, if it fits.
char* take(Pool& pool, c10::StreamId stream, size_t room) {
  auto& free = pool.free[{stream, room}];
  if (free.empty()) return carve(pool, room);
  auto* address = free.back();
  free.pop_back();
  return address;
}

// The streams are done with the block: its bytes become NaN.
void poison(const Block& block) {
  std::memset(bytes_at(block.address), kNaN, block.room);
  auto& pool = pools[block.device];
  std::lock_guard<std::mutex> lock(pool.mutex);
  all(pool.stats.active_bytes).decrease(block.bytes);
}

// From now on its stream may have it again.
void hand_back(const Block& block) {
  auto& pool = pools[block.device];
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.free[{block.stream, block.room}].push_back(block.address);
}

void release(void* context) {
  std::shared_ptr<Block> block(static_cast<Block*>(context));
  auto& pool = pools[block->device];
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    pool.live.erase(block->address);
    all(pool.stats.allocation).decrease(1);
    all(pool.stats.allocated_bytes).decrease(block->bytes);
    all(pool.stats.requested_bytes).decrease(block->bytes);
  }
  if (is_bad_fork() || is_shut_down()) return;
  // The last of the streams that may still use it fills it. None waits for another: that would be an order that the
  // program did not ask for. As on CUDA, the host hands it out again at once, for later work of its own stream; where
  // other streams were recorded, when these have passed.
  bool is_at_once = block->readers.empty();
  std::shared_ptr<void> last(nullptr, [block, is_at_once](void*) {
    poison(*block);
    if (!is_at_once) hand_back(*block);
  });
  auto& home = queue_of(block->device, block->stream);
  if (!home.is_idle()) home.push({.work = [last] {}});
  for (auto* reader : block->readers) {
    if (!reader->is_idle()) reader->push({.work = [last] {}});
  }
  last.reset();
  if (is_at_once) hand_back(*block);
}

c10::DataPtr made(size_t bytes) {
  use();
  auto device = current_device();
  if (!bytes) return {nullptr, nullptr, [](void*) {}, c10::Device(kSim, device)};
  auto room = room_for(bytes);
  auto& pool = pools[device];
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto stream = current_stream(device);
  auto* block = new Block{take(pool, stream, room), bytes, room, device, stream};
  pool.live[block->address] = block;
  all(pool.stats.allocation).increase(1);
  for (auto* stat : {&pool.stats.allocated_bytes, &pool.stats.requested_bytes, &pool.stats.active_bytes}) {
    all(*stat).increase(bytes);
  }
  return {block->address, block, &release, c10::Device(kSim, device)};
}

template <typename F>
void each_stat(c10::CachingDeviceAllocator::DeviceStats& stats, F apply) {
  for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.requested_bytes, &stats.active_bytes}) {
    apply(all(*stat));
  }
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return made(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // a block knows more than its address

  void copy_data(void* target, const void* source, size_t bytes) const override {
    synchronize_device(device_of(source));
    synchronize_device(device_of(target));
    std::memcpy(bytes_at(target), bytes_at(source), bytes);
  }

  bool initialized() override { return is_used(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_reader(data, stream); }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& pool = pools[checked(device)];
    std::lock_guard<std::mutex> lock(pool.mutex);
    return pool.stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    auto& pool = pools[checked(device)];
    std::lock_guard<std::mutex> lock(pool.mutex);
    each_stat(pool.stats, [](Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    auto& pool = pools[checked(device)];
    std::lock_guard<std::mutex> lock(pool.mutex);
    each_stat(pool.stats, [](Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto& pool = pools[checked(device)];
    std::lock_guard<std::mutex> lock(pool.mutex);
    return {kSpan - all(pool.stats.allocated_bytes).current, kSpan};
  }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* one = new Allocator;
  return one;
}

int device_of(const void* address) {
  for (int device = 0; device < device_count(); device++) {
    const char* base = pools[device].base;
    if (base && base <= address && address < base + kSpan) return device;
  }
  return -1;
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

std::string written_by(const void* address) {
  auto& pool = pools[device_of(address)];
  std::unique_lock<std::mutex> lock(pool.mutex, std::try_to_lock);
  if (!lock) return "in use";
  auto after = pool.live.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == pool.live.begin()) return "freed";
  const auto& block = *std::prev(after)->second;
  if (address >= block.address + block.room) return "freed";
  if (!block.written_by) return "never written";
  return c10::str(
      "written by ", block.written_by, ", which was queued on stream ", block.written_on->stream, " of sim:",
      int(block.written_on->device), " and has ", block.written_on->has_done(block.written_as) ? "" : "not ", "run");
}

void note_writer(const c10::DataPtr& data, const char* name, Queue& queue, uint64_t number) {
  if (auto* block = block_of(data)) {
    block->written_by = name;
    block->written_on = &queue;
    block->written_as = number;
  }
}

void record_reader(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = block_of(data);
  if (!block) return;
  auto* reader = &queue_of(stream.device_index(), stream.id());
  std::lock_guard<std::mutex> lock(pools[block->device].mutex);
  auto& readers = block->readers;
  bool is_home = stream.device_index() == block->device && stream.id() == block->stream;
  if (!is_home && std::find(readers.begin(), readers.end(), reader) == readers.end()) readers.push_back(reader);
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = allocator()->allocate(bytes);
  auto kept = std::min(bytes, storage.nbytes());
  if (kept) {
    auto copy = [from = bytes_at(storage.data()), to = bytes_at(fresh.get()), kept] { std::memcpy(to, from, kept); };
    current_queue(storage.device().index()).push({.name = "sim::resize", .work = copy});
  }
  storage.set_data_ptr(std::move(fresh));
  storage.set_nbytes(bytes);
}

}  // namespace sim
