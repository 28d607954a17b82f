"""Lightning callbacks: memory, throughput, samples of text, generated answers, export, and how to resume."""

from lit_fused.callbacks.export import ExportPretrained
from lit_fused.callbacks.generated_answers import GeneratedAnswers
from lit_fused.callbacks.peak_memory import PeakMemoryMonitor
from lit_fused.callbacks.progress import progress_bar
from lit_fused.callbacks.resume_hint import ResumeHint
from lit_fused.callbacks.sample_text import SampleText
from lit_fused.callbacks.throughput import TokenThroughput

__all__ = [
    "ExportPretrained",
    "GeneratedAnswers",
    "PeakMemoryMonitor",
    "ResumeHint",
    "SampleText",
    "TokenThroughput",
    "progress_bar",
]
