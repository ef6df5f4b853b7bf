"""The figures, in the order of the report: one module each, imported when it is drawn."""

from dataclasses import replace
from importlib import import_module

from harness.plot.figure import Figure

FIGURES = {
    "throughput": "Training throughput by strategy",
    "step_breakdown": "Where the time of a step goes",
    "scaling": "Strong and weak scaling efficiency",
    "prediction": "Predicted against measured step time",
    "prediction_choice": "Regret of the predicted choice",
    "prediction_error": "Prediction error by part of the step",
    "validation": "Predicted against published steps of GPU clusters",
    "timeline": "One step of every rank, predicted and measured",
    "changes": "Changes of strategy while training",
    "pipeline_bubble": "Pipeline bubble",
    "stage_times": "Time of each pipeline stage",
    "step_time": "Time of every step",
    "memory": "Peak memory",
    "matmul": "Matrix multiplication on each device",
    "memory_bandwidth": "Memory bandwidth of each device",
    "summa": "One matrix product over all devices",
    "bandwidth": "Bandwidth against message size",
    "link_heatmap": "Links between every pair of ranks",
    "device_load": "Device load and temperature over time",
}


def load_figure(name: str) -> Figure:
    """Import a figure of FIGURES."""
    figure: Figure = import_module(f"{__name__}.{name}").FIGURE
    return replace(figure, name=name, title=FIGURES[name])
