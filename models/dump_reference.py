#!/usr/bin/env python3
"""Writes what the transformers library answers for a checkpoint, for `replayeval check model DIR --reference FILE`.

    python models/dump_reference.py MODEL --out DIR [--text FILE | --random-tokens SEED] [--tokens 256]

MODEL is a checkpoint folder or a hub name. DIR gets reference.safetensors and meta.json. The program itself needs neither
this file nor Python; this file needs torch, transformers (5.17.0 was used) and safetensors, and sentencepiece for a
tokenizer.model.

reference.safetensors, with S sequences of T tokens, L layers, hidden size H, vocabulary V:
  input_ids [S, T]; logits [S, T, V] of one FP32 forward pass; logits_fp64 [S, P, V] of the same pass in FP64 at
  decode_positions [P]; decode_logits [S, P, V] with one token a call from an empty cache; hidden_states [L + 1, Q, H] of
  sequence 0 at hidden_positions [Q], the input of layer 0 and every layer's output; cache.<layer>.conv_states and
  .recurrent_states of sequence 0 after all tokens; greedy_tokens [S, 32] after the first 32 tokens, left out where two
  candidates were closer than 0.01.
"""
import argparse
import contextlib
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

PROMPT, NEW, CLEAR_MARGIN = 32, 32, 0.01


def read_tokens(args, config):
    """[sequences, tokens] ids: consecutive pieces of a text, or drawn at random."""
    count = args.sequences * args.tokens
    if args.random_tokens is not None:
        generator = torch.Generator().manual_seed(args.random_tokens)
        return torch.randint(3, config.vocab_size, (args.sequences, args.tokens), generator=generator)
    text = args.text.read_text(encoding="utf-8")[: 40 * count]
    pieces = pathlib.Path(args.model) / "tokenizer.model"
    if pieces.exists():  # sentencepiece, which AutoTokenizer takes for other formats when it stands alone
        import sentencepiece

        ids = sentencepiece.SentencePieceProcessor(model_file=str(pieces)).encode(text)
    else:
        try:
            ids = transformers.AutoTokenizer.from_pretrained(args.model)(text, add_special_tokens=False)["input_ids"]
        except (OSError, ValueError) as error:
            sys.exit(f"{args.model}: no tokenizer: {error}; --random-tokens SEED needs none")
    if len(ids) < count:
        sys.exit(f"{args.text}: expected {count} tokens, got {len(ids)}; give a longer --text or fewer --tokens")
    return torch.tensor(ids[:count]).view(args.sequences, args.tokens)


class LayerRecorder:
    """Collects the residual stream of sequence 0 before the first layer and after each layer."""

    def __init__(self, model, positions):
        self.positions, self.states = positions, []
        layers = getattr(model, model.base_model_prefix).layers
        self.hooks = [layers[0].register_forward_pre_hook(self._before, with_kwargs=True)]
        self.hooks += [layer.register_forward_hook(self._after) for layer in layers]

    def _keep(self, hidden):
        self.states.append(hidden[0, self.positions].float())

    def _before(self, module, args, kwargs):
        self._keep(args[0] if args else kwargs["hidden_states"])

    def _after(self, module, args, output):
        self._keep(output[0] if isinstance(output, tuple) else output)

    def take(self):
        for hook in self.hooks:
            hook.remove()
        return torch.stack(self.states).contiguous()


def step(model, ids, cache, start):
    """Logits of ids [n, t] at positions start .. through the cache."""
    if model.config.model_type == "mamba2":  # no attention: no positions, and another name for the cache
        return model(input_ids=ids, cache_params=cache, use_cache=True).logits.float()
    positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape[0], -1)
    return model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=positions).logits.float()


def one_token_a_call(model, ids):
    """[1, T, V] for ids [1, T], from an empty cache."""
    cache = DynamicCache(config=model.config)
    return torch.cat([step(model, ids[:, t : t + 1], cache, t) for t in range(ids.shape[1])], 1)


def greedy(model, ids):
    """(tokens [1, NEW], smallest lead of the best logit) after ids [1, PROMPT]."""
    cache, tokens, lead = DynamicCache(config=model.config), [], float("inf")
    current, start = ids, 0
    while len(tokens) < NEW:
        best = step(model, current, cache, start)[0, -1].topk(2)
        lead = min(lead, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
        start += current.shape[1]
        current = torch.tensor([[tokens[-1]]])
    return torch.tensor([tokens]), lead


@contextlib.contextmanager
def double_for_float():
    """The library casts to fp32 by name here and there; within this block those names mean fp64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


@torch.no_grad()
def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, default=root / "datasets" / "sample" / "test" / "1.txt")
    parser.add_argument("--random-tokens", type=int, metavar="SEED", help="draw the ids instead of reading a text")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--no-fp64", action="store_true", help="for models that do not fit in memory in FP64")
    args = parser.parse_args()
    if args.tokens < 2 * PROMPT or args.sequences < 1:
        parser.error(f"expected at least {2 * PROMPT} tokens and one sequence")

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    ids = read_tokens(args, model.config)
    last = args.tokens - 1
    positions = sorted({0, 1, 2, 3, 4, last} | set(range(0, args.tokens, 16)))
    hidden_positions = sorted({0, 1, 2, 3, 4, last // 2, last})

    recorder = LayerRecorder(model, hidden_positions)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    out = {"input_ids": ids, "logits": logits, "decode_positions": torch.tensor(positions),
           "hidden_positions": torch.tensor(hidden_positions), "hidden_states": recorder.take()}

    decoded = torch.cat([one_token_a_call(model, ids[s : s + 1]) for s in range(args.sequences)])
    out["decode_logits"] = decoded[:, positions]

    cache = DynamicCache(config=model.config)
    step(model, ids[:1], cache, 0)
    for i, layer in enumerate(cache.layers):
        for kind in ("conv_states", "recurrent_states"):
            held = getattr(layer, kind, None)
            if held is not None and held.get(0) is not None:
                out[f"cache.{i}.{kind}"] = held[0][0].float()

    continued = [greedy(model, ids[s : s + 1, :PROMPT]) for s in range(args.sequences)]
    lead = min(one[1] for one in continued)
    if lead >= CLEAR_MARGIN:
        out["greedy_tokens"] = torch.cat([one[0] for one in continued])

    meta = {"model": args.model, "class": type(model).__name__, "transformers": transformers.__version__,
            "torch": torch.__version__, "greedy_min_top2_margin": lead,
            "decode_vs_forward_max_abs": (decoded - logits).abs().max().item()}
    if not args.no_fp64:
        model = model.double()
        with double_for_float():
            exact = model(input_ids=ids, use_cache=False).logits
        if exact.dtype != torch.float64:
            sys.exit(f"FP64 pass: expected float64 logits, got {exact.dtype}; use --no-fp64")
        out["logits_fp64"] = exact[:, positions].to(torch.float32)
        meta["fp32_forward_vs_fp64_max_abs"] = (logits.double() - exact).abs().max().item()
        meta["fp32_decode_vs_fp64_max_abs"] = (out["decode_logits"].double() - exact[:, positions]).abs().max().item()

    args.out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, args.out / "reference.safetensors")
    (args.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(f"{args.out / 'reference.safetensors'}: {args.sequences} x {args.tokens} tokens")
    for name, value in meta.items():
        print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
