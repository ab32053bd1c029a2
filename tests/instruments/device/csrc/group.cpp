// Collectives of the lagging device, by gloo on the same memory; and what Python calls of this library.
//
// As with NCCL: a collective starts when the current stream has come to it, runs on the group's own stream, and `wait`
// makes the current stream wait, not the host. The handle keeps the tensors alive until `wait`.
// A collective whose peer is lost, or does something else (see `compare_collectives`), does not end until `abort` ends all
// of the group: then streams go on without results, nothing is raised where a stream waits, and later collectives raise.
#include "lagging.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace lagging {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::Backend;
using c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensor on_host(const Tensor& tensor) {
  if (tensor.device().type() != kDevice) {
    return tensor;
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& tensor : tensors) {
    hosts.push_back(on_host(tensor));
  }
  return hosts;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& tensors : lists) {
    hosts.push_back(on_host(tensors));
  }
  return hosts;
}

// Whether ranks compare what they are about to do: gloo ends the process where ranks send different sizes.
std::atomic<bool> g_compares{false};

using FlagPtr = std::shared_ptr<std::atomic<bool>>;

void raise_aborted(bool aborted) {
  if (aborted) {
    C10_THROW_ERROR(DistBackendError, "the lagging group was aborted");
  }
}

class LaggingWork final : public c10d::Work {
 public:
  LaggingWork(SignalPtr done, FlagPtr failed, Tensors kept, bool blocks_host)
      : done_(std::move(done)), failed_(std::move(failed)), kept_(std::move(kept)), blocks_host_(blocks_host) {}

  bool isCompleted() override { return done_->is_set(); }
  bool isSuccess() const override { return !*failed_; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds) override {
    if (blocks_host_) {
      wait_on_host(done_);
      raise_failure();
      raise_aborted(*failed_);
    } else {
      wait_on(current_stream(), done_);
    }
    kept_.clear();
    return true;
  }
  bool wait() { return wait(kNoTimeout); }
  Tensors result() override { return kept_; }

 private:
  SignalPtr done_;
  FlagPtr failed_;
  Tensors kept_;
  bool blocks_host_;
};

// The sum of rows in rank order, as fsdp2 computes it on the CPU.
void sum_rows(const Tensors& rows, const Tensor& output, bool average) {
  auto total = rows[0].clone();
  for (size_t rank = 1; rank < rows.size(); rank++) {
    total.add_(rows[rank]);
  }
  if (average) {
    total.div_(static_cast<int64_t>(rows.size()));
  }
  output.copy_(total.view(output.sizes()));
}

class LaggingGroup final : public Backend {
 public:
  LaggingGroup(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_stream()), sending_(new_stream()),
        aborted_(std::make_shared<Signal>(stream_)) {}

  const std::string getBackendName() const override { return "laggingccl"; }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }

  // gloo cannot abort, but a message that times out closes the connections of its group, which ends all its waits.
  void abort() override {
    aborted_->set();
    for (int peer = 0; peer < size_; peer++) {
      try {
        Tensors nothing{at::zeros({1})};
        if (peer != rank_) {
          gloo_->recv(nothing, peer, kAbortTag)->wait(std::chrono::milliseconds(1));
        }
      } catch (const std::exception&) {
      }
    }
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue("broadcast", tensors, [=, own = on_host(tensors)](Backend& gloo) mutable {
      gloo.broadcast(own, options)->wait();
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto sum = options;
    const bool average = as_sum(sum.reduceOp);
    return issue("all-reduce", tensors, [=, own = on_host(tensors), size = size_](Backend& gloo) mutable {
      gloo.allreduce(own, sum)->wait();
      for (auto& tensor : own) {
        average ? tensor.div_(size) : tensor;
      }
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return issue("reduce", tensors, [=, own = on_host(tensors)](Backend& gloo) mutable {
      gloo.reduce(own, options)->wait();
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto touched = inputs;
    touched.insert(touched.end(), outputs[0].begin(), outputs[0].end());
    auto work = [=, out = on_host(outputs), in = on_host(inputs)](Backend& gloo) mutable {
      gloo.allgather(out, in, options)->wait();
    };
    return issue("all-gather", touched, std::move(work));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return issue("all-gather", {output, input}, [=, out = on_host(output), in = on_host(input)](Backend& gloo) {
      gather(gloo, out, in, options);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto touched = inputs;
    touched.insert(touched.end(), outputs.begin(), outputs.end());
    return issue("all-gathers", touched, [=, out = on_host(outputs), in = on_host(inputs)](Backend& gloo) {
      for (size_t index = 0; index < out.size(); index++) {
        gather(gloo, out[index], in[index], options);
      }
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto op = options.reduceOp;
    const bool average = as_sum(op);
    return issue("reduce-scatter", {output, input}, [=, out = on_host(output), in = on_host(input)](Backend& gloo) {
      scatter(gloo, out, in, average);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto op = options.reduceOp;
    const bool average = as_sum(op);
    auto touched = inputs;
    touched.insert(touched.end(), outputs.begin(), outputs.end());
    return issue("reduce-scatters", touched, [=, out = on_host(outputs), in = on_host(inputs)](Backend& gloo) {
      for (size_t index = 0; index < out.size(); index++) {
        scatter(gloo, out[index], in[index], average);
      }
    });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto work = [=, out = on_host(output), in = on_host(input)](Backend& gloo) mutable {
      gloo.alltoall_base(out, in, out_sizes, in_sizes, options)->wait();
    };
    return issue("all-to-all", {output, input}, std::move(work));
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto touched = outputs;
    for (const auto& list : inputs) {
      touched.insert(touched.end(), list.begin(), list.end());
    }
    return issue("scatter", touched, [=, out = on_host(outputs), in = on_host(inputs)](Backend& gloo) mutable {
      gloo.scatter(out, in, options)->wait();
    });
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto work = [=, own = on_host(tensors)](Backend& gloo) mutable { gloo.send(own, rank, tag)->wait(); };
    return issue("send", tensors, std::move(work), false, sending_);
  }

  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return issue("receive", tensors, [=, own = on_host(tensors)](Backend& gloo) mutable {
      gloo.recv(own, rank, tag)->wait();
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue("barrier", {}, [](Backend& gloo) { gloo.barrier(c10d::BarrierOptions())->wait(); }, true);
  }

 private:
  static constexpr int kAbortTag = 0x4c414701;

  // gloo has no average.
  static bool as_sum(ReduceOp& op) {
    const bool average = op == ReduceOp::AVG;
    op = average ? ReduceOp(ReduceOp::SUM) : op;
    return average;
  }

  static void gather(Backend& gloo, const Tensor& output, const Tensor& input, const c10d::AllgatherOptions& options) {
    auto own = input.clone();  // it may be a part of the output
    auto whole = output;
    gloo._allgather_base(whole, own, options)->wait();
  }

  static void scatter(Backend& gloo, const Tensor& output, const Tensor& input, bool average) {
    auto received = at::empty({gloo.getSize(), input.numel()}, input.options());
    auto own = input.contiguous().view(-1);
    auto all = received.view(-1);
    gloo._allgather_base(all, own, c10d::AllgatherOptions())->wait();
    Tensors rows;
    for (const auto& each : received.unbind(0)) {
      rows.push_back(each.chunk(gloo.getSize())[gloo.getRank()]);
    }
    sum_rows(rows, output, average);
  }

  WorkPtr issue(const char* what, Tensors touched, std::function<void(Backend&)> work, bool blocks_host = false,
                StreamId stream = 0) {
    raise_aborted(aborted_->is_set());
    issued_++;
    stream = stream == 0 ? stream_ : stream;
    wait_on(stream, record(current_stream()));
    auto failed = std::make_shared<std::atomic<bool>>(false);
    const bool compares = g_compares && stream == stream_;
    const auto first = touched.empty() ? 0 : static_cast<int64_t>(touched[0].nbytes());
    const auto kind = static_cast<int64_t>(std::hash<std::string>()(what)) + first;
    enqueue(stream, what, [gloo = gloo_, aborted = aborted_, failed, compares, kind, work = std::move(work)] {
      try {
        raise_aborted(aborted->is_set());
        if (compares && !are_alike(*gloo, kind)) {
          aborted->wait();
        }
        raise_aborted(aborted->is_set());
        work(*gloo);
      } catch (const std::exception& error) {
        if (!aborted->is_set() && !is_lost_peer(error.what())) {
          throw;
        }
        aborted->wait();
        *failed = true;
      }
    });
    return c10::make_intrusive<LaggingWork>(record(stream), failed, std::move(touched), blocks_host);
  }

  static bool are_alike(Backend& gloo, int64_t kind) {
    auto own = at::full({1}, kind, at::kLong);
    auto all = at::empty({gloo.getSize()}, at::kLong);
    gloo._allgather_base(all, own, c10d::AllgatherOptions())->wait();
    return all.eq(own).all().item<bool>();
  }

  static bool is_lost_peer(const std::string& what) {
    return what.find("Connection") != std::string::npos || what.find("pair closure") != std::string::npos;
  }

  c10::intrusive_ptr<Backend> gloo_;
  StreamId stream_;
  StreamId sending_;  // gloo's send ends when the other rank receives, which may itself send first
  SignalPtr aborted_;
  uint64_t issued_ = 0;
};

c10::intrusive_ptr<Backend> make_group(const c10::intrusive_ptr<Backend>& gloo) {
  return c10::make_intrusive<LaggingGroup>(gloo);
}

}  // namespace

PYBIND11_MODULE(lagging_device, m) {
  py::module_::import("torch.distributed");
  m.def("make_group", &make_group);
  m.def("compare_collectives", [] { g_compares = true; });
  m.def("set_delays", &set_delays, py::arg("seed"), py::arg("max_us"));
  m.def("synchronize", &synchronize_all);
  m.def("occupy", [](double seconds) {
    auto pause = [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
    enqueue(current_stream(), "occupy", pause, false);
  });
  m.def("reset_peak", &reset_peak);
  m.def("manual_seed", [](uint64_t seed) { default_generator().set_current_seed(seed); });
  m.def("get_rng_state", [] { return default_generator().get_state(); });
  m.def("set_rng_state", [](const Tensor& state) { default_generator().set_state(state); });
  m.def("counts", [] {
    const auto found = counts();
    py::dict named;
    named["allocated"] = found.allocated;
    named["peak"] = found.peak;
    return named;
  });
}

}  // namespace lagging
