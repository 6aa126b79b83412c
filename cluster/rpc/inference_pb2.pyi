from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_FIRST: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class LossReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_REASON_UNSPECIFIED: _ClassVar[LossReason]
    LOSS_REASON_NEVER_SEEN: _ClassVar[LossReason]
    LOSS_REASON_DIVERGED: _ClassVar[LossReason]
    LOSS_REASON_EVICTED: _ClassVar[LossReason]
    LOSS_REASON_ROUTED_ELSEWHERE: _ClassVar[LossReason]
    LOSS_REASON_INDEX_LATE: _ClassVar[LossReason]
    LOSS_REASON_NAMESPACE: _ClassVar[LossReason]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_FIRST: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
LOSS_REASON_UNSPECIFIED: LossReason
LOSS_REASON_NEVER_SEEN: LossReason
LOSS_REASON_DIVERGED: LossReason
LOSS_REASON_EVICTED: LossReason
LOSS_REASON_ROUTED_ELSEWHERE: LossReason
LOSS_REASON_INDEX_LATE: LossReason
LOSS_REASON_NAMESPACE: LossReason

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "cache_salt", "constraint", "priority", "timeout_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatMessages
    sampling: SamplingOptions
    cache_salt: str
    constraint: Constraint
    priority: int
    timeout_s: float
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "choice", "grammar")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    choice: ChoiceStrings
    grammar: str
    def __init__(self, json_object: _Optional[bool] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[ChoiceStrings, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class ChoiceStrings(_message.Message):
    __slots__ = ("strings",)
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, strings: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "best_of", "beam_width", "length_penalty", "early_stopping", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs", "prompt_logprobs", "include_stop_str_in_output")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    include_stop_str_in_output: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "piece", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    piece: bytes
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., piece: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("request_id", "replica", "text", "token_ids", "finish_reason", "usage", "index", "score", "logprobs", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    usage: Usage
    index: int
    score: float
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, request_id: _Optional[str] = ..., replica: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., index: _Optional[int] = ..., score: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "text", "token_ids", "finish_reason", "score", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    score: float
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., score: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "replica", "text", "token_ids", "finish_reason", "usage", "choices", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    usage: Usage
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, request_id: _Optional[str] = ..., replica: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("misses",)
    MISSES_FIELD_NUMBER: _ClassVar[int]
    misses: bool
    def __init__(self, misses: _Optional[bool] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("models", "ready", "replicas", "reuse")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    ready: bool
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    reuse: ReuseTotals
    def __init__(self, models: _Optional[_Iterable[str]] = ..., ready: _Optional[bool] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., reuse: _Optional[_Union[ReuseTotals, _Mapping]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("worker_id", "epoch", "model", "block_size", "chunk_tokens", "max_model_len", "free_blocks", "cached_blocks", "in_use_blocks", "total_blocks", "waiting", "running", "uncached_tokens", "query_tokens", "hit_tokens", "generated_tokens", "finished_requests", "preemptions", "indexed_chunks", "prefill_tokens_per_s", "step_time_s", "step_time_model")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_USE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MODEL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    model: str
    block_size: int
    chunk_tokens: int
    max_model_len: int
    free_blocks: int
    cached_blocks: int
    in_use_blocks: int
    total_blocks: int
    waiting: int
    running: int
    uncached_tokens: int
    query_tokens: int
    hit_tokens: int
    generated_tokens: int
    finished_requests: int
    preemptions: int
    indexed_chunks: int
    prefill_tokens_per_s: float
    step_time_s: float
    step_time_model: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., in_use_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., finished_requests: _Optional[int] = ..., preemptions: _Optional[int] = ..., indexed_chunks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_time_s: _Optional[float] = ..., step_time_model: _Optional[_Iterable[float]] = ...) -> None: ...

class ExplainRouteRequest(_message.Message):
    __slots__ = ("request_id", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request: GenerateRequest
    def __init__(self, request_id: _Optional[str] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class ExplainRouteResponse(_message.Message):
    __slots__ = ("request_id", "replica", "dry_run", "candidates", "reuse")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica: str
    dry_run: bool
    candidates: _containers.RepeatedCompositeFieldContainer[RouteCandidate]
    reuse: ReuseExplanation
    def __init__(self, request_id: _Optional[str] = ..., replica: _Optional[str] = ..., dry_run: _Optional[bool] = ..., candidates: _Optional[_Iterable[_Union[RouteCandidate, _Mapping]]] = ..., reuse: _Optional[_Union[ReuseExplanation, _Mapping]] = ...) -> None: ...

class RouteCandidate(_message.Message):
    __slots__ = ("replica", "overlap_tokens", "ahead_tokens", "running", "cost", "lost")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    replica: str
    overlap_tokens: int
    ahead_tokens: int
    running: int
    cost: float
    lost: bool
    def __init__(self, replica: _Optional[str] = ..., overlap_tokens: _Optional[int] = ..., ahead_tokens: _Optional[int] = ..., running: _Optional[int] = ..., cost: _Optional[float] = ..., lost: _Optional[bool] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordChunk(_message.Message):
    __slots__ = ("chunk_tokens", "requests", "missed")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    missed: int
    def __init__(self, chunk_tokens: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping]]] = ..., missed: _Optional[int] = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("arrived_s", "prompt_tokens", "output_tokens", "chunks")
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arrived_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReuseLoss(_message.Message):
    __slots__ = ("reason", "tokens", "position", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: LossReason
    tokens: int
    position: int
    message: int
    def __init__(self, reason: _Optional[_Union[LossReason, str]] = ..., tokens: _Optional[int] = ..., position: _Optional[int] = ..., message: _Optional[int] = ...) -> None: ...

class ReuseExplanation(_message.Message):
    __slots__ = ("prompt_tokens", "seen_tokens", "held_tokens", "chosen_tokens", "reused_tokens", "losses")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    seen_tokens: int
    held_tokens: int
    chosen_tokens: int
    reused_tokens: int
    losses: _containers.RepeatedCompositeFieldContainer[ReuseLoss]
    def __init__(self, prompt_tokens: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., held_tokens: _Optional[int] = ..., chosen_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., losses: _Optional[_Iterable[_Union[ReuseLoss, _Mapping]]] = ...) -> None: ...

class ReuseTotals(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "seen_tokens", "held_tokens", "chosen_tokens", "reused_tokens", "losses")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: int
    seen_tokens: int
    held_tokens: int
    chosen_tokens: int
    reused_tokens: int
    losses: _containers.RepeatedCompositeFieldContainer[LossTotal]
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., held_tokens: _Optional[int] = ..., chosen_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., losses: _Optional[_Iterable[_Union[LossTotal, _Mapping]]] = ...) -> None: ...

class LossTotal(_message.Message):
    __slots__ = ("reason", "tokens", "requests", "examples")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    reason: LossReason
    tokens: int
    requests: int
    examples: _containers.RepeatedCompositeFieldContainer[LossExample]
    def __init__(self, reason: _Optional[_Union[LossReason, str]] = ..., tokens: _Optional[int] = ..., requests: _Optional[int] = ..., examples: _Optional[_Iterable[_Union[LossExample, _Mapping]]] = ...) -> None: ...

class LossExample(_message.Message):
    __slots__ = ("request_id", "replica", "prompt_tokens", "loss")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica: str
    prompt_tokens: int
    loss: ReuseLoss
    def __init__(self, request_id: _Optional[str] = ..., replica: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., loss: _Optional[_Union[ReuseLoss, _Mapping]] = ...) -> None: ...
