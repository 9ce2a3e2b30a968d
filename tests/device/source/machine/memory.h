// Memory of the devices. A tensor's address is one that nobody can read: its bytes are kSpan further on, and only the
// threads of streams look there. What is freed is filled with NaN when the streams that used it have passed that point,
// and handed out again at once to the stream that it was made on, as by CUDA's allocator.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "machine/stream.h"

namespace sim {

constexpr size_t kSpan = size_t(1) << 36;  // addresses of a device: 64 GiB

struct Block {
  char* address;
  size_t bytes, room;  // asked for, and taken
  c10::DeviceIndex device;
  c10::StreamId stream;          // that it was made on
  std::vector<Queue*> readers;   // that it was recorded on
  const char* written_by = nullptr;
  Queue* written_on = nullptr;
  uint64_t written_as = 0;       // the number of that task
};

c10::DeviceAllocator* allocator();

// Where the bytes of an address of a device are.
inline void* bytes_at(const void* address) {
  return address ? static_cast<char*>(const_cast<void*>(address)) + kSpan : nullptr;
}
// Which device an address belongs to; -1: none.
int device_of(const void* address);
// The block of a storage; null where it has no bytes.
Block* block_of(const c10::DataPtr& data);
// Says of the block at an address who wrote it last. Waits for no lock, so that a signal handler may ask.
std::string written_by(const void* address);

// The task that will write a storage, for messages.
void note_writer(const c10::DataPtr& data, const char* name, Queue& queue, uint64_t number);
void record_reader(const c10::DataPtr& data, c10::Stream stream);

// Gives a storage that many bytes. Those that it has stay what they are, as far as they fit.
void resize_bytes(const c10::Storage& storage, size_t bytes);

}  // namespace sim
