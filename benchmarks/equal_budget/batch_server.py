"""scripts/local_server.py with many requests at a time: their tokens are computed in common batches.

Use it where a model answers many short questions, as the target does here: on a processor, a batch of eight replies
takes about as long as two alone. Needs llama-cpp-python. Requests are those of scripts/local_server.py.
A sequence keeps its tokens after its reply, and a new request continues the sequence with which it shares most tokens.
If a running request computes a longer common beginning, such as a new document, the new request waits for it.
Replies at temperature 0 may depend on the other requests of a batch, by rounding; see the stored replies of meter.py.
"""

from __future__ import annotations

import argparse
import ctypes
import queue
import sys
import threading
from collections import abc
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))

import llama_cpp
import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from local_server import ApiError, Done, Handler, Request

BATCH = 256
PATIENCE = 32
"""A request waits for a running one only if that saves more tokens."""

TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass
class Job:
    """A request, its tokens, and the pieces of its reply as they are written."""

    request: Request
    tokens: list[int]
    pieces: queue.SimpleQueue[str | Done | ApiError] = field(default_factory=queue.SimpleQueue)
    sent: int = 0

    def send(self, text: str) -> None:
        """Send what a longer text adds; a character that may still change waits."""
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(whole) > self.sent:
            self.pieces.put(whole[self.sent :])
            self.sent = len(whole)


@dataclass
class Sequence:
    """A sequence of the model's context: the tokens that are computed, and the job that uses it."""

    number: int
    tokens: list[int] = field(default_factory=list)
    job: Job | None = None
    waiting: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    sampler: Any = None
    grammar: Any = None


def count_shared(tokens: abc.Sequence[int], wanted: abc.Sequence[int]) -> int:
    """Return how many tokens at the beginning are those of a prompt; its last token is always computed anew."""
    most = min(len(tokens), len(wanted) - 1)
    if tokens[:most] == wanted[:most]:
        return most
    return next(i for i in range(most) if tokens[i] != wanted[i])


class BatchEngine:
    """One model and one thread that computes all sequences together."""

    def __init__(self, path: str, threads: int, context: int, slots: int):
        self._llm = Llama(model_path=path, n_ctx=64, n_threads=threads, verbose=False)
        self._model = self._llm._model.model
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = context * slots, slots, True
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._sequences = [Sequence(number) for number in range(slots)]
        self._most = context
        tokens = {
            key: self._llm.detokenize([token], special=True).decode() if token >= 0 else ""
            for key, token in (("eos", self._llm.token_eos()), ("bos", self._llm.token_bos()))
        }
        self._format = Jinja2ChatFormatter(
            template=self._llm.metadata["tokenizer.chat_template"],
            eos_token=tokens["eos"],
            bos_token=tokens["bos"],
        )
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._pending: list[Job] = []
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, request: Request) -> Any:
        """Yield pieces of the text and its end, as the engine of scripts/local_server.py does."""
        text = self._format(messages=request.messages).prompt
        tokens = self._llm.tokenize(text.encode(), False, True)
        room = self._most - len(tokens)
        if room < 1 or (request.max_tokens or 1) > room:
            raise ApiError(
                400, f"{len(tokens)} prompt tokens exceed the context", "context_length_exceeded"
            )
        job = Job(request, tokens)
        self._jobs.put(job)
        while not isinstance(piece := job.pieces.get(), Done):
            if isinstance(piece, ApiError):
                raise piece
            yield piece
        yield piece

    def _run(self) -> None:
        while True:
            busy = [s for s in self._sequences if s.job]
            self._take_jobs(wait=not busy and not self._pending)
            for job in list(self._pending):
                if len(busy) < len(self._sequences) and not self._is_better_later(job, busy):
                    self._pending.remove(job)
                    busy.append(self._start(job))
            self._step(busy)

    def _take_jobs(self, *, wait: bool) -> None:
        """Move new jobs to those that are pending."""
        try:
            self._pending.append(self._jobs.get(block=wait))
            while True:
                self._pending.append(self._jobs.get(block=False))
        except queue.Empty:
            return

    def _is_better_later(self, job: Job, busy: abc.Sequence[Sequence]) -> bool:
        """Whether a running request will soon have computed more of a job's tokens than all sequences have now."""
        now = max(count_shared(s.tokens, job.tokens) for s in self._sequences)
        prompts = [s.job.tokens for s in busy if s.job and s.waiting and not s.written]
        return any(count_shared(prompt, job.tokens) > now + PATIENCE for prompt in prompts)

    def _start(self, job: Job) -> Sequence:
        """Give a job the free sequence, and the computed tokens, with which it shares most."""
        source = max(self._sequences, key=lambda s: count_shared(s.tokens, job.tokens))
        shared = count_shared(source.tokens, job.tokens)
        free = [s for s in self._sequences if s.job is None]
        chosen = source if source.job is None else min(free, key=lambda s: len(s.tokens))
        if chosen is source:
            llama_cpp.llama_memory_seq_rm(self._memory, chosen.number, shared, -1)
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, chosen.number, 0, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, source.number, chosen.number, 0, shared)
        chosen.tokens, chosen.waiting = job.tokens[:shared], job.tokens[shared:]
        chosen.job, chosen.written, chosen.sampler = job, [], self._build_sampler(job.request)
        if job.request.grammar:
            grammar = job.request.grammar.encode()
            chosen.grammar = llama_cpp.llama_sampler_init_grammar(self._vocab, grammar, b"root")
        return chosen

    def _build_sampler(self, request: Request) -> Any:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        sampling = request.sampling
        parts = []
        if sampling["temp"] == 0:
            parts.append(llama_cpp.llama_sampler_init_greedy())
        else:
            parts += [
                llama_cpp.llama_sampler_init_top_k(sampling["top_k"]),
                llama_cpp.llama_sampler_init_top_p(sampling["top_p"], 1),
                llama_cpp.llama_sampler_init_min_p(sampling["min_p"], 1),
                llama_cpp.llama_sampler_init_temp(sampling["temp"]),
                llama_cpp.llama_sampler_init_dist(request.seed),
            ]
        for part in parts:
            llama_cpp.llama_sampler_chain_add(chain, part)
        return chain

    def _step(self, busy: list[Sequence]) -> None:
        """Compute one batch: sequences that write first, then as many tokens of prompts as fit."""
        batch, size = self._batch, 0
        ends: list[tuple[Sequence, int]] = []
        for sequence in sorted(busy, key=lambda s: len(s.waiting)):
            part = sequence.waiting[: BATCH - size]
            for token in part:
                batch.token[size] = token
                batch.pos[size] = len(sequence.tokens)
                batch.n_seq_id[size] = 1
                batch.seq_id[size][0] = sequence.number
                batch.logits[size] = 0
                sequence.tokens.append(token)
                size += 1
            del sequence.waiting[: len(part)]
            if part and not sequence.waiting:
                batch.logits[size - 1] = 1
                ends.append((sequence, size - 1))
        batch.n_tokens = size
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            self._fail(busy, f"llama_decode returned {status}")
            return
        for sequence, index in ends:
            self._take_token(sequence, self._sample(sequence, index))

    def _sample(self, sequence: Sequence, index: int) -> int:
        """Sample a token; all tokens are checked against a grammar only if the first sample does not fit it."""
        token = int(llama_cpp.llama_sampler_sample(sequence.sampler, self._context, index))
        if sequence.grammar is None:
            return token
        single = np.array([(token, 1.0, 0.0)], TOKEN)
        self._apply(sequence.grammar, single)
        if single["logit"][0] == -np.inf:
            logits = llama_cpp.llama_get_logits_ith(self._context, index)
            tokens = np.zeros(self._llm.n_vocab(), TOKEN)
            tokens["id"] = np.arange(len(tokens))
            tokens["logit"] = np.ctypeslib.as_array(logits, (len(tokens),))
            self._apply(sequence.grammar, tokens)
            array = self._apply(sequence.sampler, tokens)
            token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(sequence.grammar, token)
        return token

    def _apply(self, sampler: Any, tokens: Any) -> Any:
        array = llama_cpp.llama_token_data_array(
            data=tokens.ctypes.data_as(llama_cpp.llama_token_data_p),
            size=len(tokens),
            selected=-1,
            sorted=False,
        )
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return array

    def _take_token(self, sequence: Sequence, token: int) -> None:
        job = sequence.job
        assert job is not None
        finish = ""
        if llama_cpp.llama_vocab_is_eog(self._vocab, token):
            finish = "stop"
        else:
            sequence.written.append(token)
            sequence.waiting = [token]
            if len(sequence.written) >= (job.request.max_tokens or self._most - len(job.tokens)):
                finish = "length"
        if not finish and not job.request.stop and not job.request.stream:
            return
        text = self._llm.detokenize(sequence.written, special=False).decode("utf-8", "replace")
        cut = min((at for stop in job.request.stop if (at := text.find(stop)) >= 0), default=-1)
        if cut >= 0:
            text, finish = text[:cut], "stop"
        if finish:
            count = len(sequence.written)
            usage = {"prompt_tokens": len(job.tokens), "completion_tokens": count}
            usage["total_tokens"] = sum(usage.values())
            self._release(sequence)
            job.pieces.put(text[job.sent :])
            job.pieces.put(Done(finish, usage))
        elif not job.request.stop:
            job.send(text)

    def _fail(self, busy: list[Sequence], reason: str) -> None:
        for sequence in busy:
            job = sequence.job
            assert job is not None
            self._release(sequence)
            llama_cpp.llama_memory_seq_rm(self._memory, sequence.number, 0, -1)
            sequence.tokens = []
            job.pieces.put(ApiError(500, reason))

    def _release(self, sequence: Sequence) -> None:
        llama_cpp.llama_sampler_free(sequence.sampler)
        if sequence.grammar is not None:
            llama_cpp.llama_sampler_free(sequence.grammar)
        sequence.job, sequence.sampler, sequence.grammar, sequence.waiting = None, None, None, []


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="path of the GGUF file")
    parser.add_argument("--name", required=True, help="model name that clients must send")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence at most")
    parser.add_argument("--slots", type=int, default=8, help="requests at a time")
    parser.add_argument("--longest", type=int, default=None, help="see scripts/local_server.py")
    args = parser.parse_args()
    Handler.engine = BatchEngine(args.model, args.threads, args.context, args.slots)  # type: ignore[assignment]
    Handler.name, Handler.longest = args.name, args.longest
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    print(f"serving {args.name} on http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
