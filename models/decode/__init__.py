"""Generate text with a trained model: a cache of latents, prefill, decode, sampling."""

from models.decode.blocks import Blocks
from models.decode.cache import Rows, init_cache, write
from models.decode.engine import Engine
from models.decode.model import Decoder, decoder
from models.decode.prefix_cache import PrefixFolder
from models.decode.requests import Completion, Limits, RequestError, SamplingParams
from models.decode.sampling import Sampling, sample
from models.decode.scores import Score

__all__ = [
    "Blocks",
    "Completion",
    "Decoder",
    "Engine",
    "Limits",
    "PrefixFolder",
    "RequestError",
    "Rows",
    "Sampling",
    "SamplingParams",
    "Score",
    "decoder",
    "init_cache",
    "sample",
    "write",
]
