#include "operators/operator.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "operators/shape.h"

namespace sim {
namespace {

bool holds_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors()) ||
         type->isSubtypeOf(*c10::OptionalType::ofTensor());
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The argument that a return is an alias of.
int aliased(const c10::FunctionSchema& schema, const c10::AliasInfo& info) {
  for (size_t place = 0; place < schema.arguments().size(); place++) {
    auto* of_argument = schema.arguments()[place].alias_info();
    if (of_argument && of_argument->beforeSets() == info.beforeSets()) return int(place);
  }
  return -1;
}

}  // namespace

Operator::Operator(const c10::FunctionSchema& schema)
    : name(schema.name()),
      overload(schema.overload_name()),
      arguments(schema.arguments().size()),
      shapes(std::make_unique<ShapeCache>()) {
  for (size_t place = 0; place < arguments; place++) {
    const auto& argument = schema.arguments()[place];
    if (is_written(argument)) written.push_back(int(place));
    is_out.push_back(is_written(argument) && argument.is_out());
    is_in_place = is_in_place && !is_out.back();
    auto* type = argument.type()->castRaw<c10::OptionalType>();
    auto kind = type ? type->getElementType()->kind() : argument.type()->kind();
    if (kind == c10::TypeKind::GeneratorType) generator = int(place);
  }
  for (const auto& value : schema.returns()) {
    auto* info = value.alias_info();
    returned.push_back(info ? aliased(schema, *info) : -1);
    is_in_place = is_in_place && info && info->isWrite();
    returns.push_back(!info ? Return::kFresh : info->isWrite() ? Return::kWritten : Return::kView);
    is_list.push_back(value.type()->isSubtypeOf(*c10::ListType::ofTensors()));
    is_queueable = is_queueable && holds_tensors(value.type()) && (!info || returned.back() >= 0);
  }
}

Operator::~Operator() = default;

bool Operator::is_of(const c10::FunctionSchema& schema) const {
  bool has_sizes = arguments == schema.arguments().size() && returns.size() == schema.returns().size();
  return has_sizes && name == schema.name() && overload == schema.overload_name();
}

Operator& known(const c10::OperatorHandle& handle) {
  static auto& mutex = *new std::shared_mutex;
  static auto& operators = *new std::unordered_map<const c10::FunctionSchema*, Operator*>;
  const auto* schema = &handle.schema();
  {
    std::shared_lock<std::shared_mutex> lock(mutex);
    auto found = operators.find(schema);
    if (found != operators.end() && found->second->is_of(*schema)) return *found->second;
  }
  std::unique_lock<std::shared_mutex> lock(mutex);
  auto& op = operators[schema];
  if (!op || !op->is_of(*schema)) op = new Operator(*schema);  // a library may go, and another's schema take its place
  return *op;
}

}  // namespace sim
