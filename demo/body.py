"""The demo's Qwen3 body: a batched forward pass over tensors under their checkpoint names, and its training."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from _ref.higgs import AUDIO_EMBEDDING, FINAL_NORM, LAYER, TEXT_EMBEDDING, body_shapes, rope_table
from corpus import make_batch

INT4_BLOCK = 32
REPORT_STEPS = 50
# Heads used in training only. Word starts, the rows that need the text, are one row in 16; without guides the body finds its
# place in the text late. After the first layer: the word before each word of the text and the word being spoken; before the
# last one: the word that comes next. Together they are the way to find the place.
GUIDES = {"before": 0, "spoken": 0, "upcoming": 2}
GUIDE_WEIGHT = 0.3


@dataclass(frozen=True)
class Training:
    """Steps, sequences a step, peak learning rate; shares are of the last steps.

    In the share `int4_share` the layers' weights are rounded to int4, so that the build that people run is what was trained.
    """
    steps: int = 2400
    batch: int = 16
    peak: float = 3e-3
    warmup: int = 100
    int4_share: float = 0.35
    decay: float = 0.02
    seed: int = 0


def initial_tensors(config, seed):
    """Random float32 tensors under checkpoint names; norms are one, layers that write to the residual stream smaller."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in body_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
            continue
        std = 0.05 if "embedding" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            std /= math.sqrt(2 * config.num_layers)
        tensors[name] = std * torch.randn(shape, generator=generator)
    return tensors


def round_int4(weight):
    """Symmetric int4 in blocks of 32 along the input, round to nearest; gradients pass straight through."""
    blocks = weight.detach().reshape(-1, INT4_BLOCK)
    peak = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / -8)
    rounded = ((blocks / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)
    return weight + (rounded - weight.detach())


def attention(config, x, w, rope):
    """Causal grouped-query attention with normalised queries and keys. [B, S, D] -> [B, S, heads * head_dim]"""
    def heads(name, count):
        return F.linear(x, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (count, config.head_dim)).transpose(1, 2)

    def turned(name, count):
        normal = F.rms_norm(heads(name, count), (config.head_dim,), w[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
        a, b = normal.chunk(2, -1)
        return torch.cat([a * rope[0] - b * rope[1], b * rope[0] + a * rope[1]], -1)

    q, k, v = turned("q", config.num_heads), turned("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def hidden_states(config, tensors, x, int4=False):
    """Input embeddings [B, S, D] -> hidden states after the final norm [B, S, D], list of those after each layer."""
    rope, between = rope_table(config, torch.arange(x.shape[1]), bf16=True), []
    for i in range(config.num_layers):
        prefix = LAYER.format(i)
        w = {n[len(prefix):]: t for n, t in tensors.items() if n.startswith(prefix)}
        if int4:
            w = {n: round_int4(t) if t.dim() == 2 else t for n, t in w.items()}
        normal = F.rms_norm(x, x.shape[-1:], w["input_layernorm.weight"], config.rms_norm_eps)
        x = x + F.linear(attention(config, normal, w, rope), w["self_attn.o_proj.weight"])
        normal = F.rms_norm(x, x.shape[-1:], w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gated = F.silu(F.linear(normal, w["mlp.gate_proj.weight"])) * F.linear(normal, w["mlp.up_proj.weight"])
        x = x + F.linear(gated, w["mlp.down_proj.weight"])
        between.append(x)
    return F.rms_norm(x, x.shape[-1:], tensors[FINAL_NORM], config.rms_norm_eps), between


def embed_rows(config, tensors, rows):
    """Sum of one lookup a codebook. [..., N] -> [..., D]"""
    offsets = torch.arange(config.num_codebooks) * config.audio_vocab_size
    return F.embedding(rows + offsets, tensors[AUDIO_EMBEDDING]).sum(-2)


def embed_example(config, tensors, example):
    """Prompt with reference rows laid over, then all rows but the last. -> [P + L - 1, D]"""
    ids = torch.tensor(example.ids)
    parts = F.embedding(ids.clamp(min=0), tensors[TEXT_EMBEDDING])
    if example.reference is not None:
        start = example.ids.index(-100)
        end = start + len(example.reference)
        parts = torch.cat([parts[:start], embed_rows(config, tensors, example.reference), parts[end:]])
    return torch.cat([parts, embed_rows(config, tensors, example.rows[:-1])])


def at_rows(states, batch):
    """The states that predict rows, of all examples. [B, S, D] -> [sum L, D]"""
    return torch.cat([h[len(e.ids) - 1:len(e.ids) - 1 + len(e.rows)] for h, e in zip(states, batch)])


def guide_loss(tensors, between, batch):
    """Mean cross-entropy of the guides; `before` is asked at prompt positions, the others at rows."""
    total = 0.0
    for guide, layer in GUIDES.items():
        labels = torch.cat([getattr(e, guide) for e in batch])
        states = torch.cat([h[:len(e.ids)] for h, e in zip(between[layer], batch)]) if guide == "before" \
            else at_rows(between[layer], batch)
        asked = labels >= 0
        total = total + F.cross_entropy(F.linear(F.rms_norm(states[asked], states.shape[-1:]), tensors[guide]), labels[asked])
    return total / len(GUIDES)


def batch_loss(config, tensors, batch, int4):
    """Loss to minimise, its cross-entropy alone, and the share of right ids: all, and those of codebook 0 that need the text."""
    inputs = [embed_example(config, tensors, e) for e in batch]
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    hidden, between = hidden_states(config, tensors, padded, int4)
    rows, weights = torch.cat([e.rows for e in batch]), torch.cat([e.weights for e in batch])
    logits = F.linear(at_rows(hidden, batch), tensors[AUDIO_EMBEDDING]).unflatten(-1, (config.num_codebooks, -1))
    losses = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none").view(rows.shape)
    right = (logits.detach().argmax(-1) == rows).float()
    hard = weights[:, 0] > 1
    plain = (losses * weights).sum() / weights.sum()
    loss = plain + GUIDE_WEIGHT * guide_loss(tensors, between, batch)
    return loss, plain, right[weights > 0].mean(), right[hard, 0].mean()


def learning_rate(plan, step):
    """Linear warm-up, then a half cosine to zero."""
    if step < plan.warmup:
        return plan.peak * (step + 1) / plan.warmup
    return plan.peak * 0.5 * (1 + math.cos(math.pi * (step - plan.warmup) / (plan.steps - plan.warmup)))


def optimizer_of(tensors, plan):
    """AdamW; matrices decay, norms do not."""
    matrices, norms = ([t for t in tensors.values() if (t.dim() == 2) == flat] for flat in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": plan.decay}, {"params": norms, "weight_decay": 0.0}],
                             betas=(0.9, 0.98))


def starting_tensors(config, corpus, seed):
    """The body and the guides' heads, ready to learn."""
    tensors = initial_tensors(config, seed)
    tensors |= {guide: torch.zeros(len(corpus.words) + 1, config.hidden_size) for guide in GUIDES}
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def train(config, corpus, plan, report=print):
    """Train from scratch. -> float32 tensors under checkpoint names"""
    rng, tensors = np.random.default_rng(plan.seed), starting_tensors(config, corpus, plan.seed)
    optimizer, recent, began = optimizer_of(tensors, plan), [], time.monotonic()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        int4 = step >= plan.steps * (1 - plan.int4_share)
        batch = make_batch(corpus, rng, plan.batch)
        loss, plain, right, hard = batch_loss(config, tensors, batch, int4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        optimizer.step()
        recent.append([loss.item(), plain.item(), right.item(), hard.item()])
        if step % REPORT_STEPS == REPORT_STEPS - 1:
            report("step {}: loss {:.4f}, cross-entropy {:.4f}, right {:.4f}, word starts and ends {:.4f}, {:.0f} s".format(
                step + 1, *np.mean(recent, 0), time.monotonic() - began))
            recent = []
    return {name: tensor.detach() for name, tensor in tensors.items() if name not in GUIDES}
