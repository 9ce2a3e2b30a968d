// Copies, between devices and with the host. Each runs on a stream, and occupies a link for as long as it lasts.
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/fill.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <cmath>

#include "machine/count.h"
#include "machine/duration.h"
#include "machine/fault.h"
#include "machine/landing.h"
#include "machine/memory.h"
#include "machine/stream.h"
#include "operators/tensor.h"

namespace sim {
namespace {

constexpr const char* kCopy = "aten::copy_";

// ``after`` goes on when ``before`` has come here.
void let_wait(Queue& after, Queue& before) {
  auto mark = std::make_shared<Mark>(before.device, before.stream);
  before.push({.completed = mark});
  after.push({.awaited = mark});
}

// The tensors of the host stay alive until the copy is done, as in CUDA's pinned memory.
void push_copy(Queue& stream, const at::Tensor& from, const at::Tensor& to, at::Tensor source, at::Tensor target) {
  auto place = [](const at::Tensor& tensor) { return is_ours(tensor) ? int(tensor.device().index()) : kHost; };
  bool is_inside = place(from) == place(to);
  auto bytes = double(to.nbytes());
  auto seconds = is_inside ? operator_seconds(kCopy, 0, 2 * bytes) : copy_seconds(kCopy, bytes);
  auto* link = is_inside ? nullptr : link_between(place(from), place(to));
  auto copy = [source, target] { target.copy_(source); };
  auto number = stream.push({.name = kCopy, .work = copy, .seconds = seconds, .link = link});
  if (is_ours(to)) note_writer(to.storage().data_ptr(), kCopy, stream, number);
  count_queued();
}

// On the stream of the source, which waits for that of the target first, as for CUDA: what is there may still be read.
void copy_between(const at::Tensor& from, const at::Tensor& to) {
  auto& source = current_queue(from.device().index());
  auto& target = current_queue(to.device().index());
  if (&source != &target) let_wait(source, target);
  push_copy(source, from, to, on_cpu(from), on_cpu(to));
  if (&source != &target) let_wait(target, source);
}

// Inside a copy that makes its target itself: nobody has seen that, so its memory can be another.
thread_local bool target_is_fresh = false;

at::Tensor alias_at(const at::Tensor& like, void* bytes) {
  c10::DataPtr data(bytes, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, like.storage().nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), like.key_set(), like.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return alias;
}

// To the host, without waiting. What is read there too early is NaN, or where the pages can be closed, a fault. Pinned
// memory becomes NaN when the copy begins, in the order of its stream: a copy that was queued before may still read it.
void copy_to_host_later(const at::Tensor& from, const at::Tensor& to, Queue& stream) {
  if (!target_is_fresh || !to.is_non_overlapping_and_dense()) {
    at::Tensor target = to.detach();
    auto fill = [target]() mutable {
      at::fill_(target, c10::isIntegralType(target.scalar_type(), true) ? at::Scalar(-1) : at::Scalar(std::nan("")));
    };
    if (to.is_pinned()) {
      stream.push({.work = fill});
    } else {
      fill();
    }
    return push_copy(stream, from, to, on_cpu(from), target);
  }
  auto landing = std::make_shared<Landing>(to.nbytes());
  landing->writer = "stream " + std::to_string(stream.stream) + " of sim:" + std::to_string(int(stream.device));
  auto* context = new std::shared_ptr<Landing>(landing);
  auto release = [](void* context) { delete static_cast<std::shared_ptr<Landing>*>(context); };
  to.storage().set_data_ptr(c10::DataPtr(landing->visible(), context, release, c10::kCPU));
  push_copy(stream, from, to, on_cpu(from), alias_at(to, landing->hidden()));
  stream.push({.work = [landing] { landing->open(); }});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  raise_faults();
  if (from.is_same(to) || to.numel() == 0) return to;
  if (is_ours(from) && is_ours(to)) {
    copy_between(from, to);
    return to;
  }
  auto& stream = current_queue((is_ours(from) ? from : to).device().index());
  if (is_ours(from) && non_blocking) {
    copy_to_host_later(from, to, stream);
    return to;
  }
  auto seen = [](const at::Tensor& tensor) { return is_ours(tensor) ? on_cpu(tensor) : tensor.detach(); };
  push_copy(stream, from, to, seen(from), seen(to));
  if (!non_blocking) stream.synchronize();
  return to;
}

at::Tensor to_copy(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
    std::optional<at::MemoryFormat> format) {
  target_is_fresh = true;
  auto reset = c10::make_scope_exit([] { target_is_fresh = false; });
  return at::native::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, format);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  raise_faults();
  auto& stream = current_queue(tensor.device().index());
  auto value = std::make_shared<at::Scalar>();
  auto read = [value, source = on_cpu(tensor)] { *value = source.item(); };
  stream.push({.name = "aten::_local_scalar_dense", .work = read});
  stream.synchronize();
  count_synchronous("aten::_local_scalar_dense");
  return *value;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { record_reader(tensor.storage().data_ptr(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_to_copy", to_copy);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
}

// A copy is what resolves the bits of lazy conjugation and negation: it must see them.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
