#include "machine/fault.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "machine/landing.h"
#include "machine/memory.h"

namespace sim {
namespace {

std::mutex faults_mutex;
std::vector<std::string> faults;
std::vector<void*> opened;  // pages of a device that the host touched, open until it is told
std::atomic<bool> are_any{false};
struct sigaction handler_before;

void* page_of(void* address) {
  auto size = uintptr_t(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<void*>(uintptr_t(address) / size * size);
}

// A page of NaN in place of one that must not be read, so that the program goes on to where it can be told.
void open_page(void* address) {
  auto size = size_t(sysconf(_SC_PAGESIZE));
  auto* page = page_of(address);
  mmap(page, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  std::memset(page, 0xff, size);
  std::lock_guard<std::mutex> lock(faults_mutex);
  opened.push_back(page);
}

void close_page(void* page) {
  auto size = size_t(sysconf(_SC_PAGESIZE));
  mmap(page, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if (handler_before.sa_flags & SA_SIGINFO) {
    handler_before.sa_sigaction(signal, info, context);
  } else if (handler_before.sa_handler == SIG_DFL || handler_before.sa_handler == SIG_IGN) {
    ::signal(signal, SIG_DFL);  // the instruction runs again, and ends the process
  } else {
    handler_before.sa_handler(signal);
  }
}

// The fault is in code of this process that reads a tensor, not in an allocation: to allocate here is safe.
void on_fault(int signal, siginfo_t* info, void* context) {
  auto* address = info->si_addr;
  auto device = device_of(address);
  if (device >= 0) {
    auto text = c10::str(
        "the host touched memory of sim:", device, " (", written_by(address),
        "). Only the streams of a device read its memory: copy the tensor first, as tensor.cpu() does.");
    open_page(address);
    add_fault(text);
    return;
  }
  std::string text;
  if (!open_landing_at(address, text)) return pass_on(signal, info, context);
  if (!text.empty()) add_fault(text);
}

}  // namespace

void add_fault(std::string text) {
  std::lock_guard<std::mutex> lock(faults_mutex);
  if (faults.size() < 8) faults.push_back(std::move(text));  // the first ones say why the others came
  are_any = true;
}

void raise_faults() {
  if (!are_any) return;
  std::string text;
  {
    std::lock_guard<std::mutex> lock(faults_mutex);
    for (auto& fault : faults) text += (text.empty() ? "" : "\n") + fault;
    for (auto* page : opened) close_page(page);
    faults.clear();
    opened.clear();
    are_any = false;
  }
  TORCH_CHECK(text.empty(), text);
}

void watch_faults() {
  struct sigaction now = {}, ours = {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction == on_fault) return;
  handler_before = now;
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace sim
