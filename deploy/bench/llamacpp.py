#!/usr/bin/env python3
"""Times llama.cpp's greedy decoding of the eval prompts on the CPU, to stand beside `treespec bench engine`.

Three measurements, all on the prompts of an eval file (`tests/fixtures/eval32_f32.json`), whose chat template, applied,
must give the number of tokens that the file says:

* plain decoding, or the prompt lookup of the Python binding with N drafted tokens, in this process:
      python3 deploy/bench/llamacpp.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --mode prompt-lookup:4
* one call of M rows behind a context of 128 tokens, logits at every row, as a verifier needs them:
      python3 deploy/bench/llamacpp.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --rows 1,2,4,8,16,17,32
* whatever a running llama-server was started for (plain, a drafter, n-grams), by its own timings:
      python3 deploy/bench/llamacpp.py --server http://127.0.0.1:8080

The first two need llama-cpp-python, built for the processor it runs on, and nothing else of this repository:
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python
The third needs only Python.

The first token of an answer belongs to the prefill. "decode" is the other tokens over the time behind the prefill, and
"with prefill" all tokens over all the time. An end-of-answer token counts. A repetition asks every prompt once.
Threads of llama.cpp wait for each other by spinning: on a machine with other work the figures fall apart.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.error
import urllib.request

CONTEXT = 128


class Answer:
    """The tokens of one answer, the decoding steps behind the prefill, and the seconds of both parts."""

    def __init__(self, tokens, steps, prefill, decode):
        self.tokens = tokens
        self.steps = steps
        self.prefill = prefill
        self.decode = decode


class Binding:
    """A model in this process."""

    def __init__(self, llama_cpp, args):
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.llama_cpp = llama_cpp
        self.drafter = None
        if args.mode != "plain":
            self.drafter = LlamaPromptLookupDecoding(num_pred_tokens=args.mode)
        self.model = llama_cpp.Llama(
            model_path=args.model,
            n_ctx=args.n_ctx,
            n_threads=args.threads,
            n_threads_batch=args.threads,
            draft_model=self.draft if self.drafter else None,
            verbose=False,
        )
        self.drafts = 0
        self.vocab = self.model.n_vocab()
        self.format = Jinja2ChatFormatter(
            template=self.model.metadata["tokenizer.chat_template"],
            eos_token=self.text(self.model.token_eos()),
            bos_token=self.text(self.model.token_bos()),
        )

    def text(self, token):
        return self.model.detokenize([token], special=True).decode()

    def draft(self, tokens, **options):
        self.drafts += 1
        return self.drafter(tokens, **options)

    def tokenize(self, content):
        text = self.format(messages=[{"role": "user", "content": content}]).prompt
        return self.model.tokenize(text.encode(), add_bos=False, special=True)

    def best(self):
        """The most likely token behind the last evaluated one."""
        import numpy

        logits = self.llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def greedy(self, prompt):
        """Tokens without an end."""
        self.model.reset()
        if self.drafter:
            yield from self.model.generate(prompt, top_k=1, temp=0.0)
            return
        evaluate = prompt
        while True:
            self.model.eval(evaluate)
            evaluate = [self.best()]
            yield evaluate[0]

    def answer(self, prompt, max_tokens):
        tokens, self.drafts = [], 0
        start = time.perf_counter()
        for token in self.greedy(prompt):
            tokens.append(token)
            if len(tokens) == 1:
                prefilled = time.perf_counter()
            if len(tokens) >= max_tokens or token == self.model.token_eos():
                break
        end = time.perf_counter()
        # The binding drafts once ahead of every step.
        steps = self.drafts if self.drafter else len(tokens) - 1
        return Answer(tokens, steps, prefilled - start, end - prefilled)

    def call_seconds(self, rows):
        """Seconds of one call of `rows` tokens behind the context, which stays in the cache."""
        api, context = self.llama_cpp, self.model.ctx
        api.llama_memory_seq_rm(api.llama_get_memory(context), 0, CONTEXT, -1)
        batch = api.llama_batch_init(rows, 0, 1)
        batch.n_tokens = rows
        for row in range(rows):
            # Any tokens will do: no operation's cost depends on them.
            batch.token[row] = 100 + row
            batch.pos[row] = CONTEXT + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = True
        start = time.perf_counter()
        status = api.llama_decode(context, batch)
        api.llama_synchronize(context)
        seconds = time.perf_counter() - start
        api.llama_batch_free(batch)
        if status != 0:
            sys.exit(f"error: llama_decode of {rows} rows returned {status}")
        return seconds

    def rows(self, counts, repetitions):
        """Seconds of every repetition of every row count."""
        self.model.reset()
        self.model.eval([100 + token for token in range(CONTEXT)])
        seconds = [[] for _ in counts]
        for repetition in range(repetitions + 2):
            # The row counts take turns, so that a slow moment of the machine hits all of them.
            for index, count in enumerate(counts):
                # llama.cpp builds a new graph when the row count changes: that is not what a verifier pays in every step.
                self.call_seconds(count)
                elapsed = self.call_seconds(count)
                if repetition >= 2:
                    seconds[index].append(elapsed)
        return seconds


class Server:
    """A running llama-server."""

    def __init__(self, url):
        self.url = url.rstrip("/")

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            sys.exit(f"error: {self.url}{path}: {error}: {error.read().decode(errors='replace')}")
        except urllib.error.URLError as error:
            sys.exit(f"error: no llama-server at {self.url}: {error.reason}")

    def tokenize(self, content):
        messages = [{"role": "user", "content": content}]
        text = self.post("/apply-template", {"messages": messages})["prompt"]
        return self.post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def answer(self, prompt, max_tokens):
        options = {"n_predict": max_tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        reply = self.post("/completion", {"prompt": prompt, **options})
        timings = reply["timings"]
        steps = timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0)
        return Answer(reply["tokens"], steps, timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3)


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("a positive number")
    return value


def numbers(text):
    return [positive(part) for part in text.split(",")]


def mode(text):
    """"plain", or the number of drafted tokens."""
    name, _, drafted = text.partition(":")
    if name == "prompt-lookup" and drafted.isdigit():
        return positive(drafted)
    if text != "plain":
        raise argparse.ArgumentTypeError("plain or prompt-lookup:N")
    return text


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="FILE", help="GGUF file to run in this process")
    source.add_argument("--server", metavar="URL", help="llama-server to ask instead")
    parser.add_argument("--eval", metavar="FILE", default="tests/fixtures/eval32_f32.json", help="prompts and answers")
    parser.add_argument("--limit", type=positive, help="use the first N prompts only")
    parser.add_argument("--max-tokens", type=positive, default=200, help="tokens of an answer at most")
    parser.add_argument("--threads", type=positive, default=2, help="threads of this process's model")
    parser.add_argument("--n-ctx", type=positive, default=1024, help="context size of this process's model")
    parser.add_argument("--mode", type=mode, default="plain", help="plain or prompt-lookup:N, in this process")
    parser.add_argument("--rows", type=numbers, metavar="M,...", help="time calls of M rows instead of decoding")
    parser.add_argument("--repetitions", type=positive, default=3, help="measurements after the warm-up")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    if args.server and (args.rows or args.mode != "plain"):
        parser.error("--rows and --mode are for --model: a server has its mode from its own command line")
    return args


def prompts_of(runner, eval_file, limit):
    """Token ids of the prompts, and the reference answers."""
    with open(eval_file, encoding="utf-8") as file:
        cases = json.load(file)["prompts"][:limit]
    prompts = [runner.tokenize(case["prompt"]) for case in cases]
    for index, (case, prompt) in enumerate(zip(cases, prompts)):
        if len(prompt) != case["prompt_tokens"]:
            sys.exit(f"error: prompt {index} has {len(prompt)} tokens, {case['prompt_tokens']} in {eval_file}")
    return prompts, [case["token_ids"] for case in cases]


def decode(runner, args):
    prompts, references = prompts_of(runner, args.eval, args.limit)
    runner.answer(prompts[0], args.max_tokens)
    figures = {"decode_tokens_per_second": [], "with_prefill_tokens_per_second": [], "prefill_ms": []}
    for _ in range(args.repetitions):
        answers = [runner.answer(prompt, args.max_tokens) for prompt in prompts]
        tokens = sum(len(answer.tokens) for answer in answers)
        prefill = sum(answer.prefill for answer in answers)
        seconds = sum(answer.decode for answer in answers)
        figures["decode_tokens_per_second"].append((tokens - len(answers)) / seconds)
        figures["with_prefill_tokens_per_second"].append(tokens / (prefill + seconds))
        figures["prefill_ms"].append(prefill / len(answers) * 1e3)
    result = {name: spread(values) for name, values in figures.items()}
    steps = sum(answer.steps for answer in answers)
    result["tokens"] = tokens
    result["tokens_per_step"] = (tokens - len(answers)) / steps if steps else None
    # The reference is float32: quantised weights give other answers.
    result["equal_answers"] = sum(
        answer.tokens == reference[: len(answer.tokens)] for answer, reference in zip(answers, references)
    )
    for name in figures:
        cells = result[name]
        print(f"{name:<32}{cells['median']:>10.1f}  ({cells['min']:.1f} to {cells['max']:.1f})")
    print(f"{'tokens_per_step':<32}{result['tokens_per_step'] or 0:>10.2f}")
    print(f"{tokens} tokens, {result['equal_answers']} of {len(prompts)} answers equal to the float32 reference's")
    return [result]


def main():
    args = arguments()
    report = {"command": "deploy/bench/llamacpp.py", "config": {k: v for k, v in vars(args).items() if k != "json"}}
    if args.server:
        runner = Server(args.server)
    else:
        try:
            import llama_cpp
        except ImportError:
            sys.exit("error: llama-cpp-python is not installed for this Python (see this file's first lines)")
        runner = Binding(llama_cpp, args)
        report["llama_cpp_python"] = llama_cpp.__version__
        report["system"] = llama_cpp.llama_print_system_info().decode().strip()
    if args.rows:
        report["results"] = []
        print("rows          ms       min")
        for rows, seconds in zip(args.rows, runner.rows(args.rows, args.repetitions)):
            figures = spread([value * 1e3 for value in seconds])
            report["results"].append({"rows": rows, "ms": figures})
            print(f"{rows:<6}{figures['median']:>10.2f}{figures['min']:>10.2f}")
    else:
        report["results"] = decode(runner, args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
