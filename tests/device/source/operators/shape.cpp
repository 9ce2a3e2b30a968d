#include <Python.h>

#include "operators/shape.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>

#include <cstring>

#include "machine/delay.h"

namespace sim {
namespace {

constexpr size_t kMostShapes = 4096;  // of one operator; then it starts anew

// A call's arguments as numbers: all that the shapes of its results can depend on.
class Encoder {
 public:
  explicit Encoder(ShapeCache::Key& key) : key_(key) {}

  // False for an argument that cannot be encoded.
  bool add(const c10::IValue& value) {
    key_.push_back(int64_t(tag(value)));
    if (value.isTensor()) return add(value.toTensor());
    if (value.isInt()) return add(value.toInt());
    if (value.isDouble()) return add(value.toDouble());
    if (value.isBool()) return add(int64_t(value.toBool()));
    if (value.isIntList()) return add(c10::IntArrayRef(value.toIntVector()));
    if (value.isDoubleList()) return all(value.toDoubleVector());
    if (value.isBoolList() || value.isTensorList() || value.isOptionalTensorList()) return all(value.toListRef());
    if (value.isDevice()) return add(int64_t(value.toDevice().type()));
    if (value.isString()) return add(value.toStringRef());
    return value.isNone() || value.isGenerator();
  }

 private:
  enum class Tag { kNone, kTensor, kInt, kDouble, kBool, kIntList, kList, kDevice, kString };

  static Tag tag(const c10::IValue& value) {
    if (value.isTensor()) return Tag::kTensor;
    if (value.isInt()) return Tag::kInt;
    if (value.isDouble()) return Tag::kDouble;
    if (value.isBool()) return Tag::kBool;
    if (value.isIntList()) return Tag::kIntList;
    if (value.isDevice()) return Tag::kDevice;
    if (value.isString()) return Tag::kString;
    return value.isList() ? Tag::kList : Tag::kNone;
  }

  bool add(int64_t number) {
    key_.push_back(number);
    return true;
  }

  bool add(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return add(bits);
  }

  bool add(c10::IntArrayRef numbers) {
    key_.push_back(int64_t(numbers.size()));
    key_.insert(key_.end(), numbers.begin(), numbers.end());
    return true;
  }

  bool add(const std::string& text) {
    key_.push_back(int64_t(text.size()));
    for (char letter : text) key_.push_back(letter);
    return true;
  }

  bool add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(int64_t(-1));
    if (tensor.layout() != c10::kStrided) return false;
    add(int64_t(tensor.scalar_type()));
    add(int64_t(tensor.device().type()) * 8 + tensor.unsafeGetTensorImpl()->is_wrapped_number() * 4 +
        tensor.is_conj() * 2 + tensor.is_neg());
    add(tensor.storage_offset());
    add(tensor.sizes());
    return add(tensor.strides());
  }

  template <typename List>
  bool all(const List& values) {
    add(int64_t(values.size()));
    for (const auto& value : values) {
      if (!add(value)) return false;
    }
    return true;
  }

  ShapeCache::Key& key_;
};

Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.scalar_type()};
}

// A kernel for meta may be in Python, and leaves its exception where the interpreter will find it.
void forget_python_error() {
  auto state = PyGILState_Ensure();
  PyErr_Clear();
  PyGILState_Release(state);
}

bool are_contiguous(c10::ArrayRef<c10::IValue> arguments) {
  bool are_all = true;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) { are_all = are_all && tensor.is_contiguous(); });
  }
  return are_all;
}

// Some kernels for meta foretell other shapes than the CPU's, or dtypes. There the CPU's kernel tells, from zeros.
bool is_wrong_on_meta(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  auto has = [&](const char* part) { return op.name.find(part) != std::string::npos; };
  return has("batch_norm") || has("embedding_bag") || (has("convolution") && !are_contiguous(arguments));
}

at::Tensor zeros_like_it(const at::Tensor& tensor) {
  auto bytes = at::zeros({int64_t(tensor.storage().nbytes() / tensor.itemsize())}, tensor.options().device(c10::kCPU));
  return bytes.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

std::shared_ptr<const Shapes> foretold(
    const c10::OperatorHandle& handle, const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  at::AutoDispatchBelowADInplaceOrView kernels_only;
  auto device = is_wrong_on_meta(op, arguments) ? c10::kCPU : c10::kMeta;
  auto seen = [&](const at::Tensor& tensor) {
    return !is_ours(tensor) ? tensor : device == c10::kCPU ? zeros_like_it(tensor) : on_meta(tensor);
  };
  std::vector<c10::IValue> stack;
  for (const auto& argument : arguments) {
    stack.push_back(argument.isGenerator() ? c10::IValue() : replaced(argument, seen, device));
  }
  handle.callBoxed(&stack);
  auto shapes = std::make_shared<Shapes>();
  for (const auto& value : stack) {
    auto& tensors = shapes->returns.emplace_back();
    if (value.isTensor()) {
      tensors.push_back(shape_of(value.toTensor()));
    } else {
      each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(shape_of(tensor)); });
    }
  }
  return shapes;
}

}  // namespace

size_t ShapeCache::Hash::operator()(const Key& key) const {
  uint64_t hash = key.size();
  for (auto number : key) hash = mixed(hash ^ uint64_t(number));
  return hash;
}

std::shared_ptr<const Shapes> ShapeCache::find(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = known_.find(key);
  return found == known_.end() ? nullptr : found->second;
}

void ShapeCache::put(Key key, std::shared_ptr<const Shapes> shapes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (known_.size() >= kMostShapes) known_.clear();
  known_.emplace(std::move(key), std::move(shapes));
}

std::shared_ptr<const Shapes> shapes_of(
    const c10::OperatorHandle& handle, Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  ShapeCache::Key key;
  key.reserve(32);
  key.push_back(int64_t(c10::get_default_dtype_as_scalartype()));
  Encoder encoder(key);
  bool is_encoded = true;
  for (const auto& argument : arguments) is_encoded = is_encoded && encoder.add(argument);
  if (is_encoded) {
    if (auto shapes = op.shapes->find(key)) return shapes;
  }
  try {
    auto shapes = foretold(handle, op, arguments);
    if (is_encoded) op.shapes->put(std::move(key), shapes);
    return shapes;
  } catch (const c10::NotImplementedError&) {
    return op.is_in_place ? std::make_shared<Shapes>(op.returns.size()) : nullptr;
  } catch (const std::exception&) {
    forget_python_error();
    return nullptr;
  }
}

}  // namespace sim
