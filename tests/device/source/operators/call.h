// One call of an operator on tensors of a device: what can be queued of it, and what cannot.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// Replaces the arguments on the stack by what the operator returns.
void call(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

}  // namespace sim
