"""StepResults: what a finished step means for each of its sequences.

Owns: appending tokens, moving grammars on, why a sequence ends, and the deltas that tell of all this.
Does not: choose who runs (scheduler), order beams (sequence_group) or decode text.
Invariants: a request gets exactly one last delta; what fails ends its own request only; blocks of what ended are free
when the step is booked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cluster.core.errors import KvrayError
from cluster.core.request import FinishReason, TokenDelta
from worker.batch import Batch
from worker.grammar_port import GrammarProgress
from worker.kvcache.block_manager import BlockManager
from worker.runner import Sampled
from worker.scheduling.live_sequences import LiveSequences
from worker.sequence import Sequence
from worker.sequence_group import SequenceGroup


class StepResults:
    def __init__(self, manager: BlockManager, live: LiveSequences) -> None:
        self._manager = manager
        self._live = live

    def book(self, batch: Batch, sampled: Seq[Sampled]) -> list[TokenDelta]:
        """KV is there, blocks enter the cache, new tokens are appended, ends are found."""
        deltas: list[TokenDelta] = []
        results = iter(sampled)
        searches: dict[str, SequenceGroup] = {}
        for item in batch.seqs:
            result = next(results) if item.sample else None
            seq = self._live.get(item.seq_id)
            if seq is None:  # its request failed in this step, with another row
                continue
            seq.num_computed = end = item.start + len(item.token_ids)
            self._manager.commit(item.seq_id, seq.tokens, end, tail=item.sample and end == seq.num_prompt_tokens)
            if result is None:
                self._spread_when_computed(seq)
                continue
            if item.extras is not None and self._only_scores(seq, result):
                continue
            if seq.group is None:
                deltas.append(self._append(seq, result))
            elif seq.group.search is None:
                deltas += self._append_sample(seq, result, seq.group)
            else:
                seq.candidates, seq.candidate_logprobs = result.candidates, result.candidate_logprobs
                searches[seq.request.request_id] = seq.group
        for group in searches.values():
            if all(row.candidates for row in group.rows):
                deltas += self._advance(group)
        return deltas

    def _only_scores(self, seq: Sequence, result: Sampled) -> bool:
        """Keep the log probabilities of a prompt. True when the step chose no token behind it."""
        seq.prompt_logprobs += result.prompt_logprobs
        self._spread_when_computed(seq)
        return seq.computes_only or seq.num_uncomputed > 0

    def _spread_when_computed(self, leader: Sequence) -> None:
        """The leader's prompt is there: its rows run in its place."""
        if leader.computes_only and not leader.num_uncomputed:
            assert leader.group is not None
            leader.group.spread(self._manager)
            self._live.replace(leader, leader.group)

    def _append(self, seq: Sequence, result: Sampled) -> TokenDelta:
        """One more token of a request with one row, and perhaps its end."""
        tokens, token = seq.tokens, result.token_id
        if seq.grammar is not None and (error := _move_on(seq.grammar, result)) is not None:
            self._live.drop(seq)
            return TokenDelta(seq.seq_id, error=error)
        tokens.append(token)
        made = len(tokens) - seq.num_prompt_tokens
        reason: FinishReason | None = None
        if made >= seq.max_tokens or token in seq.stop_token_ids or seq.grammar is not None:
            reason = _end_reason(seq, token, made)
            if reason is not None:
                self._live.finish(seq)
        delta = TokenDelta(seq.seq_id, (token,), seq.first_cached if made == 1 else None, reason)
        if seq.extras is None:
            return delta
        return delta._replace(
            logprobs=None if result.logprob is None else (result.logprob,),
            prompt_logprobs=seq.all_prompt_logprobs() if made == 1 else None,
        )

    def _append_sample(self, row: Sequence, result: Sampled, group: SequenceGroup) -> list[TokenDelta]:
        """One more token of one of several samples. The last row to end ends the request; one that fails, too."""
        if row.grammar is not None and (error := _move_on(row.grammar, result)) is not None:
            self._live.drop(group.leader)
            return [TokenDelta(row.request.request_id, error=error)]
        row.tokens.append(result.token_id)
        logprobs = () if result.logprob is None else (result.logprob,)
        row.logprob += sum(one.logprob for one in logprobs)
        reason = _end_reason(row, result.token_id, row.num_output_tokens)
        if reason is not FinishReason.STOP and group.came_to_stop(row):
            reason = FinishReason.STOP
        if group.withholds:
            row.logprobs += logprobs
        best: list[TokenDelta] = []
        if reason is not None:
            self._live.end_row(row)
            best = group.end_row(row, reason, self._manager)
            if not group.rows:
                self._live.finish(group.leader)
        if group.withholds:
            return best
        delta = TokenDelta(
            request_id=row.request.request_id,
            token_ids=(result.token_id,),
            cached_tokens=row.first_cached if row.num_output_tokens == 1 else None,
            finish_reason=reason,
            choice=row.index,
            more=reason is not None and bool(group.rows),
            logprobs=logprobs or None,
            prompt_logprobs=group.prompt_logprobs(),
        )
        return [delta]

    def _advance(self, group: SequenceGroup) -> list[TokenDelta]:
        place = self._live.running.index(group.rows[0])
        self._live.leave_running(group)
        answers = group.advance(self._manager)
        if answers:
            group.release(self._manager)
            self._live.finish(group.leader)
        else:
            self._live.running[place:place] = self._live.register(group)
        return answers


def _end_reason(seq: Sequence, token: int, made: int) -> FinishReason | None:
    if token in seq.stop_token_ids or (seq.grammar is not None and seq.grammar.is_finished):
        return FinishReason.STOP
    return FinishReason.LENGTH if made >= seq.max_tokens else None


def _move_on(grammar: GrammarProgress, result: Sampled) -> KvrayError | None:
    """By the token that was chosen; the error when the answer cannot go on."""
    if result.error is not None:
        return result.error
    try:
        grammar.accept(result.token_id)
    except KvrayError as error:
        return error
    return None
