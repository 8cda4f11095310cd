"""``scripts/prepare``: from text, JSONL and Parquet to shards of tokens that a run maps into memory."""
