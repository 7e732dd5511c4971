"""Pass marks by precision, and why.

float32 differs from the reference by summation order only. float16 carries 11 bits through every layer. At int4 the marks for
the decoder against the original are what speech was seen to survive; against its own rounded weights only the kernel's int8
activations are left. Heads choose eight codes at once: one wrong in a thousand is already one in five seconds of speech. A greedy row may part
from the original's only where the original hardly decided: a margin of 1 is a likelihood ratio of e. Log-mel distances:
two sentences of one voice of the demo are 15 dB apart, the same sentence with another last word 8.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """Smallest cosine of hidden states (mean over positions) against the rounded and the original weights, smallest share of
    equal argmaxes teacher-forced and of the heads alone, largest relative error of a part, largest logit margin by which a greedy
    row may part from the original's, largest log-mel distance in dB."""

    rounded_cosine: float
    hidden_cosine: float
    top1: float
    heads_top1: float
    part_error: float
    greedy_margin: float
    log_mel: float


MARKS = {
    "fp32": Marks(rounded_cosine=0.99999, hidden_cosine=0.99999, top1=0.999, heads_top1=0.999, part_error=1e-4, greedy_margin=1e-2, log_mel=0.5),
    "fp16": Marks(rounded_cosine=0.999, hidden_cosine=0.999, top1=0.99, heads_top1=0.999, part_error=4e-3, greedy_margin=0.5, log_mel=1.0),
    "int4": Marks(rounded_cosine=0.999, hidden_cosine=0.99, top1=0.97, heads_top1=0.999, part_error=4e-3, greedy_margin=1.0, log_mel=3.0),
}
