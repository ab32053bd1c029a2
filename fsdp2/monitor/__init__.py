"""What a run shows while it trains: throughput, exposed communication, memory, and the gradient's norm by unit.

>>> from fsdp2.monitor import JsonLines, Monitor
"""

from fsdp2.monitor.monitor import Monitor
from fsdp2.monitor.writers import JsonLines, MLflow, TensorBoard, WandB, Writer

__all__ = ["JsonLines", "MLflow", "Monitor", "TensorBoard", "WandB", "Writer"]
