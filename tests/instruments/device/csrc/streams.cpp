// Streams as threads with queues, events, and the device guard through which torch reaches them.
#include "lagging.h"

#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace lagging {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::atomic<uint64_t> g_seed{0};
std::atomic<int64_t> g_max_us{0};
std::atomic<uint64_t> g_epoch{0};  // of the seed: a stream draws anew when it has changed

// A stream that does nothing until somebody waits for it goes on after so many of the longest delays, since another rank
// may need it.
constexpr int64_t kLongestHold = 200;

std::mutex g_failure_mutex;
std::string g_failure;

// One stream. Never destroyed: its thread may outlive the interpreter.
class Queue {
 public:
  explicit Queue(StreamId id) : id_(id), thread_([this] { run(); }) { thread_.detach(); }

  // Who is told while the lock is held wakes, finds it taken and sleeps again.
  void push(const char* what, Task task, bool lags) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      items_.push_back({what, std::move(task), lags});
    }
    changed_.notify_one();
  }

  // Somebody waits for this stream (1), or no longer (-1).
  void demand(int by) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      demands_ += by;
    }
    if (by > 0) {
      changed_.notify_one();
    }
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return items_.empty() && !is_running_;
  }

 private:
  struct Item {
    const char* what;
    Task task;
    bool lags;
  };

  void run() {
    {
      static std::mutex mutex;  // in a forked process the first call makes a pool anew, for which torch takes no lock
      std::lock_guard<std::mutex> lock(mutex);
      at::set_num_threads(1);
    }
    at::AutoDispatchBelowADInplaceOrView below;  // kernels only, for the whole thread
    while (true) {
      Item item;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        is_running_ = false;
        is_let_go_ = is_let_go_ && !items_.empty();
        changed_.wait(lock, [this] { return !items_.empty(); });
        item = std::move(items_.front());
        items_.pop_front();
        is_running_ = true;
      }
      if (item.lags) {
        lag();
      }
      try {
        item.task();
      } catch (const c10::Error& error) {
        fail(std::string(item.what) + ": " + error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(std::string(item.what) + ": " + error.what());
      }
    }
  }

  // One in five streams is never late, one now and then, one at each operation. Two do nothing until somebody waits for
  // them: so they are late however slowly the host runs.
  void lag() {
    if (epoch_ != g_epoch) {
      epoch_ = g_epoch;
      random_.seed(g_seed * 1000003 + static_cast<uint64_t>(id_));
      random_.discard(8);
      slowness_ = static_cast<int>(random_() % 5);
    }
    const int64_t max_us = g_max_us;
    if (max_us == 0 || slowness_ == 0 || (slowness_ == 1 && random_() % 4 != 0)) {
      return;
    }
    if (slowness_ > 2) {
      const auto hold = std::chrono::microseconds(kLongestHold * max_us);
      std::unique_lock<std::mutex> lock(mutex_);
      is_let_go_ = is_let_go_ || !changed_.wait_for(lock, hold, [this] { return demands_ > 0; });
      return;
    }
    const int64_t least = slowness_ == 2 ? max_us / 4 : 0;
    const auto us = least + static_cast<int64_t>(random_() % static_cast<uint64_t>(max_us - least + 1));
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  const StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool is_running_ = false;
  int demands_ = 0;
  bool is_let_go_ = false;  // nobody waited for it; until it has nothing to do
  uint64_t epoch_ = ~uint64_t{0};
  std::mt19937_64 random_;
  int slowness_ = 0;
  std::thread thread_;  // the last member: it uses the others
};

std::mutex g_streams_mutex;

std::vector<Queue*>& queues() {
  static auto* found = new std::vector<Queue*>{new Queue(0)};
  return *found;
}

Queue& queue(StreamId id) {
  std::lock_guard<std::mutex> lock(g_streams_mutex);
  return *queues().at(static_cast<size_t>(id));
}

thread_local StreamId t_current = 0;

}  // namespace

void Signal::set() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_set_ = true;
    seconds_ = now();
  }
  changed_.notify_all();  // whoever sets it holds a pointer to it
}

void Signal::wait() {
  if (is_set()) {
    return;
  }
  queue(stream_).demand(1);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
  }
  queue(stream_).demand(-1);
}

bool Signal::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_set_;
}

double Signal::seconds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return seconds_;
}

StreamId new_stream() {
  std::lock_guard<std::mutex> lock(g_streams_mutex);
  const auto id = static_cast<StreamId>(queues().size());
  queues().push_back(new Queue(id));
  return id;
}

StreamId current_stream() { return t_current; }

StreamId exchange_stream(StreamId stream) { return std::exchange(t_current, stream); }

c10::Stream as_stream(StreamId stream) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), stream); }

void enqueue(StreamId stream, const char* what, Task task, bool lags) {
  queue(stream).push(what, std::move(task), lags);
}

SignalPtr record(StreamId stream) {
  auto signal = std::make_shared<Signal>(stream);
  enqueue(stream, "record", [signal] { signal->set(); }, false);
  return signal;
}

void wait_on(StreamId stream, const SignalPtr& signal) {
  enqueue(stream, "wait", [signal] { signal->wait(); }, false);
}

void wait_on_host(const SignalPtr& signal) {
  // A kernel may need Python's lock, so this thread must not keep it while it waits.
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  signal->wait();
  if (state != nullptr) {
    PyEval_RestoreThread(state);
  }
}

void synchronize(StreamId stream) {
  wait_on_host(record(stream));
  raise_failure();
}

void synchronize_all() {
  size_t count = 0;
  {
    std::lock_guard<std::mutex> lock(g_streams_mutex);
    count = queues().size();
  }
  for (size_t id = 0; id < count; id++) {
    wait_on_host(record(static_cast<StreamId>(id)));
  }
  raise_failure();
}

void fail(const std::string& what) {
  std::lock_guard<std::mutex> lock(g_failure_mutex);
  if (g_failure.empty()) {
    g_failure = what;
  }
}

void raise_failure() {
  std::string failure;
  {
    std::lock_guard<std::mutex> lock(g_failure_mutex);
    failure.swap(g_failure);
  }
  TORCH_CHECK(failure.empty(), "the lagging device failed in earlier work: ", failure);
}

void set_delays(uint64_t seed, int64_t max_us) {
  synchronize_all();
  g_seed = seed;
  g_max_us = max_us;
  g_epoch++;
}

namespace {

c10::Device device() { return {kDevice, 0}; }

struct Event {
  SignalPtr signal;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device wanted) const override {
    TORCH_CHECK(wanted.index() <= 0, "there is one lagging device in a process, not number ", wanted.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return as_stream(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_stream(exchange_stream(stream.id())); }
  bool queryStream(const c10::Stream& stream) const override { return queue(stream.id()).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->signal = lagging::record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_on(stream.id(), static_cast<Event*>(event)->signal);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->signal->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_on_host(static_cast<Event*>(event)->signal);
    }
    raise_failure();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(second)->signal->seconds() - static_cast<Event*>(first)->signal->seconds());
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    record_use(ptr, stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace lagging
