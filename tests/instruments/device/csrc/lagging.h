// A lagging accelerator: an accelerator as torch sees one, whose memory is host memory and whose streams are threads.
//
// Work that is given to a stream runs on its thread, in order, and late: a seed decides which streams are slow. Blocks
// of memory belong to the stream on which they were allocated. The next allocation on that stream fills all that was
// freed with 0xFF (NaN, -1), in the order of the stream, since it might have got any of it: whoever still reads it computes
// with NaN. So the result of a program that forgets to wait, or that frees too early, is wrong in most seeds, and not by
// bad luck in one run of a thousand.
//
//   streams.cpp     threads, queues, delays, events, the device guard
//   memory.cpp      the caching allocator of the device, and pinned host memory
//   operators.cpp   every operator of aten, by the CPU's kernels
//   group.cpp       collectives, by gloo on the same memory
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace lagging {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;

using StreamId = c10::StreamId;
// Something that happens once, on a stream. The host and other streams can wait for it.
class Signal {
 public:
  explicit Signal(StreamId stream) : stream_(stream) {}
  void set();
  void wait();  // blocks the calling thread
  bool is_set();
  double seconds();  // when it was set

 private:
  const StreamId stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  double seconds_ = 0;
};
using SignalPtr = std::shared_ptr<Signal>;

using Task = std::function<void()>;

// --- streams ---

StreamId new_stream();
StreamId current_stream();  // of this thread
StreamId exchange_stream(StreamId stream);
c10::Stream as_stream(StreamId stream);

// Give work to a stream. `lags`: a delay may come before it.
void enqueue(StreamId stream, const char* what, Task task, bool lags = true);
SignalPtr record(StreamId stream);
void wait_on(StreamId stream, const SignalPtr& signal);  // the stream waits
void wait_on_host(const SignalPtr& signal);              // this thread waits, without Python's lock
void synchronize(StreamId stream);
void synchronize_all();

// Work that failed on a stream is reported where the host waits next, as by a real device.
void fail(const std::string& what);
void raise_failure();

// Wait for all streams; from then on they are late as `seed` says. `max_us` of 0 turns delays off.
void set_delays(uint64_t seed, int64_t max_us);

// --- memory ---

struct Counts {
  int64_t allocated = 0, peak = 0;
};
Counts counts();
void reset_peak();
void resize_storage(c10::StorageImpl* storage, size_t nbytes);
void record_use(const c10::DataPtr& ptr, StreamId stream);  // Tensor.record_stream

c10::Allocator* pinned_allocator();
bool is_pinned(const void* ptr);
// While a stream may use the pinned block behind `ptr`, it is not given to anybody else. `end_use` must follow.
void begin_use(const void* ptr);
void end_use(const void* ptr);

// --- random numbers ---

at::Generator& default_generator();

}  // namespace lagging
