"""The data of a run: documents as streams of tokens, and the batch of each step as a pure function of the step."""

from train.data.batches import Batch
from train.data.corpus import Corpus, Source
from train.data.errors import DataError
from train.data.opening import open_corpus
from train.data.prefetch import Prefetch
from train.data.vocabulary import Vocabulary

__all__ = ["Batch", "Corpus", "DataError", "Prefetch", "Source", "Vocabulary", "open_corpus"]
