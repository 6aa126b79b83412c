"""SequenceGroup: the rows of one request that has several: n samples, or the beams of a search.

    leader   prompt[:-1]            computed once, then the rows fork from it and the leader lets go
    row 0    prompt + its tokens    shares the prompt's blocks; its own start with the first write (copy-on-write)
    row 1    prompt + its tokens

A preempted group keeps the tokens of its rows and the state of its search. When it resumes, the leader computes the
prompt again (or finds it in the cache), the rows fork, and each computes its own tokens behind the prompt.

Owns: the rows, forking and re-ordering them, and which answers come out.
Does not: decide who runs (scheduler) or how beams are chosen (beam_search).
Invariants: rows are admitted, preempted and ended together; between steps every live row of a search has the same
number of tokens; blocks in use never exceed the prompt's + rows * (blocks behind the prompt + 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from cluster.core.logprobs import PromptLogprobs, TokenLogprob
from cluster.core.request import FinishReason, GenerationRequest, TokenDelta
from worker.beam_search import BeamParams, BeamResult, BeamSearch
from worker.grammar_port import GrammarProgress
from worker.group_stops import Decode, stop_finder
from worker.kvcache.block_manager import BlockManager
from worker.sequence import Sequence, SequenceStatus, ends_of


class _Answer(NamedTuple):
    tokens: tuple[int, ...]
    reason: FinishReason
    score: float | None = None
    logprobs: Seq[TokenLogprob] = ()


class SequenceGroup:
    """Created when the request is added. `decode`: tokens to text, for stop strings that end a row.

    `grammar`: the beginning of the grammar that every sample follows on its own; a beam search has none.
    """

    def __init__(
        self,
        request: GenerationRequest,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        decode: Decode | None = None,
        grammar: GrammarProgress | None = None,
    ) -> None:
        self._request = request
        self._max_tokens = max_tokens
        self._eos = eos_token_ids
        self._grammar = grammar
        self._serials = itertools.count()
        self._ended: list[tuple[Sequence, FinishReason]] = []  # best_of only: answers wait for each other
        sampling = request.sampling
        self.num_rows = sampling.num_rows
        self.withholds = sampling.num_rows > sampling.num_choices and not sampling.beam_width
        self._ends = stop_finder(sampling.stop, decode, sampling.min_tokens)
        self.search: BeamSearch | None = None
        self._beam_logprobs: dict[tuple[int, ...], tuple[TokenLogprob, ...]] = {}  # of finished beams, by their tokens
        if sampling.beam_width:
            params = BeamParams(
                width=sampling.beam_width,
                max_tokens=max_tokens,
                eos_token_ids=ends_of(sampling, eos_token_ids),
                length_penalty=sampling.length_penalty,
                early_stopping=sampling.early_stopping,
            )
            self.search = BeamSearch(params, self._ends)
        self.leader = Sequence(
            request, max_tokens, (), group=self, tokens=request.prompt_token_ids[:-1], computes_only=True
        )
        self._prompt_told = False
        self.rows = [self._new_row(index) for index in range(1 if sampling.beam_width else self.num_rows)]

    def seats_of(self, seq: Sequence) -> int:
        """How many of the running sequences `seq` stands for: all rows together stand for `num_rows`."""
        if seq.computes_only:
            return self.num_rows
        grows = self.search is not None and seq is self.rows[0]  # a search has fewer rows now and then
        return self.num_rows - len(self.rows) + 1 if grows else 1

    @property
    def num_candidates(self) -> int:
        """Next tokens wanted of every row: 0 when the rows sample."""
        return 0 if self.search is None else self.search.num_candidates

    def spare_blocks(self, block_size: int) -> int:
        """Blocks that the rows will take at once, beyond the leader's."""
        tokens = self.leader.num_tokens
        start = tokens // block_size if len(self.rows) > 1 else -(-tokens // block_size)  # one row takes over its block
        return sum(-(-row.num_tokens // block_size) - start for row in self.rows)

    def spread(self, manager: BlockManager) -> None:
        """The prompt is computed: the rows take over from the leader."""
        for row in self.rows:
            manager.fork(self.leader.seq_id, row.seq_id)
            self._start(row, self.leader.num_computed)
        manager.free(self.leader.seq_id)
        self.leader.status = SequenceStatus.FORKED

    def allocate_rows(self, manager: BlockManager) -> bool:
        """A prompt of one token has nothing to compute beforehand: each row gets its own. False: no row has blocks."""
        cached: list[int] = []
        for row in self.rows:
            hit = manager.allocate(row.seq_id, row.tokens, self._request.cache_salt)  # its own blocks, when resumed
            if hit is None:
                self.release(manager)
                return False
            cached.append(hit)
        self.leader.first_cached = 0
        self.leader.status = SequenceStatus.FORKED
        for row, hit in zip(self.rows, cached, strict=True):
            self._start(row, hit)
        return True

    def release(self, manager: BlockManager) -> None:
        """Free the blocks of all rows; their tokens stay."""
        for seq in (self.leader, *self.rows):
            manager.free(seq.seq_id)
            seq.num_computed = 0
            seq.candidates, seq.candidate_logprobs = (), ()
            seq.status = SequenceStatus.WAITING

    def came_to_stop(self, row: Sequence) -> bool:
        """Whether a sample's newest token completed a stop string; it ends there, for best_of ranks what ended."""
        return self._ends is not None and self._ends(tuple(row.tokens[row.num_prompt_tokens :]))

    def end_row(self, row: Sequence, reason: FinishReason, manager: BlockManager) -> list[TokenDelta]:
        """A sample is complete. With best_of, the answers come when the last one is."""
        manager.free(row.seq_id)
        row.status = SequenceStatus.FINISHED
        self.rows.remove(row)
        if not self.withholds:
            return []
        self._ended.append((row, reason))
        if self.rows:
            return []
        best = sorted(self._ended, key=lambda end: (-end[0].logprob / end[0].num_output_tokens, end[0].index))
        answers = [
            _Answer(tuple(row.tokens[row.num_prompt_tokens :]), reason, logprobs=row.logprobs) for row, reason in best
        ]
        return self._answers(answers[: self._request.sampling.num_choices])

    def advance(self, manager: BlockManager) -> list[TokenDelta]:
        """Every beam has its candidates: choose the next beams. Returns the answers when the search is over."""
        search = self.search
        assert search is not None
        moves = search.advance([row.candidates for row in self.rows])
        self._note_logprobs(search.results())
        if search.done:
            found = search.results()[: self._request.sampling.num_choices]
            answers = [
                _Answer(r.tokens, r.finish_reason, r.score, self._beam_logprobs.get(r.tokens, ())) for r in found
            ]
            missing = self._request.sampling.num_choices - len(found)  # only where no token had a chance
            return self._answers(answers + missing * [_Answer((), FinishReason.LENGTH)])
        heirs: list[Sequence] = []
        for place, (parent, _) in enumerate(moves):
            first = all(parent != earlier for earlier, _ in moves[:place])
            heirs.append(self.rows[parent] if first else self._fork(self.rows[parent], manager))
        for row in self.rows:
            if row not in heirs:
                manager.free(row.seq_id)
                row.status = SequenceStatus.FINISHED
        told = [self._told(self.rows[parent], token) for parent, token in moves]
        for row, (_, token), logprobs in zip(heirs, moves, told, strict=True):
            row.tokens.append(token)
            row.logprobs += logprobs
            row.candidates, row.candidate_logprobs = (), ()
        self.rows = heirs
        return []

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's log probabilities where they were asked for; once, for the request's first delta."""
        if self._prompt_told:
            return None
        self._prompt_told = True
        return self.leader.all_prompt_logprobs()

    def _note_logprobs(self, results: Seq[BeamResult]) -> None:
        """Keep those of beams that ended in this step: their rows live no longer."""
        if self._request.sampling.logprobs is None:
            return
        by_tokens = {tuple(row.tokens[row.num_prompt_tokens :]): row for row in self.rows}
        for result in results:
            parent = by_tokens.get(result.tokens[:-1])
            if parent is not None and result.tokens not in self._beam_logprobs:
                self._beam_logprobs[result.tokens] = (*parent.logprobs, *self._told(parent, result.tokens[-1]))

    def _told(self, parent: Sequence, token: int) -> tuple[TokenLogprob, ...]:
        """The log probability of a beam's next token, where they were asked for."""
        if not parent.candidate_logprobs:
            return ()
        place = next(place for place, (candidate, _) in enumerate(parent.candidates) if candidate == token)
        return (parent.candidate_logprobs[place],)

    def _answers(self, answers: list[_Answer]) -> list[TokenDelta]:
        asked = self._request.sampling.logprobs is not None
        return [
            TokenDelta(
                request_id=self._request.request_id,
                token_ids=answer.tokens,
                cached_tokens=self.leader.first_cached,
                finish_reason=answer.reason,
                choice=index,
                score=answer.score,
                more=index < len(answers) - 1,
                logprobs=tuple(answer.logprobs) if asked else None,
                prompt_logprobs=self.prompt_logprobs(),
            )
            for index, answer in enumerate(answers)
        ]

    def _new_row(self, index: int) -> Sequence:
        sampling = self._request.sampling
        row = Sequence(
            self._request,
            self._max_tokens,
            self._eos,
            group=self,
            seq_id=f"{self._request.request_id}/{next(self._serials)}",
            sampling=replace(sampling, seed=_wrapped(sampling.seed + index)) if index else sampling,
            index=index,
        )
        row.grammar = None if self._grammar is None else self._grammar.fork()
        return row

    def _fork(self, parent: Sequence, manager: BlockManager) -> Sequence:
        row = self._new_row(0)
        row.tokens = list(parent.tokens)
        row.logprobs = list(parent.logprobs)
        if parent.extras is not None and parent.extras.counts is not None:
            row.extras = parent.extras._replace(counts=parent.extras.counts.copy())
        manager.fork(parent.seq_id, row.seq_id)
        self._start(row, parent.num_computed)
        return row

    def _start(self, row: Sequence, num_computed: int) -> None:
        row.num_computed = num_computed
        row.first_cached = self.leader.first_cached
        row.status = SequenceStatus.RUNNING


def _wrapped(seed: int) -> int:
    """As a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63
