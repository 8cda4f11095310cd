"""Tokens a second of greedy generation on CPU, against transformers' generate with the same random weights.

python benchmarks/decode.py [--prompt 32] [--tokens 64] [--rounds 3] [--cores 1]

Both generate the same numbers of tokens from the same prompts and take turns. The time includes the prompts,
but not compilation and the first calls. Prompts are new in every round, because our engine reuses those that
it has served. The fastest round counts. The texts should be equal up to near ties; the share of equal tokens
is printed. On a machine that has other work, use --cores 1 and look at tokens per second of CPU time, because
threads that wait for each other spin.
"""

import argparse
import functools
import os
import tempfile
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import torch
import transformers

from models import weights
from models.decode import Engine, Limits, SamplingParams, decoder

SIZES: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1376,
    moe_intermediate_size=256,
    num_hidden_layers=6,
    first_k_dense_replace=1,
    num_attention_heads=8,
    num_key_value_heads=8,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    q_lora_rank=256,
    kv_lora_rank=128,
    qk_rope_head_dim=32,
    qk_nope_head_dim=64,
    v_head_dim=64,
    initializer_range=0.05,
    num_mtp_layers=0,
)


def shared_model():
    """Transformers' model with random weights, and the same weights for ours: model, config, params."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, *weights.load(folder)


def theirs(model, prompts, tokens):
    with torch.no_grad():
        out = model.generate(
            torch.tensor(prompts), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[:, prompts.shape[1] :].numpy()


def ours(engine, prompts, tokens):
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=tokens))
    return np.array([one.tokens for one in engine.run()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=32, help="number of tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens generated for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cores", type=int, help="number of cores that both may use (Linux); all if left out"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: needs at least 1 timed round")
    if options.cores:  # before JAX makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        torch.set_num_threads(options.cores)
    transformers.utils.logging.disable_progress_bar()
    model, config, params = shared_model()
    serving = decoder(config)
    print(
        "| batch | ours, tokens/s | transformers | ratio | ours, tokens/CPU s | transformers | ratio | equal tokens |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for batch in (1, 16):
        shape = options.rounds + 2, batch, options.prompt
        first, second, *others = np.random.default_rng(batch).integers(0, config.vocab, shape)
        room = options.prompt + options.tokens
        limits = Limits(
            max_requests=batch, max_positions=room, chunk_size=options.prompt, max_prefill=1 << 20
        )
        engine = Engine(serving, params, limits)
        runs = [
            functools.partial(ours, engine, tokens=options.tokens),
            functools.partial(theirs, model, tokens=options.tokens),
        ]
        texts = [run(first) for run in runs]
        for run in runs:
            run(second)  # some programs are compiled only after something was served
        took: list[list[tuple[float, float]]] = [[], []]
        for prompts in others:
            for run, times in zip(runs, took, strict=True):
                began = time.perf_counter(), time.process_time()
                run(prompts)
                times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        cells = []
        for clock in range(2):
            rates = [batch * options.tokens / min(one[clock] for one in times) for times in took]
            cells += [f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[0] / rates[1]:.2f}"]
        equal = (texts[0] == texts[1]).mean()
        print(f"| {batch} | {' | '.join(cells)} | {equal:.1%} |", flush=True)


if __name__ == "__main__":
    main()
