// Shapes of what an operator returns, before it has run: it is run on meta, once for each shape of its arguments.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "operators/operator.h"
#include "operators/tensor.h"

namespace sim {

struct Shape {
  bool is_defined = false;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

// By return, the tensors in it.
struct Shapes {
  explicit Shapes(size_t count = 0) : returns(count) {}

  std::vector<std::vector<Shape>> returns;
};

class ShapeCache {
 public:
  using Key = std::vector<int64_t>;
  std::shared_ptr<const Shapes> find(const Key& key);
  void put(Key key, std::shared_ptr<const Shapes> shapes);

 private:
  struct Hash {
    size_t operator()(const Key& key) const;
  };

  std::mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Shapes>, Hash> known_;
};

// Null where they depend on what tensors hold, where the operator has no kernel for meta, or where the call is wrong.
std::shared_ptr<const Shapes> shapes_of(
    const c10::OperatorHandle& handle, Operator& op, c10::ArrayRef<c10::IValue> arguments);

}  // namespace sim
