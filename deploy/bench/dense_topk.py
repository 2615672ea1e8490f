#!/usr/bin/env python3
"""Times the dense way from a drafter's hidden rows to a tree, to stand beside `treespec bench topk`.

One matrix product with the head, float32 log-softmax over the vocabulary, top-k, copy to the host, and the best-first
tree with Python's heap: what an implementation in a tensor library does. Needs PyTorch; nothing else of this repository.

    python3 deploy/bench/dense_topk.py --vocab 49152,151936,248320 --hidden 4096 --rows 15 --k 64 --json dense.json

Stages are timed with a synchronisation behind each; "total" has none but the copy's own. Vocabularies take turns, so that
a slow moment of the machine hits all of them.
"""

import argparse
import heapq
import json
import statistics
import sys
import time

STAGES = ("gemm", "log_softmax", "top_k", "copy", "tree")


def build_tree(root, token_ids, log_probs, budget):
    """The tree of DDTree (arXiv 2604.12989): best first over cumulative log-probability, budget without the root.

    `token_ids[depth][rank]` and `log_probs[depth][rank]` are the candidates of each depth, best first. Returns the tokens,
    the parents (-1 for the root) and the cumulative log-probabilities in pop order. Ties go to the lower rank path.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    heap = []
    if log_probs and log_probs[0]:
        heap.append((-log_probs[0][0], (0,), 0))
    while heap and len(tokens) <= budget:
        negative, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        node = len(tokens)
        tokens.append(token_ids[depth][rank])
        parents.append(parent)
        scores.append(-negative)
        if rank + 1 < len(log_probs[depth]):
            sibling = -negative - log_probs[depth][rank] + log_probs[depth][rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth + 1 < len(log_probs) and log_probs[depth + 1]:
            child = -negative + log_probs[depth + 1][0]
            heapq.heappush(heap, (-child, (*ranks, 0), node))
    return tokens, parents, scores


class Dense:
    """A head of `vocab` rows with the hidden rows of a block, both random."""

    def __init__(self, torch, device, vocab, hidden, rows, k):
        generator = torch.Generator(device=device).manual_seed(vocab)
        options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        self.torch = torch
        self.device = device
        self.head = torch.randn(vocab, hidden, **options)
        # Logits with a standard deviation of 4: the best tokens of a row differ by about one, as a drafter's do.
        self.rows = torch.randn(rows, hidden, **options) * 4 * hidden**-0.5
        self.k = min(k, vocab)
        self.budget = k

    def synchronize(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def step(self, after_stage):
        """One draft; calls `after_stage` behind each of `STAGES`. Returns the number of nodes of the tree."""
        logits = self.rows @ self.head.T
        after_stage()
        log_probs = self.torch.log_softmax(logits.float(), dim=-1)
        after_stage()
        best = self.torch.topk(log_probs, self.k, dim=-1)
        after_stage()
        values, ids = best.values.cpu().tolist(), best.indices.cpu().tolist()
        after_stage()
        tokens, _, _ = build_tree(0, ids, values, self.budget)
        after_stage()
        return len(tokens)

    def stage_seconds(self):
        """Seconds of each of `STAGES`."""
        marks = [time.perf_counter()]

        def mark():
            self.synchronize()
            marks.append(time.perf_counter())

        self.step(mark)
        return [end - start for start, end in zip(marks, marks[1:])]

    def total_seconds(self):
        """Seconds of a whole draft."""
        self.synchronize()
        start = time.perf_counter()
        self.step(lambda: None)
        return time.perf_counter() - start


def spread(seconds):
    milliseconds = [value * 1e3 for value in seconds]
    return {"median": statistics.median(milliseconds), "min": min(milliseconds), "max": max(milliseconds)}


def numbers(text):
    values = [int(part) for part in text.split(",")]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError("positive numbers, separated by commas")
    return values


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("a positive number")
    return value


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--vocab", type=numbers, default="49152,151936,248320", help="rows of the head")
    parser.add_argument("--hidden", type=positive, default=4096, help="width of a hidden row")
    parser.add_argument("--rows", type=positive, default=15, help="depths of the tree")
    parser.add_argument("--k", type=positive, default=64, help="candidates per depth, and nodes of the tree")
    parser.add_argument("--repetitions", type=positive, default=30, help="measurements after the warm-up")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return parser.parse_args()


def measure(cases, repetitions):
    """Stage and total seconds of every case."""
    for case in cases:
        for _ in range(3):
            case.total_seconds()
    stages = [[] for _ in cases]
    totals = [[] for _ in cases]
    for _ in range(repetitions):
        for index, case in enumerate(cases):
            stages[index].append(case.stage_seconds())
            totals[index].append(case.total_seconds())
    return stages, totals


def main():
    args = arguments()
    try:
        import torch
    except ImportError:
        sys.exit("error: PyTorch is not installed for this Python (pip install torch)")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"error: no {args.device}: PyTorch sees no GPU")
    cases = [Dense(torch, device, vocab, args.hidden, args.rows, args.k) for vocab in args.vocab]
    with torch.inference_mode():
        stages, totals = measure(cases, args.repetitions)

    results = []
    print("vocab   " + "".join(f"{stage + ' ms':>16}" for stage in (*STAGES, "total")))
    for vocab, of_stages, total in zip(args.vocab, stages, totals):
        result = {"vocab": vocab}
        for stage, seconds in zip(STAGES, zip(*of_stages)):
            result[f"{stage}_ms"] = spread(seconds)
        result["total_ms"] = spread(total)
        results.append(result)
        cells = [result[f"{stage}_ms"]["median"] for stage in (*STAGES, "total")]
        print(f"{vocab:<8}" + "".join(f"{cell:>16.3f}" for cell in cells))
    if args.json:
        report = {
            "command": "deploy/bench/dense_topk.py",
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "config": {name: value for name, value in vars(args).items() if name != "json"},
            "results": results,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
