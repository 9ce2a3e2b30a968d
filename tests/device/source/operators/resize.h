// Sizes of tensors that are there: views of them, and more memory for them.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Gives the tensor these sizes, contiguous, and its storage as many bytes as that needs; nothing if it has them.
void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes);
}  // namespace sim
