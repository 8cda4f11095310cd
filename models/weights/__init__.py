"""Published checkpoints: DeepSeek-V3 and V2 in Hugging Face's layout, in and out."""

from models.weights.errors import WeightsError
from models.weights.reading import inspect, load
from models.weights.writing import save

__all__ = ["WeightsError", "inspect", "load", "save"]
