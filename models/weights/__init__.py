"""Reading and writing published checkpoints: DeepSeek-V3 and V2 in Hugging Face's layout."""

from models.weights.errors import WeightsError
from models.weights.reading import inspect, load, open_lazily
from models.weights.tokenizer import Tokenizer, load_tokenizer
from models.weights.writing import save

__all__ = ["Tokenizer", "WeightsError", "inspect", "load", "load_tokenizer", "open_lazily", "save"]
