"""One HTML page of a comparison. Layer: plan."""

from html import escape

from fsdp2.plan.alternatives import Comparison, row_of
from fsdp2.plan.prediction import Plan
from fsdp2.trace.drawing import COLOURS, amount, duration, lanes_svg, legend, memory_svg, page, table

__all__ = ["comparison_page"]


def comparison_page(comparison: Comparison) -> str:
    """Advice, the plan that was asked for (memory over time, its peak, lanes, collectives), and all others."""
    plan = comparison.asked
    header = ("settings", "tokens/s a rank", "step", "exposed", "peak", "host", "")
    others = table(header, map(row_of, comparison.plans), [not each.fits for each in comparison.plans])
    failed = "".join(f"<p>{escape(name)}: {escape(why)}</p>" for name, why in comparison.failed)
    title = f"{plan.rehearsal.num_params / 1e9:.2f} B parameters on {plan.config.world_size} x {plan.machine.name}"
    return page(
        title,
        [
            f"<p>{escape(plan.name)}</p><p><strong>{escape(comparison.advice)}</strong></p>",
            _memory(plan),
            _time(plan),
            f"<h2>Alternatives</h2>{others}{failed}",
            f"<p>Machine: {escape(plan.machine.source or plan.machine.name)}</p>",
        ],
    )


def _memory(plan: Plan) -> str:
    shown = {**plan.peak.nbytes, "context": plan.machine.context, "communicators": plan.communicators}
    rows = [(kind, amount(nbytes)) for kind, nbytes in shown.items() if nbytes]
    rows.append(("all", amount(plan.device_bytes)))
    verdict = "fits" if plan.fits else '<span class="bad">does not fit</span>'
    beyond = plan.machine.memory - plan.machine.context - plan.communicators
    drawn = memory_svg(plan.timeline, limit=beyond)
    return (
        f"<h2>Memory: {amount(plan.device_bytes)} of {amount(plan.machine.memory)}, {verdict}</h2>{drawn}"
        f"{table(('at the peak', 'bytes'), rows)}"
    )


def _time(plan: Plan) -> str:
    lanes = {span.lane for span in plan.rehearsal.spans}
    rows = [
        (kind.replace("_", "-"), str(plan.collectives.get(kind, "")), amount(nbytes))
        for kind, nbytes in plan.sent.items()
    ]
    return (
        f"<h2>Time: {duration(plan.seconds)} a step, {duration(plan.rehearsal.exposed)} of it exposed</h2>"
        f"{lanes_svg(plan.timeline)}{legend({lane: COLOURS[lane] for lane in COLOURS if lane in lanes})}"
        f"{table(('collective', 'number', 'sent by a rank'), rows)}"
    )
