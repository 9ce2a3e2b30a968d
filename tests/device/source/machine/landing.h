// A landing: memory of the host that a copy without waiting (non_blocking) will write. Its pages are closed until then,
// so that a read that comes too early is noticed.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>
#include <string>

namespace sim {

class Landing {
 public:
  explicit Landing(size_t bytes);
  ~Landing();

  void* visible() const { return visible_; }  // the host's address
  void* hidden() const { return hidden_; }    // where the copy writes
  size_t bytes() const { return bytes_; }
  void open();

  // What writes it, for the message; such as "stream 3 of sim:0".
  std::string writer;

 private:
  friend bool open_landing_at(void* address, std::string& text);
  size_t bytes_;
  bool is_open_ = false;
  void *visible_, *hidden_;
};

// Whether an address lies in a landing. One that is closed is opened, and the text says what is wrong.
bool open_landing_at(void* address, std::string& text);

}  // namespace sim
