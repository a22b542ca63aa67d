// SPDX-License-Identifier: Apache-2.0
//
// An accelerator that is only pretended: tensors on "cuda" have memory of their own, which is
// counted and may run out, and every operation is computed by the kernels of the CPU.
//
// As on a device, operations whose tensors lie on different ones are refused (0-dimensional ones
// on the CPU and indices are taken), the host cannot read what lies there, integers have no
// matrix products, and attention does not keep its scores. What a device's kernels take beside
// their results, its random numbers and its rounding are not pretended.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <string>

namespace {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using std::optional;

constexpr auto KIND = c10::DeviceType::CUDA;
const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);
const c10::Device DEVICE(KIND, 0);
constexpr size_t HEADER = 64;  // in front of each allocation: its size

// ---- memory ------------------------------------------------------------------------------

std::atomic<int64_t> in_use{0}, peak{0}, capacity{int64_t(4) << 30};
void (*when_higher)(int64_t) = nullptr;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK_WITH(OutOfMemoryError, in_use + int64_t(size) <= capacity,
                     "The pretended device is out of memory: ", size, " bytes were wanted, ",
                     in_use.load(), " of ", capacity.load(), " are in use.");
    auto* start = static_cast<char*>(std::malloc(size + HEADER));
    *reinterpret_cast<size_t*>(start) = size;
    in_use += size;
    if (in_use > peak) {
      peak = in_use.load();
      if (when_higher) when_higher(peak);
    }
    return {start + HEADER, start, &Memory::drop, DEVICE};
  }
  static void drop(void* start) {
    if (!start) return;
    in_use -= *static_cast<size_t*>(start);
    std::free(start);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::drop; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- the same memory, seen from the host -------------------------------------------------

Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
  auto storage = tensor.storage();
  auto* data = static_cast<char*>(storage.mutable_data());
  auto seen = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                           c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}
optional<Tensor> host(const optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? optional<Tensor>(host(*tensor)) : std::nullopt;
}
Tensor device(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(DEVICE));
  host(made).copy_(tensor);
  return made;
}

// ---- making and moving tensors -----------------------------------------------------------

Tensor empty(IntArrayRef size, optional<ScalarType> type, optional<at::Layout>,
             optional<at::Device>, optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(type), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> type,
                     optional<at::Layout>, optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS,
                                           c10::dtype_or_default(type));
}
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  host(self).copy_(host(source));
  return self;
}
Tensor copy_from(const Tensor& source, const Tensor& to, bool) {
  host(to).copy_(host(source));
  return to;
}
Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (source.sizes() != to.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  auto needed = at::detail::computeStorageNbytesContiguous(size, self.element_size(),
                                                           self.storage_offset());
  auto& storage = const_cast<c10::Storage&>(self.storage());
  if (storage.nbytes() < needed) {
    auto larger = memory.allocate(needed);
    std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                 IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, source, 0, {length}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(),
                                      source.sizes(), source.strides());
}

// ---- attention whose scores are not kept -------------------------------------------------

enum Kind : int64_t { MATH = 0, FLASH = 1, EFFICIENT = 2 };

int64_t kind_of_attention(const Tensor& query, const Tensor&, const Tensor&,
                          const optional<Tensor>& mask, double, bool, optional<double>,
                          bool grouped) {
  if (!grouped) return EFFICIENT;
  auto narrow = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  return narrow && !mask ? FLASH : MATH;  // the other one takes no grouped heads
}
Tensor spread(const Tensor& heads, int64_t count) {
  return heads.size(1) == count ? heads : heads.repeat_interleave(count / heads.size(1), 1);
}
Tensor gathered(const Tensor& gradient, int64_t count) {
  if (gradient.size(1) == count) return gradient;
  return gradient.unflatten(1, {count, gradient.size(1) / count}).sum(2);
}
std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const optional<Tensor>& mask, double dropout, bool causal,
                                  optional<double> scale) {
  auto heads = query.size(1);
  return at::_scaled_dot_product_flash_attention_for_cpu(
      host(query), spread(host(key), heads), spread(host(value), heads), dropout, causal,
      host(mask), scale);
}
std::tuple<Tensor, Tensor, Tensor> attend_back(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const optional<Tensor>& mask, const Tensor& output, const Tensor& sums, double dropout,
    bool causal, optional<double> scale) {
  auto heads = query.size(1), groups = key.size(1);
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host(gradient), host(query), spread(host(key), heads), spread(host(value), heads),
      host(output), host(sums), dropout, causal, host(mask), scale);
  return {device(of_query), device(gathered(of_key, groups)), device(gathered(of_value, groups))};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask,
    bool, double dropout, bool causal, optional<double> scale) {
  auto [output, sums] = attend(query, key, value, mask, dropout, causal, scale);
  auto none = at::zeros({}, at::kLong);
  return {device(output), device(sums), device(none), device(none)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_back(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&,
    double dropout, std::array<bool, 4>, bool causal, optional<double> scale) {
  auto [of_query, of_key, of_value] = attend_back(gradient, query, key, value, mask, output, sums,
                                                  dropout, causal, scale);
  return {of_query, of_key, of_value, Tensor()};
}
using Flash = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor,
                         Tensor>;
Flash flash(const Tensor& query, const Tensor& key, const Tensor& value, double dropout,
            bool causal, bool, optional<double> scale) {
  auto [output, sums] = attend(query, key, value, std::nullopt, dropout, causal, scale);
  auto none = device(at::zeros({}, at::kLong));
  return {device(output), device(sums), none, none, query.size(2), key.size(2), none, none, none};
}
std::tuple<Tensor, Tensor, Tensor> flash_back(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&,
    optional<double> scale) {
  return attend_back(gradient, query, key, value, std::nullopt, output, sums, dropout, causal,
                     scale);
}

// ---- what devices have kernels for, and the CPU has not ----------------------------------

Tensor product(const Tensor& left, const Tensor& right, ScalarType type) {
  return device(at::matmul(host(left).to(type), host(right).to(type)));
}
Tensor& product_out(const Tensor& left, const Tensor& right, ScalarType type, Tensor& out) {
  host(out).copy_(at::matmul(host(left).to(type), host(right).to(type)));
  return out;
}
Tensor sum_of_product(const Tensor& start, const Tensor& left, const Tensor& right,
                      ScalarType type, const Scalar& beta, const Scalar& alpha) {
  auto wide = host(start).to(type);
  return device(at::addmm(wide, host(left).to(type), host(right).to(type), beta, alpha));
}
Tensor& sum_of_product_out(const Tensor& start, const Tensor& left, const Tensor& right,
                           ScalarType type, const Scalar& beta, const Scalar& alpha, Tensor& out) {
  auto wide = host(start).to(type);
  host(out).copy_(at::addmm(wide, host(left).to(type), host(right).to(type), beta, alpha));
  return out;
}
Tensor histc(const Tensor& values, int64_t bins, const Scalar& low, const Scalar& high) {
  auto counts = at::histc(host(values).to(at::kFloat), bins, low, high);
  return device(counts.to(values.scalar_type()));
}
Tensor depthwise(const Tensor& input, const Tensor& weight, IntArrayRef,
                 const optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                 IntArrayRef dilation) {
  return device(at::conv2d(host(input), host(weight), host(bias), stride, padding, dilation,
                           weight.size(0)));
}

// ---- everything else ---------------------------------------------------------------------

void check_place(const c10::OperatorHandle& op, const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() == KIND || tensor.dim() == 0) return;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", op.schema().name(),
              " got one on ", tensor.device());
}
void check_type(const c10::OperatorHandle& op, const Tensor& tensor) {
  static const std::set<std::string> products = {"aten::mm", "aten::bmm", "aten::addmm",
                                                 "aten::baddbmm", "aten::addmv", "aten::dot"};
  if (!tensor.defined() || !products.count(op.schema().name())) return;
  TORCH_CHECK(!at::isIntegralType(tensor.scalar_type(), true), op.schema().name(),
              " is not implemented on the device for ", tensor.scalar_type());
}
void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto takes_indices = op.schema().name().find("index") != std::string::npos;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      check_place(op, value.toTensor());
      check_type(op, value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& one : value.toTensorVector()) check_place(op, one);
    } else if (value.isOptionalTensorList() && !takes_indices) {
      for (const optional<Tensor>& one : value.toOptionalTensorVector())
        if (one) check_place(op, *one);
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", [](const Tensor& self, IntArrayRef size) {
    return at::native::view(self, size);
  });
  library.impl("_reshape_alias", [](const Tensor& self, IntArrayRef size, IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  library.impl("unfold", &at::native::unfold);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", [](const Tensor& self) {
    return at::_local_scalar_dense(host(self));
  });
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_fused_sdp_choice", &kind_of_attention);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_back);
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_back);
  library.impl("mm.dtype", &product);
  library.impl("mm.dtype_out", &product_out);
  library.impl("bmm.dtype", &product);
  library.impl("addmm.dtype", &sum_of_product);
  library.impl("addmm.dtype_out", &sum_of_product_out);
  library.impl("histc", &histc);
  library.impl("_conv_depthwise2d", &depthwise);
}
}  // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &kind_of_attention)
}  // namespace at::native

// torch asks for the class of this name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>(0);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
};
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" {
int64_t device_in_use() { return in_use; }
int64_t device_peak() { return peak; }
void device_reset_peak() { peak = in_use.load(); }
int64_t device_capacity() { return capacity; }
void device_set_capacity(int64_t bytes) { capacity = bytes; }
void device_when_higher(void (*call)(int64_t)) { when_higher = call; }
}
