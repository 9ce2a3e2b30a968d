#include "machine/landing.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

namespace sim {
namespace {

std::mutex landings_mutex;
auto& landings = *new std::map<char*, Landing*>;  // those that are there, by visible address

void* mapped(int file, size_t bytes, int protection) {
  auto* address = mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "sim: mmap of ", bytes, " bytes: ", std::strerror(errno));
  return address;
}

}  // namespace

Landing::Landing(size_t bytes) {
  auto page = size_t(sysconf(_SC_PAGESIZE));
  bytes_ = (bytes + page - 1) / page * page;
  int file = memfd_create("sim", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && !ftruncate(file, off_t(bytes_)), "sim: no memory for a copy of ", bytes, " bytes");
  visible_ = mapped(file, bytes_, PROT_NONE);
  hidden_ = mapped(file, bytes_, PROT_READ | PROT_WRITE);
  close(file);
  std::memset(hidden_, 0xff, bytes_);
  std::lock_guard<std::mutex> lock(landings_mutex);
  landings[static_cast<char*>(visible_)] = this;
}

Landing::~Landing() {
  {
    std::lock_guard<std::mutex> lock(landings_mutex);
    landings.erase(static_cast<char*>(visible_));
  }
  munmap(visible_, bytes_);
  munmap(hidden_, bytes_);
}

void Landing::open() {
  std::lock_guard<std::mutex> lock(landings_mutex);
  mprotect(visible_, bytes_, PROT_READ | PROT_WRITE);
  is_open_ = true;
}

bool open_landing_at(void* address, std::string& text) {
  std::lock_guard<std::mutex> lock(landings_mutex);
  auto after = landings.upper_bound(static_cast<char*>(address));
  if (after == landings.begin()) return false;
  auto& landing = *std::prev(after)->second;
  if (address >= static_cast<char*>(landing.visible_) + landing.bytes_) return false;
  if (landing.is_open_) return true;  // by its copy, just now
  mprotect(landing.visible_, landing.bytes_, PROT_READ | PROT_WRITE);
  landing.is_open_ = true;
  text = c10::str(
      "the host touched a tensor that aten::_to_copy on ", landing.writer, " has not written yet. The result of a copy "
      "with non_blocking=True must be waited for: torch.accelerator.synchronize().");
  return true;
}

}  // namespace sim
