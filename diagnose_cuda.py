#!/usr/bin/env python3
"""Which part, and in it which operator, does an execution provider compute wrong? Compares it with the CPU on this machine."""

import argparse
import json
import math
import sys
from pathlib import Path

import onnxruntime as ort

from voxport.errors import BY_SIGNALS, DONE, FAILED, UserError, run_script, say, start_quietly

if __name__ == "__main__":
    start_quietly()

from voxport.judge.diagnose import Dissection, Lab, NodeFinding, PartFinding, judge_parts, save_node, stand_in
from voxport.run.audio import check_output
from voxport.run.proof import machine_name
from voxport.run.session import CUDA, full_name


def make_parser() -> argparse.ArgumentParser:
    codes = f"exit codes: 0 it agrees with the CPU, 1 it does not, 2 wrong input or no such provider, {BY_SIGNALS}"
    p = argparse.ArgumentParser(prog="diagnose_cuda.py", description=__doc__, epilog=codes)
    p.add_argument("--model-path", type=Path, required=True, metavar="DIR", help="build folder to try")
    p.add_argument("--provider", default=CUDA, help=f"cuda, dml, coreml or an ONNX Runtime name (default: {CUDA})")
    p.add_argument("--save", type=Path, default=Path("diagnosis.npz"), metavar="NPZ",
                   help="where to keep the smallest failing node with its inputs (default: diagnosis.npz)")  # fmt: skip
    p.add_argument("--rehearse", metavar="OP",
                   help="without the provider: the CPU stands in, with zeros from operators of this type or name")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print the findings as one JSON object on stdout")
    return p


def open_lab(args: argparse.Namespace) -> Lab:
    """The build, and the provider or its stand-in. UserError if either is not there."""
    provider, offered = full_name(args.provider), ort.get_available_providers()
    if args.rehearse is None:
        if provider not in offered:
            raise UserError(f"no {provider} on this machine (onnxruntime {ort.__version__} offers {', '.join(offered)}),"
                            " so there is nothing to compare with the CPU")  # fmt: skip
        return Lab(args.model_path, provider)
    lab = Lab(args.model_path, provider, stand_in(args.rehearse, provider))
    if args.rehearse not in lab.operators():
        raise UserError(f"--rehearse {args.rehearse}: no node of {args.model_path} has this type or name")
    return lab


def describe(lab: Lab, title: str) -> str:
    """Software and device, for a report to their makers."""
    return "\n".join([
        f"onnxruntime {ort.__version__} for {ort.get_device()}, providers {', '.join(ort.get_available_providers())}",
        ort.get_build_info().strip(),
        f"machine {machine_name()}",
        f"{lab.folder} on {title}, against the CPU:",
    ])  # fmt: skip


def describe_part(finding: PartFinding) -> str:
    return f"{finding.part:16} {'DIFFERS' if finding.difference.is_wrong else 'agrees':8} {finding.difference}"


def judge(lab: Lab, findings: list[PartFinding], title: str) -> tuple[NodeFinding | None, str]:
    """Look into the first part that differs, or else into those that come near it. Returns the culprit and the verdict."""
    wrong = [f.part for f in findings if f.difference.is_wrong]
    for part in wrong[:1] or [f.part for f in findings if lab.is_suspect(f)]:
        node = Dissection(lab, part).find()
        if node is not None:
            name = node.node.name or node.node.output[0]
            return node, (f"verdict: {node.node.op_type} is wrong on {title}:"
                          f" on equal inputs {name} in {part} gives {node.difference}\n"
                          f"remedy: {node.remedy}; or speak with --provider cpu")  # fmt: skip
    if wrong:
        return None, (f"verdict: {wrong[0]} is wrong on {title}, though each operator that was tried is right alone:"
                      " the fault lies in how they are fused or scheduled\n"
                      "remedy: try another onnxruntime version, or speak with --provider cpu")  # fmt: skip
    return None, f"verdict: {title} computes this build as the CPU does"


def as_json(lab: Lab, findings: list[PartFinding], node: NodeFinding | None) -> dict:
    """Everything that was said. An error that is no finite number is null, as JSON has no word for it."""
    error = lambda d: d.error if math.isfinite(d.error) else None
    figures = lambda d: {"wrong": d.is_wrong, "error": error(d), "allowed": d.allowed, "fault": d.fault}
    parts = {f.part: figures(f.difference) for f in findings}
    culprit = node and {"part": node.part, "op": node.node.op_type, "name": node.node.name, "remedy": node.remedy}
    culprit = culprit and culprit | figures(node.difference)
    return {"provider": lab.provider, "onnxruntime": ort.__version__, "build": ort.get_build_info(), "machine": machine_name(),
            "parts": parts, "node": culprit}  # fmt: skip


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    check_output(args.save, ".npz")
    lab = open_lab(args)
    title = f"the stand-in for {lab.provider}" if args.rehearse else lab.provider
    stream = sys.stderr if args.json else sys.stdout
    say(describe(lab, title), stream)
    findings = []
    for finding in judge_parts(lab):
        say(describe_part(finding), stream)
        findings.append(finding)
    node, verdict = judge(lab, findings, title)
    say(verdict, stream)
    if node is not None:
        save_node(node, lab.folder, args.save)
        say(f"kept: {args.save} holds this node, its inputs, and what CPU and provider made of them", stream)
    if args.json:
        say(json.dumps(as_json(lab, findings, node)), sys.stdout)
    return FAILED if node is not None or any(f.difference.is_wrong for f in findings) else DONE


if __name__ == "__main__":
    sys.exit(run_script(main))
