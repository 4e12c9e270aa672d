#!/usr/bin/env python3
"""Times the public Triton decode kernels of the vLLM fork Johnny-Liou/ReplaySSM as `replayeval bench decode` times
this program's: FP32 states of four layers in turn, inputs shared by layers and steps, whole flush cycles as a CUDA
graph of L steps, CUDA events over several replays. Needs a GPU, torch, triton and the fork's `vllm` package on
PYTHONPATH.

  replayeval bench decode --device cuda --state fp32 > ours.txt
  replayeval bench decode --device cuda --state fp32 --rows 1 >> ours.txt
  python3 reports/bench_peers.py --ours ours.txt [--json FILE] [--quick | --points FILE]

Every kernel is compared with a plain recurrence in FP64, then timed with its default launch settings and with the best
of a sweep (--quick: defaults only; --points: the JSON of an earlier sweep, whose best settings are taken). Behind each
line: how many times this program's time of the same run."""
import argparse, contextlib, itertools, json, os, re, subprocess, sys, time

T0 = time.time()
import torch
import triton
import vllm.model_executor.layers.fla.ops.fused_recurrent as gdn_conv
import vllm.model_executor.layers.fla.ops.fused_recurrent_replayssm as gdn_replay
import vllm.model_executor.layers.mamba.ops.mamba_ssm as mamba_conv
from vllm.model_executor.layers.mamba.ops.replayssm_config import override_replayssm_config
from vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only import (
    selective_state_update_replayssm_output_only as output_only)
from vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_state_and_output import (
    selective_state_update_replayssm_state_and_output as state_and_output)

L = 16
DEV = "cuda"
SHAPES = {"mamba2-h96": ("mamba2", 96, 80, 128, 8), "mamba2-h128": ("mamba2", 128, 64, 128, 8),
          "gdn-h32": ("gdn", 32, 128, 128, 16)}  # heads, head_dim (V), state_dim (K), groups (key heads)
BF, F32 = torch.bfloat16, torch.float32


class Layer:
    """State and rings of one layer; slot 0 is the null slot of these kernels."""

    def __init__(s, shape, rows, ring=True):
        kind, h, p, n, g = SHAPES[shape]
        slots = rows + 1
        s.state = torch.randn(slots, h, p, n, device=DEV, dtype=F32).mul_(0.5)
        if not ring:
            return
        s.g = torch.empty(slots, h, L, device=DEV, dtype=F32).uniform_(0.02, 0.2)
        if kind == "mamba2":
            s.x = torch.randn(slots, h, L, p, device=DEV, dtype=BF)
            s.b = torch.randn(slots, g, L, n, device=DEV, dtype=BF)
        else:
            s.g.neg_()
            s.d = torch.randn(slots, h, L, p, device=DEV, dtype=BF)
            k = torch.randn(slots, g, L, n, device=DEV, dtype=F32)
            s.k = torch.nn.functional.normalize(k, dim=-1).to(BF)


class Inputs:
    def __init__(s, shape, rows):
        kind, h, p, n, g = SHAPES[shape]
        s.slots = torch.arange(1, rows + 1, device=DEV, dtype=torch.int32)
        if kind == "mamba2":
            s.x = torch.randn(rows, h, p, device=DEV, dtype=BF)
            s.dt = torch.randn(rows, h, device=DEV, dtype=BF)
            s.b = torch.randn(rows, g, n, device=DEV, dtype=BF)
            s.c = torch.randn(rows, g, n, device=DEV, dtype=BF)
            s.out = torch.empty(rows, h, p, device=DEV, dtype=BF)
            s.bc = torch.empty(rows, g, L, device=DEV, dtype=F32)
        else:
            s.qkv = torch.randn(rows, 2 * g * n + h * p, device=DEV, dtype=BF)
            s.a = torch.randn(rows, h, device=DEV, dtype=BF)
            s.b = torch.randn(rows, h, device=DEV, dtype=BF)
            s.out = torch.empty(rows, 1, h, p, device=DEV, dtype=BF)


class Weights:
    def __init__(s, shape):
        kind, h, p, n, g = SHAPES[shape]
        if kind == "mamba2":
            s.a = -(torch.rand(h, device=DEV) + 1.0)
            s.bias = torch.rand(h, device=DEV) - 4.0
            s.d = torch.randn(h, device=DEV)
        else:
            s.a_log = torch.randn(h, device=DEV)
            s.bias = torch.randn(h, device=DEV)


def expand(v, *shape):
    return v.reshape(*v.shape, *([1] * (len(shape) - v.dim()))).expand(*shape)


# ---------------------------------------------------------------- calls: (shape, layer, weights, inputs, write_pos, is_flush, config)

def mamba_args(shape, l, w, i):
    _, h, p, n, _ = SHAPES[shape]
    rows = i.x.shape[0]
    return dict(state=l.state, x=i.x, dt=expand(i.dt, rows, h, p), A=expand(w.a, h, p, n), B=i.b, C=i.c,
                D=expand(w.d, h, p), dt_bias=expand(w.bias, h, p), dt_softplus=True,
                state_batch_indices=i.slots, out=i.out)


def call_mamba_conv(shape, l, w, i, pos, flush, config):
    with mamba_conv.override_ssm_config(config) if config else contextlib.nullcontext():
        mamba_conv.selective_state_update(**mamba_args(shape, l, w, i))


def replay_args(shape, l, w, i, pos, flush):
    return dict(**mamba_args(shape, l, w, i), x_cache=l.x, dt_cache=l.g, B_cache=l.b, write_pos=pos, is_flush=flush,
                max_cache_len=L)


def call_output_only(shape, l, w, i, pos, flush, config):
    with override_replayssm_config("mamba2_output_only", config) if config else contextlib.nullcontext():
        output_only(**replay_args(shape, l, w, i, pos, flush), bc_pre=i.bc)


def call_state_and_output(shape, l, w, i, pos, flush, config):
    with override_replayssm_config("mamba2_state_and_output", config) if config else contextlib.nullcontext():
        state_and_output(**replay_args(shape, l, w, i, pos, flush))


def call_gdn_conv(shape, l, w, i, pos, flush, config):
    _, hv, v, k, h = SHAPES[shape]
    if not config:
        gdn_conv.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=i.qkv, a=i.a, b=i.b, A_log=w.a_log, dt_bias=w.bias, scale=k**-0.5, initial_state=l.state,
            out=i.out, ssm_state_indices=i.slots, use_qk_l2norm_in_kernel=True)
        return
    bv, warps, stages = config
    rows = i.qkv.shape[0]
    gdn_conv.fused_recurrent_gated_delta_rule_packed_decode_kernel[(triton.cdiv(v, bv), rows * hv)](
        mixed_qkv=i.qkv, a=i.a, b=i.b, A_log=w.a_log, dt_bias=w.bias, o=i.out, h0=l.state, ht=l.state,
        ssm_state_indices=i.slots, scale=k**-0.5, stride_mixed_qkv_tok=i.qkv.stride(0), stride_a_tok=i.a.stride(0),
        stride_b_tok=i.b.stride(0), stride_init_state_token=l.state.stride(0),
        stride_final_state_token=l.state.stride(0), stride_indices_seq=1, H=h, HV=hv, K=k, V=v, BK=k, BV=bv,
        SOFTPLUS_THRESHOLD=20.0, USE_QK_L2NORM_IN_KERNEL=True, num_warps=warps, num_stages=stages)


def call_gdn_replay(shape, l, w, i, pos, flush, config):
    k = SHAPES[shape][3]
    more = dict(zip(("block_v", "num_warps", "num_stages", "nk"), config)) if config else {}
    gdn_replay.fused_recurrent_gated_delta_rule_replayssm(
        mixed_qkv=i.qkv, a=i.a, b=i.b, A_log=w.a_log, dt_bias=w.bias, scale=k**-0.5, initial_state=l.state,
        d_cache=l.d, k_cache=l.k, g_cache=l.g, out=i.out, ssm_state_indices=i.slots, write_pos=pos,
        use_qk_l2norm_in_kernel=True, **more)


def product(*lists):
    return list(itertools.product(*lists))


KERNELS = {  # name: (kind, has a ring, call, sweep)
    "selective_state_update": ("mamba2", False, call_mamba_conv, product((4, 8, 16, 32, 64), (1, 2, 4, 8))),
    "replayssm output_only": ("mamba2", True, call_output_only, product((8, 16, 32), (1, 2))),
    "replayssm state_and_output": ("mamba2", True, call_state_and_output, product((16, 32), (1, 2))),
    "packed_decode": ("gdn", False, call_gdn_conv, product((8, 16, 32, 64), (1, 2, 4), (3,))),
    "gdn replayssm": ("gdn", True, call_gdn_replay,
                            [(v, w, 3, nk) for v in (16, 32, 64, 128) for w in (1, 2, 4) for nk in (1, 2, 4, 8)
                             if v // w >= 16 and v * (128 // nk) // w <= 64 * 128]),
}


# ---------------------------------------------------------------- a plain recurrence in FP64

def softplus(x):
    return torch.where(x <= 20, torch.log1p(torch.exp(x)), x)


class Reference:
    """S of every row from checkpoint and ring, and its steps."""

    def __init__(s, shape, layer, w, start, ring):
        s.kind, s.h, s.p, s.n, s.g = SHAPES[shape]
        s.w = w
        s.state = layer.state[1:].double()
        if not ring:
            return
        for r, count in enumerate(start):
            S = s.state[r]
            for j in range(count):
                rate = layer.g[r + 1, :, j].double()
                if s.kind == "mamba2":
                    b = layer.b[r + 1, :, j].double().repeat_interleave(s.h // s.g, 0)
                    S = S * torch.exp(w.a.double() * rate)[:, None, None] + (
                        rate[:, None] * layer.x[r + 1, :, j].double())[:, :, None] * b[:, None, :]
                else:
                    k = layer.k[r + 1, :, j].double().repeat_interleave(s.h // s.g, 0)
                    S = S * torch.exp(rate)[:, None, None] + layer.d[r + 1, :, j].double()[:, :, None] * k[:, None, :]
            s.state[r] = S

    def step(s, i):
        rep = lambda x: x.double().repeat_interleave(s.h // s.g, 1)
        if s.kind == "mamba2":
            dt = softplus(i.dt.double() + s.w.bias.double())
            s.state = s.state * torch.exp(s.w.a.double() * dt)[:, :, None, None] + (
                dt[:, :, None] * i.x.double())[..., None] * rep(i.b)[:, :, None, :]
            return (s.state * rep(i.c)[:, :, None, :]).sum(-1) + s.w.d.double()[:, None] * i.x.double()
        rows = i.qkv.shape[0]
        q, k, v = i.qkv.double().split([s.g * s.n, s.g * s.n, s.h * s.p], 1)
        unit = lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        q, k = rep(unit(q.view(rows, s.g, s.n))) * s.n**-0.5, rep(unit(k.view(rows, s.g, s.n)))
        g = -torch.exp(s.w.a_log.double()) * softplus(i.a.double() + s.w.bias.double())
        s.state = s.state * torch.exp(g)[..., None, None]
        u = torch.sigmoid(i.b.double())[..., None] * (v.view(rows, s.h, s.p) - (s.state * k[:, :, None, :]).sum(-1))
        s.state = s.state + u[..., None] * k[:, :, None, :]
        return (s.state * q[:, :, None, :]).sum(-1)


def error(got, want):
    e = (got.double() - want).norm() / want.norm()
    return float(e) if torch.isfinite(e) else float("inf")


def check(name, shape, config, steps=20):
    """Largest relative error of an output step, and of the checkpoint at flushes, rows at different places."""
    kind, ring, call, _ = KERNELS[name]
    torch.manual_seed(3)
    start = [0, 5, 14, 15]
    rows = len(start)
    l, w = Layer(shape, rows, ring), Weights(shape)
    ref = Reference(shape, l, w, start, ring)
    y_error = s_error = 0.0
    pos = torch.tensor(start, device=DEV, dtype=torch.int32)
    for _ in range(steps):
        i = Inputs(shape, rows)
        i.out.fill_(float("nan"))
        flush = pos == L - 1
        call(shape, l, w, i, pos, flush, config)
        want = ref.step(i)
        y_error = max(y_error, error(i.out.view(want.shape), want))
        for r in range(rows):
            if not ring or bool(flush[r]):
                s_error = max(s_error, error(l.state[r + 1], ref.state[r]))
        pos = torch.where(flush, torch.zeros_like(pos), pos + 1)
    return y_error, s_error


# ---------------------------------------------------------------- timing

class Bench:
    def __init__(s, shape, rows, layers=4):
        s.shape, s.rows, s.kind = shape, rows, SHAPES[shape][0]
        torch.manual_seed(1)
        s.layers = [Layer(shape, rows) for _ in range(layers)]
        s.w, s.i = Weights(shape), Inputs(shape, rows)
        first = torch.arange(rows, device=DEV, dtype=torch.int32) % L
        zero = torch.zeros_like(first)
        s.cursors = {"staggered": [(first + t) % L for t in range(L)], "in step": [(zero + t) % L for t in range(L)],
                     "reads only": [zero + L // 2] * L}

    def seconds(s, name, config, phase="staggered", cycles=3):
        """A layer and step."""
        _, ring, call, _ = KERNELS[name]
        pos = s.cursors[phase]
        flush = [p == L - 1 for p in pos]
        call(s.shape, s.layers[0], s.w, s.i, pos[0], flush[0], config)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for t in range(L):
                for l in s.layers:
                    call(s.shape, l, s.w, s.i, pos[t], flush[t], config)
        graph.replay()
        if s.rows < 16:
            cycles *= 10
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(cycles):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * begin.elapsed_time(end) / (cycles * L * len(s.layers))


def sweep_of(name, shape, rows, points):
    if points is None:
        return KERNELS[name][3]
    return [tuple(r["config"]) for r in points
            if r["kernel"] == name and r["shape"] == shape and r["rows"] == rows and r["config"]]


def warm(part, parts, quick, points):
    """Fills Triton's cache with this part's share of the kernels: 16 rows give the same binaries as 256."""
    for rows in (16, 1):
        jobs = []
        for name, (kind, ring, call, _) in KERNELS.items():
            for shape in ("mamba2-h96", "mamba2-h128", "gdn-h32"):
                if SHAPES[shape][0] == kind:
                    own = [] if quick else sweep_of(name, shape, 256 if rows == 16 else 1, points)
                    jobs += [(name, shape, config) for config in [None] + own]
        # The binaries of both Mamba-2 shapes are the same, but where a default depends on the shape.
        seen, once = set(), []
        for name, shape, config in jobs:
            if config is None or (name, config) not in seen:
                once.append((name, shape, config))
            seen.add((name, config))
        jobs = once
        made = {shape: (Layer(shape, rows), Weights(shape), Inputs(shape, rows)) for shape in SHAPES}
        pos = torch.zeros(rows, device=DEV, dtype=torch.int32)
        for name, shape, config in jobs[part::parts]:
            try:
                l, w, i = made[shape]
                KERNELS[name][2](shape, l, w, i, pos, pos == L - 1, config)
            except Exception as e:
                print("warm:", name, shape, config, str(e)[:200], file=sys.stderr)
    torch.cuda.synchronize()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--quick", action="store_true")
    p.add_argument("--ours")
    p.add_argument("--json")
    p.add_argument("--only", default="")
    p.add_argument("--points", help="JSON of an earlier sweep: default settings and its best only")
    p.add_argument("--budget", type=float, default=1e9)
    p.add_argument("--rows", default="256,1")
    p.add_argument("--processes", type=int, default=14)
    p.add_argument("--warm", type=int)
    a = p.parse_args()
    points = json.load(open(a.points)) if a.points else None
    if a.warm is not None:
        return warm(a.warm, a.processes, a.quick, points)
    jobs = [subprocess.Popen([sys.executable, __file__, "--warm", str(i), "--processes", str(a.processes)] +
                             (["--quick"] if a.quick else []) + (["--points", a.points] if a.points else [])) for i in range(a.processes)]
    for j in jobs:
        if j.wait() != 0:
            print("warm: a process ended with", j.returncode, file=sys.stderr)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
          f"compiled after {time.time() - T0:.0f} s", flush=True)
    ours = {}
    if a.ours:
        rows = 256
        for line in open(a.ours):
            m = re.match(r"(\d+) rows, L = ", line)
            rows = int(m[1]) if m else rows
            m = re.match(r"(\S+)\s+fp32\s+(staggered|in step|reads only)\s+([\d.]+)", line)
            if m:
                ours[(m[1], rows, m[2])] = float(m[3])
    result = []
    for rows in map(int, a.rows.split(",")):
        for shape, (kind, *_rest) in SHAPES.items():
            bench = Bench(shape, rows)
            for name, (k, ring, call, sweep) in KERNELS.items():
                if k != kind or a.only not in name:
                    continue
                found = {}
                for config in [None] + ([] if a.quick else sweep_of(name, shape, rows, points)):
                    if config and time.time() - T0 > a.budget:
                        break
                    try:
                        found[config] = bench.seconds(name, config, cycles=1 if config else 3)
                    except Exception as e:
                        print("  left out:", name, config, str(e).splitlines()[0][:120] if str(e) else type(e))
                        torch.cuda.synchronize()
                if not found:
                    continue
                best = min(found, key=found.get)
                y, s = check(name, shape, best)
                row = dict(kernel=name, shape=shape, rows=rows, default=1e6 * found.get(None, float("nan")), config=best,
                           tried=len(found), y_error=y, state_error=s, times={})
                for phase in ("staggered", "in step", "reads only") if ring else ("every step",):
                    row["times"][phase] = 1e6 * min(bench.seconds(name, best, "staggered" if not ring else phase)
                                                    for _ in range(2))
                result.append(row)
                if a.json:
                    json.dump([{**r, "config": list(r["config"]) if r["config"] else None} for r in result],
                              open(a.json, "w"), indent=1)
                text = "  ".join(f"{phase} {t:7.1f}" for phase, t in row["times"].items())
                print(f"{shape:12s} {rows:4d} rows  {name:33s} default {row['default']:7.1f}  best of {len(found):2d} "
                      f"{str(best):22s} us: {text}   errors y {y:.1e} S {s:.1e}", flush=True)
                for phase, t in row["times"].items():
                    own = ours.get((shape, rows, "staggered" if phase == "every step" else phase))
                    if own:
                        print(f"{'':24s}{phase}: ours {own:.1f} us, theirs {t:.1f}: {t / own:.2f} times ours", flush=True)
            del bench
            torch.cuda.empty_cache()
    bad = [r for r in result if not (r["y_error"] < 2e-2 and r["state_error"] < 2e-2)]
    for r in bad:
        print("NOT RIGHT:", r["kernel"], r["shape"], r["y_error"], r["state_error"])
    print(f"done after {time.time() - T0:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
