"""Timelines of steps: record a real one, or use that of a plan, and save them for Perfetto.

>>> from fsdp2 import trace
"""

from fsdp2.trace.timeline import Sample, Span, Timeline, chrome_trace, record, save

__all__ = ["Sample", "Span", "Timeline", "chrome_trace", "record", "save"]
