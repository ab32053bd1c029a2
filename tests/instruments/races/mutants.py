"""Waits, records and keep-alives of the library, to be taken out one at a time."""

from tests.helpers.mutants import Mutant

__all__ = ["MUTANTS"]


BUCKET, REDUCTION, STEP, MEMORY = (f"runtime.{name}" for name in ("bucket", "reduction", "step", "storage"))
SCALED = "flat = _scaled(plan, flat, scaling.post, settings, streams, kept)  # [5]\n"

PART, ACTIVATIONS = "optim.offloaded_part", "extras.activations"
STORE = """\
            try:
                self._store()
            finally:  # what could not be stored is in memory still
                self._publish(states)
                self._done = self._streams.record()
"""

MUTANTS: tuple[Mutant, ...] = (
    # --- all-gathers ---
    Mutant("gather: compute does not wait", BUCKET, "under_way()\n", "pass\n", "plain"),
    Mutant(
        "gather: no event after it",
        BUCKET,
        "finish = partial(streams.wait, streams.record())",
        "finish = lambda: None",
        "plain",
    ),
    Mutant("gather: no wait for kept memory", BUCKET, "streams.wait(used)", "pass", "keeps storage"),
    Mutant(
        "gather: no room is made", BUCKET, "memory.make_room(source.base, prefetching)\n", "pass\n", "a block again"
    ),
    Mutant("gather: the collective is not waited for", "runtime.gather", "collective.wait(started)", "pass", "plain"),
    # --- memory that is released ---
    Mutant(
        "reshard: memory is freed at once",
        "runtime.source",
        "memory.release(self, group.channel.fqn)",
        "self.free()",
        "plain",
    ),
    Mutant("release: no event", MEMORY, "(storage, self.streams.record(), unit)", "(storage, None, unit)", "plain"),
    Mutant("release: taken back without a wait", MEMORY, "self.streams.wait(entry[1])", "pass", "a block again"),
    Mutant("release: freed without a wait", MEMORY, "self.streams.wait(event)", "pass", "plain"),
    # --- what the optimizer changes ---
    Mutant(
        "forward: gathers do not wait for the optimizer",
        STEP,
        "        self.follow_compute(self.post_optim_event)\n",
        "",
        "plain",
    ),
    Mutant(
        "forward: the optimizer's event is ignored",
        STEP,
        "event = event or streams.record()",
        "event = streams.record()",
        "optimizer on a stream",
    ),
    Mutant(
        "forward: the optimizer's event counts for ever",
        STEP,
        "        self.post_optim_event = None\n\n    def follow",
        "\n    def follow",
        "optimizer on a stream",
    ),
    # --- reductions ---
    Mutant(
        "reduction: no wait for the gradients",
        REDUCTION,
        "        streams.wait(ready)\n        kept",
        "        kept",
        "plain",
    ),
    Mutant(
        "reduction: gradients before a division are not kept",
        REDUCTION,
        "kept = [] if is_lazy else [*grads]",
        "kept = []",
        "reduced in fp16",
    ),
    Mutant(
        "reduction: nothing is kept until the end",
        REDUCTION,
        "    if not is_lazy:\n        yield partial(streams.wait, done)\n    if done",
        "    kept.clear()\n    if not is_lazy:\n        yield partial(streams.wait, done)\n    if done",
        "plain",
    ),
    Mutant("reduction: the collective is not waited for", "runtime.streams", "    wait(started)", "    pass", "plain"),
    Mutant(
        "reduction: the event is recorded before the scale",
        REDUCTION,
        f"        if not has_replicas:\n            {SCALED}        done = streams.record()\n",
        f"        done = streams.record()\n        if not has_replicas:\n            {SCALED}",
        "reduced in 16 bits",
    ),
    Mutant(
        "reduction: compute does not wait",
        REDUCTION,
        "        yield partial(streams.wait, done)\n    if done",
        "        pass\n    if done",
        "plain",
    ),
    Mutant("offload: the host does not wait", REDUCTION, "done.synchronize()", "pass", "offload"),
    Mutant(
        "offload: the host does not wait after a forward without gradients",
        "extras.host_memory",
        "copied.synchronize()",
        "pass",
        "offload",
    ),
    # --- replicas ---
    Mutant(
        "partials: compute does not wait",
        REDUCTION,
        "                yield partial(streams.wait, done)\n            _add",
        "                pass\n            _add",
        "replicas, accumulation",
    ),
    Mutant(
        "all-reduce: no wait for the reduce-scatter",
        REDUCTION,
        "            streams.wait(done)\n            _add",
        "            _add",
        "replicas, reduced in 16 bits",
    ),
    Mutant(
        "all-reduce: the collective is not waited for",
        REDUCTION,
        "streams.later(collective.wait, collective.start([flat], [flat]))",
        "collective.start([flat], [flat]) and None",
        "replicas, reduced in 16 bits",
    ),
    Mutant(
        "all-reduce: the inner output is not kept",
        "extras.shard_replicas",
        "kept += [flat, inner",
        "kept += [inner",
        "sharded replicas, mixed precision",
    ),
    Mutant(
        "all-reduce: the output before the cast is not kept",
        REDUCTION,
        "    kept.append(flat)  # allocated on the reduce-scatter stream, may be read on the all-reduce stream\n",
        "",
        "replicas, reduced in 16 bits",
    ),
    # --- hooks on a stream of the user's ---
    Mutant(
        "hook: its stream does not wait",
        "extras.all_reduce_hook",
        "        with self._stream:\n            streams.wait(ready)\n",
        "        with self._stream:\n",
        "hook on a stream",
    ),
    Mutant(
        "hook: nobody waits for it", "extras.all_reduce_hook", "        streams.wait(done)\n", "", "hook on a stream"
    ),
    # --- optimizers that step in the background ---
    Mutant("step: it does not wait for the gradients", PART, "self._streams.wait(ready)", "pass", "stepped_aside"),
    Mutant(
        "step: all-gathers do not wait",
        PART,
        "            self._streams.wait(self._done)\n        else:",
        "        else:",
        "stepped_aside",
    ),
    Mutant(
        "step: who looks does not wait",
        PART,
        "                self._streams.wait(self._done)\n\n    def _become_real",
        "\n    def _become_real",
        "stepped_aside",
    ),
    Mutant(
        "step: reductions may get the memory of gradients that it reads",
        PART,
        "            with stream():\n                self._streams.wait(self._done)\n",
        "            pass\n",
        "stepped_aside",
    ),
    Mutant("step: gradients are not kept", PART, "self._kept = grads", "pass", "stepped_aside"),
    Mutant(
        "step: its event is recorded before results are copied back",
        PART,
        STORE,
        "            done = self._streams.record()\n" + STORE.replace("self._streams.record()", "done"),
        "stepped_by_host",
    ),
    Mutant(
        "step: the host does not wait for the parameters that it steps",
        PART,
        "            event.synchronize()  # the host steps",
        "            pass  # the host steps",
        "stepped_by_host",
    ),
    Mutant("step: the host does not wait for states", PART, "self._done.synchronize()", "pass", "staged_states"),
    Mutant(
        "step: gradients are zeroed without a wait",
        "optim.offloaded",
        "        if not set_to_none:\n            self.wait()\n",
        "",
        "staged_states",
    ),
    Mutant("pending: who looks does not wait", "optim.pending", "        self.settle()\n", "", "staged_states"),
    Mutant(
        "states: they are fetched on another stream",
        PART,
        "            self._staged.fetch()",
        "            with self._streams.reducing():\n                self._staged.fetch()",
        "staged_states",
    ),
    Mutant(
        "states: who looks does not wait",
        "optim.offloaded",
        "        self.wait()\n        state: d",
        "        state: d",
        "staged_states",
    ),
    # --- activations in host memory ---
    Mutant(
        "activations: a copy to the host does not wait",
        ACTIVATIONS,
        "            streams.wait(ready)\n            self._host = ",
        "            self._host = ",
        "activations",
    ),
    Mutant(
        "activations: freed without a wait",
        ACTIVATIONS,
        "            streams_for(self._device).wait(self._done)\n            self._tensor = None",
        "            self._tensor = None",
        "activations",
    ),
    Mutant(
        "activations: used and freed while a copy reads them",
        ACTIVATIONS,
        "            self.wait()  # its copy",
        "            pass  # its copy",
        "activations",
    ),
    Mutant(
        "activations: a copy to the device does not wait",
        ACTIVATIONS,
        "            streams.wait(ready)\n            self._tensor.c",
        "            self._tensor.c",
        "activations",
    ),
    Mutant(
        "activations: compute does not wait for what comes back",
        ACTIVATIONS,
        "            saved.wait()\n",
        "            pass\n",
        "activations",
    ),
    Mutant(
        "activations: what comes back is not kept",
        ACTIVATIONS,
        "        self._arriving.append(saved)",
        "        pass",
        "activations",
    ),
    Mutant(
        "activations: what came back and was not used is dropped without a wait",
        ACTIVATIONS,
        "        for saved in [*self._arriving]:\n            self.arrived(saved)\n",
        "        self._arriving.clear()\n",
        "activations",
    ),
    # --- communication ---
    Mutant("comm: works are not waited for", "watch.exchange", "pending.wait()", "pass", "mixed precision, coalesced"),
    Mutant(
        "comm: results are completed before the wait",
        "extras.narrow",
        "        for work in self.works:\n            if work is not None:\n                work.wait()\n",
        "",
        "16 bits on the wire, coalesced",
    ),
    Mutant(
        "comm: messages are not waited for",
        "comm.gloo",
        "        for work in self.works:\n            work.wait()\n",
        "",
        "plain",
    ),
    Mutant(
        "comm: the sum is gathered before it is there", "comm.gloo", "self.scattering.wait()", "pass", "stage 0 on four"
    ),
    # --- whole matrices ---
    Mutant("exchange: what travels is not waited for", "optim.exchange", "self._work.wait()", "pass", "whole matrices"),
)
