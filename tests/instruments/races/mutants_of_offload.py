"""The mutants of what moves to host memory: steps in the background, their states, and activations."""

from tests.helpers.mutants import Mutant

__all__ = ["OF_OFFLOAD"]

PART, ACTIVATIONS = "optim.offloaded_part", "extras.activations"
STORE = """\
            try:
                self._store()
            finally:  # what could not be stored is in memory still
                self._publish(states)
                self._done = self._streams.record()
"""

OF_OFFLOAD: tuple[Mutant, ...] = (
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
)
