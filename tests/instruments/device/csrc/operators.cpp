// Every operator of aten on the lagging device, by the CPU's kernels.
//
// A boxed fallback runs the operator on meta tensors first, which gives the results' shapes; allocates the results; and
// gives the CPU's kernel to the current stream, with CPU tensors on the same memory in place of the arguments. These hold
// addresses, not references: as on a real device, it is the caller's business to keep memory alive.
//
// Where shapes depend on values (nonzero), a value is asked for (item), or random numbers are drawn, the host waits for
// the stream and computes itself.
#include "lagging.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace lagging {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// A number that Python wrote takes part in promotion of types as such.
Tensor counted_as(const Tensor& tensor, Tensor other) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    other.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return other;
}

// The same memory as a CPU tensor. It does not keep the memory alive.
Tensor on_host(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  return counted_as(tensor, host);
}

Tensor as_meta(const Tensor& tensor) {
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  return counted_as(tensor, meta);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kDevice), keys,
                                           c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, c10::GetAllocator(kDevice), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_like_meta(const Tensor& meta) {
  return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), {}, {}, {});
}

// Replace each tensor of an argument, in lists too; None and undefined tensors stay.
template <typename Change>
IValue with_tensors(const IValue& value, const Change& change) {
  const auto changed = [&](const Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) {
    return changed(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<Tensor> tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = changed(tensor);
    }
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor.has_value() ? std::optional<Tensor>(changed(*tensor)) : tensor);
    }
    return tensors;
  }
  return value;
}

Stack with_tensors(const Stack& arguments, const std::function<Tensor(const Tensor&)>& change, at::Device device) {
  Stack changed;
  for (const auto& argument : arguments) {
    const bool is_device = argument.isDevice() && argument.toDevice().type() == kDevice;
    changed.push_back(is_device ? IValue(device) : with_tensors(argument, change));
  }
  return changed;
}

// Which argument a result is, if the operator returns one of its arguments (in-place, out=); -1 for a new tensor.
int argument_of(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  for (size_t index = 0; alias != nullptr && index < schema.arguments().size(); index++) {
    const auto* other = schema.arguments()[index].alias_info();
    if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
      return static_cast<int>(index);
    }
  }
  TORCH_CHECK(alias == nullptr, "the lagging device has no kernel for ", schema.name(), ", which makes a view");
  return -1;
}

bool is_random(const c10::OperatorHandle& op) {
  for (const auto& argument : op.schema().arguments()) {
    if (argument.name() == "generator") {
      return true;
    }
  }
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType) {
      return false;
    }
  }
  return true;
}

// Indices and numbers may be on the CPU; they are read now. Everything else must be on the device.
Tensor read_now(const Tensor& tensor, const std::string& name) {
  TORCH_CHECK(tensor.dim() == 0 || name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0,
              "Expected all tensors to be on the same device, but ", name, " got a CPU tensor of shape ",
              tensor.sizes(), " among those of the lagging device");
  auto copy = tensor.clone();
  return counted_as(tensor, copy);
}

// Compute on this thread, when the current stream has done what was given to it.
void compute_now(const c10::OperatorHandle& op, const Stack& arguments, Stack* stack) {
  const auto& schema = op.schema();
  synchronize(current_stream());
  auto own = with_tensors(arguments, [](const Tensor& each) { return is_ours(each) ? on_host(each) : each; }, at::kCPU);
  // Random numbers of the CPU's kernels come from its default generator, which has the state of ours meanwhile.
  at::Generator lent, source;
  at::Tensor before;
  if (is_random(op)) {
    source = default_generator();
    for (auto& argument : own) {
      if (argument.isGenerator()) {
        source = argument.toGenerator();
        TORCH_CHECK(source.device().type() == kDevice, "Expected a generator of the lagging device, got one of ",
                    source.device());
        argument = IValue();
      }
    }
    lent = at::globalContext().defaultGenerator(at::kCPU);
    before = lent.get_state();
    lent.set_state(source.get_state());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&own);
  }
  if (lent.defined()) {
    source.set_state(lent.get_state());
    lent.set_state(before);
  }
  for (size_t index = 0; index < schema.returns().size(); index++) {
    const int argument = schema.returns()[index].alias_info() ? argument_of(schema, index) : -1;
    if (argument >= 0) {
      stack->push_back(arguments[argument]);
      continue;
    }
    stack->push_back(with_tensors(own[index], [](const Tensor& host) {
      auto result = empty_like_meta(host);
      enqueue(current_stream(), "result", [to = on_host(result), host] { to.copy_(host); });
      return result;
    }));
  }
}

// Whether the operator could be run on meta tensors; `metas` is its stack then. Raises what the operator raises.
bool run_on_meta(const c10::OperatorHandle& op, Stack* metas) {
  try {
    op.callBoxed(metas);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

// Where the CPU's kernel returns another dtype than the meta one, which follows CUDA: the statistics of a layer norm.
void as_on_cpu(const c10::FunctionSchema& schema, const Stack& arguments, Stack& metas) {
  if (schema.name() == "aten::native_layer_norm") {
    const auto dtype = arguments[0].toTensor().scalar_type();
    const bool is_mixed = arguments[2].isTensor() && arguments[2].toTensor().scalar_type() != dtype;
    for (size_t index = 1; index < 3; index++) {
      metas[index] = metas[index].toTensor().to(is_mixed ? at::kFloat : dtype);
    }
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const bool depends_on_values =
      op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  if (depends_on_values || is_random(op) || !returns_tensors(schema)) {
    return compute_now(op, arguments, stack);
  }
  auto metas = with_tensors(arguments, [](const Tensor& each) { return is_ours(each) ? as_meta(each) : each; },
                            at::kMeta);
  const auto before = metas;
  if (!run_on_meta(op, &metas)) {
    return compute_now(op, arguments, stack);
  }
  for (size_t index = 0; index < arguments.size(); index++) {  // an `out` of another size
    if (arguments[index].isTensor() && is_ours(arguments[index].toTensor())) {
      const auto& tensor = arguments[index].toTensor();
      if (tensor.sizes() != before[index].toTensor().sizes()) {
        tensor.resize_(before[index].toTensor().sizes());
      }
    }
  }
  as_on_cpu(schema, arguments, metas);
  std::vector<Tensor> results;  // on the host, for those that are new
  for (size_t index = 0; index < schema.returns().size(); index++) {
    const int argument = argument_of(schema, index);
    Tensor host;
    if (argument >= 0) {
      stack->push_back(arguments[argument]);
    } else if (!metas[index].toTensor().defined()) {
      stack->push_back(Tensor());
    } else {
      auto result = empty_like_meta(metas[index].toTensor());
      host = on_host(result);
      stack->push_back(std::move(result));
    }
    results.push_back(std::move(host));
  }
  const auto name = schema.name();
  auto own = with_tensors(
      arguments, [&](const Tensor& each) { return is_ours(each) ? on_host(each) : read_now(each, name); }, at::kCPU);
  enqueue(current_stream(), schema.name().c_str(), [op, own = std::move(own), results = std::move(results)] {
    auto run = own;
    op.callBoxed(&run);
    for (size_t index = 0; index < results.size(); index++) {
      if (results[index].defined()) {
        TORCH_CHECK(results[index].sizes() == run[index].toTensor().sizes(), "expected ", results[index].sizes(),
                    ", got ", run[index].toTensor().sizes());
        results[index].copy_(run[index].toTensor());
      }
    }
  });
}

// --- copies -----------------------------------------------------------------------------------------------------------

// From pinned memory and to it the device copies while the host goes on; to other memory the host waits; from other
// memory the source has been read when this returns.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto stream = current_stream();
  const Tensor& host = is_ours(from) ? to : from;
  if (is_ours(from) && is_ours(to)) {
    enqueue(stream, "copy_", [from = on_host(from), to = on_host(to)] { to.copy_(from); });
  } else if (host.numel() != 0 && non_blocking && is_pinned(host.data_ptr())) {
    // Not `host` itself: a tensor that Python knows must not be released on a stream's thread.
    auto options = host.options().requires_grad(false);
    auto pinned = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), options);
    begin_use(pinned.data_ptr());
    const bool inwards = is_ours(to);
    auto ours = on_host(inwards ? to : from);
    enqueue(stream, "copy_", [pinned, ours, inwards] {
      inwards ? ours.copy_(pinned) : pinned.copy_(ours);
      end_use(pinned.data_ptr());
    });
  } else if (is_ours(to)) {
    enqueue(stream, "copy_", [from = from.detach().clone(), to = on_host(to)] { to.copy_(from); });
    if (!non_blocking) {
      synchronize(stream);
    }
  } else {
    synchronize(stream);
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(on_host(from));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// --- what changes a tensor's storage, and views -----------------------------------------------------------------------

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const auto nbytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() > 0 && nbytes > self.storage().nbytes()) {
    resize_storage(self.storage().unsafeGetStorageImpl(), nbytes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, empty({0}, self.scalar_type(), {}, {}, {}, {}).storage(), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) { record_use(self.storage().data_ptr(), stream.id()); }

// By its mathematical definition, as no fused attention knows this device.
int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

// --- the default generator, and what torch asks of an accelerator -----------------------------------------------------

struct Numbers final : at::CPUGeneratorImpl {
  Numbers() {
    device_ = at::Device(kDevice, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Numbers>(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  // torch composes these of others where a device has no kernel, and the CPU's own kernel rounds differently.
  for (const auto* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

at::Generator& default_generator() {
  static auto* found = new at::Generator(at::make_generator<Numbers>());
  return *found;
}

}  // namespace lagging
