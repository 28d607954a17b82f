"""Lightning callbacks: average of weights, memory, throughput, samples, generated answers, export, checkpoints, hint to
resume, signals, why a run stopped, losses that are not finite, learning rates."""

from lit_fused.callbacks.export_pretrained import ExportPretrained
from lit_fused.callbacks.finite_watch import FiniteWatch
from lit_fused.callbacks.learning_rate import LearningRate
from lit_fused.callbacks.peak_memory import PeakMemoryMonitor
from lit_fused.callbacks.run_checkpoint import ResumeHint, RunCheckpoint
from lit_fused.callbacks.sample_text import SampleText
from lit_fused.callbacks.stop_on_signal import StopOnSignal
from lit_fused.callbacks.throughput import TokenThroughput
from lit_fused.callbacks.training_progress import progress_bar
from lit_fused.callbacks.weight_average import WeightAverage
