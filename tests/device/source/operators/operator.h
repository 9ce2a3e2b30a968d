// What is to be known of an operator before it can be queued, read from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

namespace sim {

class ShapeCache;

struct Operator {
  explicit Operator(const c10::FunctionSchema& schema);
  ~Operator();

  enum class Return { kFresh, kWritten, kView };

  bool is_of(const c10::FunctionSchema& schema) const;

  std::string name;               // such as "aten::add_"
  std::string overload;           // such as "Tensor"
  size_t arguments;
  std::vector<Return> returns;
  std::vector<int> returned;      // by return: the argument that is written or viewed, or -1
  std::vector<bool> is_list;      // by return
  std::vector<int> written;       // arguments
  std::vector<bool> is_out;       // by argument: it is written, and may change its size
  int generator = -1;             // the argument that is a generator
  bool is_queueable = true;       // it returns tensors and nothing else
  bool is_in_place = true;        // all that it returns are arguments, which keep their sizes
  std::unique_ptr<ShapeCache> shapes;
};

// Lives as long as the process.
Operator& known(const c10::OperatorHandle& handle);

// Floating-point operations of a call: those of products, convolutions and attention; 0 for all others.
double flops_of(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace sim
