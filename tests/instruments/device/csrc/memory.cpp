// The caching allocator of the device, ordered by stream, and pinned host memory.
#include "lagging.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace lagging {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRound = 512;

void* take_memory(size_t nbytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 256, nbytes) == 0, "no host memory left: ", nbytes, " bytes");
  std::memset(memory, kPoison, nbytes);
  return memory;
}

size_t rounded(size_t nbytes) { return (nbytes + kRound - 1) / kRound * kRound; }

struct Block {
  void* memory;
  size_t size;
  StreamId stream;
  std::set<StreamId> also_used_on;  // as told by Tensor.record_stream
  bool is_poisoned = false;         // or will be, when its stream has come to it
};

// A block that nobody may use is all poison. If it is not, somebody wrote to it who should have been done.
void check_poison(const Block& block) {
  const auto* bytes = static_cast<const unsigned char*>(block.memory);
  const auto* wrong = std::find_if(bytes, bytes + block.size, [](unsigned char each) { return each != kPoison; });
  if (wrong != bytes + block.size) {
    fail("a block of " + std::to_string(block.size) + " bytes of stream " + std::to_string(block.stream) +
         " was written after it had been freed, at byte " + std::to_string(wrong - bytes));
  }
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kDevice, 0);
    if (nbytes == 0) {
      return {nullptr, nullptr, &DeviceMemory::release, device};
    }
    Block* block = take(rounded(nbytes), current_stream());
    return {block->memory, block, &DeviceMemory::release, device};
  }

  static void release(void* context);

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    enqueue(current_stream(), "copy_data", [=] { std::memcpy(to, from, count); });
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    synchronize_all();
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [stream, blocks] : free_) {
      for (Block* block : blocks) {
        stats_.reserved_bytes[0].decrease(block->size);
        std::free(block->memory);
        delete block;
      }
      blocks.clear();
    }
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override { record_use(ptr, stream.id()); }

  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocation[0], &stats_.allocated_bytes[0], &stats_.reserved_bytes[0]}) {
      stat->reset_accumulated();
    }
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocation[0], &stats_.allocated_bytes[0], &stats_.reserved_bytes[0]}) {
      stat->reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {size_t{1} << 40, size_t{1} << 40}; }

  void note_use(Block* block, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream != block->stream) {
      block->also_used_on.insert(stream);
    }
  }

  Counts counts() {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& bytes = stats_.allocated_bytes[0];
    return {bytes.current, bytes.peak};
  }

 private:
  struct Late {
    Block* block;
    std::vector<SignalPtr> uses;
  };

  Block* take(size_t size, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_late_blocks();
    poison(stream);
    Block* block = take_free(size, stream);
    if (block == nullptr) {
      block = new Block{take_memory(size), size, stream, {}, false};
      stats_.reserved_bytes[0].increase(size);
    } else {
      block->is_poisoned = false;
      enqueue(stream, "allocate", [copy = *block] { check_poison(copy); }, false);
    }
    stats_.allocated_bytes[0].increase(block->size);
    stats_.allocation[0].increase(1);
    return block;
  }

  // The block that was freed last among those that fit, so that a use after free meets its next owner.
  Block* take_free(size_t size, StreamId stream) {
    auto& blocks = free_[stream];
    for (auto each = blocks.rbegin(); each != blocks.rend(); ++each) {
      if ((*each)->size >= size && (*each)->size <= size + size / 4) {
        Block* block = *each;
        blocks.erase(std::next(each).base());
        return block;
      }
    }
    return nullptr;
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated_bytes[0].decrease(block->size);
    stats_.allocation[0].decrease(1);
    if (block->also_used_on.empty()) {
      make_free(block);
      return;
    }
    Late late{block, {}};
    for (StreamId stream : block->also_used_on) {
      late.uses.push_back(record(stream));
    }
    block->also_used_on.clear();
    late_.push_back(std::move(late));
  }

  void make_free(Block* block) { free_[block->stream].push_back(block); }

  // An allocation may get any memory that is free on its stream, and write to it from this point of the stream on. Not
  // before: until then, who has freed a block may still read it on a stream that this one will have waited for.
  void poison(StreamId stream) {
    for (Block* block : free_[stream]) {
      if (!block->is_poisoned) {
        block->is_poisoned = true;
        enqueue(stream, "free", [copy = *block] { std::memset(copy.memory, kPoison, copy.size); }, false);
      }
    }
  }

  void take_back_late_blocks() {
    std::vector<Late> still;
    for (auto& late : late_) {
      if (std::all_of(late.uses.begin(), late.uses.end(), [](const SignalPtr& use) { return use->is_set(); })) {
        make_free(late.block);
      } else {
        still.push_back(std::move(late));
      }
    }
    late_ = std::move(still);
  }

  std::mutex mutex_;
  std::map<StreamId, std::vector<Block*>> free_;
  std::vector<Late> late_;
  DeviceStats stats_;
};

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

void DeviceMemory::release(void* context) {
  if (context != nullptr) {
    device_memory().give_back(static_cast<Block*>(context));
  }
}

// Host memory that the device may read and write while the host goes on. A block that is freed while it is in use waits
// for that, as in the allocator of CUDA.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) {
      return {nullptr, nullptr, &PinnedMemory::release, cpu};
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = free_[rounded(nbytes)];
    void* memory = nullptr;
    if (pool.empty()) {
      memory = take_memory(rounded(nbytes));
      blocks_[memory] = {rounded(nbytes), 0, false};
    } else {
      memory = pool.back();
      pool.pop_back();
    }
    blocks_[memory].is_owned = true;
    return {memory, memory, &PinnedMemory::release, cpu};
  }

  static void release(void* context);

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }

  bool has(const void* ptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(ptr) != blocks_.end();
  }

  void change_uses(const void* ptr, int by) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = find(ptr);
    TORCH_INTERNAL_ASSERT(found != blocks_.end());
    found->second.uses += by;
    make_free_if_unused(found);
  }

 private:
  struct Pinned {
    size_t size;
    int uses;
    bool is_owned;
  };
  using Blocks = std::map<const void*, Pinned>;

  Blocks::iterator find(const void* ptr) {
    auto found = blocks_.upper_bound(ptr);
    if (found == blocks_.begin()) {
      return blocks_.end();
    }
    --found;
    const bool within = static_cast<const char*>(ptr) < static_cast<const char*>(found->first) + found->second.size;
    return within ? found : blocks_.end();
  }

  void make_free_if_unused(Blocks::iterator found) {
    if (!found->second.is_owned && found->second.uses == 0) {
      auto* memory = const_cast<void*>(found->first);
      std::memset(memory, kPoison, found->second.size);
      free_[found->second.size].push_back(memory);
    }
  }

  void give_back(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(memory);
    found->second.is_owned = false;
    make_free_if_unused(found);
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::map<size_t, std::vector<void*>> free_;
};

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

void PinnedMemory::release(void* context) {
  if (context != nullptr) {
    pinned_memory().give_back(context);
  }
}

const bool is_registered = [] {
  c10::SetAllocator(kDevice, &device_memory());
  return true;
}();

}  // namespace

Counts counts() { return device_memory().counts(); }

void reset_peak() { device_memory().resetPeakStats(0); }

void record_use(const c10::DataPtr& ptr, StreamId stream) {
  if (ptr.get_context() != nullptr && ptr.get_deleter() == &DeviceMemory::release) {
    device_memory().note_use(static_cast<Block*>(ptr.get_context()), stream);
  }
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  const auto old_nbytes = storage->nbytes();  // the same size moves the memory too, as on CUDA and on the CPU
  auto fresh = device_memory().allocate(nbytes);
  const auto kept = std::min(nbytes, old_nbytes);
  if (kept > 0) {
    enqueue(current_stream(), "resize", [to = fresh.get(), from = storage->data(), kept] {
      std::memcpy(to, from, kept);
    });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

c10::Allocator* pinned_allocator() { return &pinned_memory(); }
bool is_pinned(const void* ptr) { return pinned_memory().has(ptr); }
void begin_use(const void* ptr) { pinned_memory().change_uses(ptr, 1); }
void end_use(const void* ptr) { pinned_memory().change_uses(ptr, -1); }

}  // namespace lagging
