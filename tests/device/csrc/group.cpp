// Collectives of the lagging device, by gloo on the same memory; and what Python calls of this library.
//
// As with NCCL: a collective starts when the current stream has come to it, runs on the group's own stream, and `wait`
// makes the current stream wait, not the host. The handle keeps the tensors alive until `wait`.
#include "lagging.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <string>
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

class LaggingWork final : public c10d::Work {
 public:
  LaggingWork(SignalPtr done, Tensors kept, bool blocks_host)
      : done_(std::move(done)), kept_(std::move(kept)), blocks_host_(blocks_host) {}

  bool isCompleted() override { return done_->is_set(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds) override {
    if (blocks_host_) {
      wait_on_host(done_);
      raise_failure();
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
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_stream()), sending_(new_stream()) {}

  const std::string getBackendName() const override { return "laggingccl"; }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }

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
    issued_++;
    stream = stream == 0 ? stream_ : stream;
    wait_on(stream, record(current_stream()));
    enqueue(stream, what, [gloo = gloo_, work = std::move(work)] { work(*gloo); });
    return c10::make_intrusive<LaggingWork>(record(stream), std::move(touched), blocks_host);
  }

  c10::intrusive_ptr<Backend> gloo_;
  StreamId stream_;
  StreamId sending_;  // gloo's send ends when the other rank receives, which may itself send first
  uint64_t issued_ = 0;
};

c10::intrusive_ptr<Backend> make_group(const c10::intrusive_ptr<Backend>& gloo) {
  return c10::make_intrusive<LaggingGroup>(gloo);
}

}  // namespace

PYBIND11_MODULE(lagging_device, m) {
  py::module_::import("torch.distributed");
  m.def("make_group", &make_group);
  m.def("set_delays", &set_delays, py::arg("seed"), py::arg("max_us"));
  m.def("synchronize", &synchronize_all);
  m.def("reset_peak", &reset_peak);
  m.def("manual_seed", [](uint64_t seed) { default_generator().set_current_seed(seed); });
  m.def("get_rng_state", [] { return default_generator().get_state(); });
  m.def("set_rng_state", [](const Tensor& state) { default_generator().set_state(state); });
  m.def("counts", [] {
    const auto found = counts();
    py::dict named;
    named["allocated"] = found.allocated;
    named["peak"] = found.peak;
    named["reserved"] = found.reserved;
    named["reused"] = found.reused;
    named["blocks"] = found.blocks;
    return named;
  });
}

}  // namespace lagging
