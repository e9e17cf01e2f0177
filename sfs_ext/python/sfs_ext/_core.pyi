"""The C++ core. Arrays are structured: see the dtypes below, defined once in C++."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

HEARTBEAT_S: float

resident_dtype: np.dtype[np.void]
batch_dtype: np.dtype[np.void]
snapshot_dtype: np.dtype[np.void]
step_dtype: np.dtype[np.void]
query_dtype: np.dtype[np.void]
forecast_dtype: np.dtype[np.void]
load_dtype: np.dtype[np.void]
event_dtype: np.dtype[np.void]
kv_event_dtype: np.dtype[np.void]
forest_node_dtype: np.dtype[np.void]

class ForecastStatus(enum.IntEnum):
    OK = 0
    NO_SNAPSHOT = 1
    NEVER = 2
    BOUND = 3

@final
class SchedulerConfig:
    """An engine's scheduling limits, under vLLM's own names."""

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        policy: str = "fcfs",
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = False,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        max_num_active_seqs: int = 0,
    ) -> None: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_active_seqs(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def long_prefill_token_threshold(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def async_scheduling(self) -> bool: ...
    @property
    def long_prefill_token_threshold_adaptive(self) -> bool: ...
    @property
    def scheduler_reserve_full_isl(self) -> bool: ...
    @property
    def watermark(self) -> float: ...
    @property
    def kv_capacity_tokens(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __getstate__(self) -> bytes: ...
    def __setstate__(self, state: bytes, /) -> None: ...

@final
class BatchTime:
    """Eq. 9: seconds a batch takes; coefficients in seconds."""

    def __init__(self, b0_s: float, b1_s: float, b2_s: float, b3_s: float) -> None: ...
    @property
    def b0_s(self) -> float: ...
    @property
    def b1_s(self) -> float: ...
    @property
    def b2_s(self) -> float: ...
    @property
    def b3_s(self) -> float: ...
    def seconds(self, tokens: int, decode_context_tokens: int, prefill_attention: int) -> float: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __getstate__(self) -> tuple[float, float, float, float]: ...
    def __setstate__(self, state: tuple[float, float, float, float], /) -> None: ...

class KvEventKind(enum.IntEnum):
    """What happened to a KV block, or who asks for which; value is an owner or a key.

    An owner is a request's id, its table the list of its blocks. Blocks are numbered from 1, for 0
    is the null block. WANT and FORGET (owner): a request has come, has ended. KEY (key): the next
    full block of the owner wanted last. TAKE, TOUCH (owner, block): a free block for new content,
    a hit; the next of the owner's table. HASH (key, block): the first without content known of its
    table. RELEASE (owner): its table, tail first. CACHED: in checkpoints alone."""

    WANT = 0
    KEY = 1
    TAKE = 2
    TOUCH = 3
    HASH = 4
    RELEASE = 5
    FORGET = 6
    CACHED = 7

@final
class KvJournalMessage:
    """A stretch of an engine's KV journal.

    The events after from_position up to to_position, or from 0 those that rebuild the state
    there."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def from_position(self) -> int: ...
    @property
    def to_position(self) -> int: ...
    @property
    def events(self) -> NDArray[np.void]:
        """kv_event_dtype."""

    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> KvJournalMessage:
        """ValueError on anything truncated, corrupt or of another layout version."""

@final
class KvMirror:
    """An engine's KV cache, rebuilt from its journal."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: the null block included; ValueError below 2."""

    def apply(self, events: NDArray[np.void]) -> None:
        """kv_event_dtype; ValueError for the first that contradicts the state."""

    def advance(self, message: bytes) -> bool:
        """A KvJournalMessage's bytes; False if it begins ahead of position.

        ValueError for bytes that are none, for another engine's, and as apply."""

    def compact(self) -> NDArray[np.void]:
        """kv_event_dtype events that rebuild this state from nothing."""

    def cached_tokens(self, keys: NDArray[np.uint64], block_size: int) -> int:
        """Of the prefix with these keys."""

    @property
    def position(self) -> int:
        """Events it stands for."""

    @property
    def requests(self) -> int:
        """Live ones."""

    @property
    def free_blocks(self) -> int: ...
    @property
    def cached_free_blocks(self) -> int:
        """Free ones that hold known content."""

@final
class Snapshot:
    """One consistent state of an engine."""

    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def header(self) -> Any:
        """A scalar of snapshot_dtype."""

    @property
    def residents(self) -> NDArray[np.void]:
        """resident_dtype, in running order and then in queue order."""

    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Snapshot:
        """ValueError on anything truncated, corrupt or of another layout version."""

@final
class SnapshotWriter:
    """Publishes an engine's snapshots and step records through a file of shared memory."""

    def __init__(
        self,
        path: str,
        config: SchedulerConfig,
        max_residents: int = 4096,
        max_steps: int = 8192,
        kv_journaled: bool = False,
    ) -> None:
        """kv_journaled: with a KV journal, which needs prefix caching."""

    def append(self, events: NDArray[np.void]) -> None:
        """kv_event_dtype: what happened to the KV blocks, before the publish that shows it.

        ValueError for events that contradict each other, these or some before them: the journal
        ends there, later calls do nothing and snapshots say so. RuntimeError without a journal."""

    def publish(
        self,
        published_s: float,
        free_blocks: int,
        in_flight: NDArray[np.void],
        residents: NDArray[np.void],
    ) -> None:
        """in_flight: batch_dtype, oldest first; residents: resident_dtype, running first."""

    def record_step(self, step: NDArray[np.void]) -> None:
        """One step_dtype record; its sequence is filled in."""

    def close(self) -> None:
        """Unlinks the file."""

@final
class KvObserver:
    """Notes what a KV cache written in Python does with its blocks, as events of a journal."""

    def __init__(self, block_size: int) -> None: ...
    def arrived(
        self,
        request_id: str,
        owner: int,
        token_ids: list[int] | None,
        hashes: list[bytes],
        prompt_tokens: int,
    ) -> None:
        """A request, named by ``owner`` in events; nothing for one that is there. Its full blocks'
        keys are made of token_ids, or where that is None, of block hashes. Both lists grow in
        place."""

    def ended(self, request_id: str) -> None: ...
    def reset(self, hashed: list[int]) -> None:
        """The cache is emptied. hashed: the blocks with content, of which all are free."""

    def following(
        self, callable: Callable[..., Any], kind: str, wanted: list[tuple[int, str]]
    ) -> Callable[..., Any]:
        """A stand-in for a callable, which notes its calls. wanted: place and name of parameters.

        kind: hit (request id, blocks), released (request id; all its blocks are the result), filled
        (request, all its blocks, full ones before, full ones now). A call that cannot be read ends
        the journal, and is made all the same."""

    def holds(self, request_id: str, blocks: list[Any]) -> None:
        """All the blocks of a request, in order: no call shows when it takes new ones. For all that
        hold any, before events are taken; ``StateWriter`` does it in each step."""

    @property
    def failure(self) -> str | None:
        """What ended the journal, if anything did: it tells nothing from then on."""

    def take_events(self) -> NDArray[np.void]:
        """kv_event_dtype, since the last call."""

@final
class StateWriter:
    """Publishes the state of a scheduler written in Python, read off its objects after each step.

    What cannot be read raises, naming the attribute, and nothing is published."""

    def __init__(
        self,
        writer: SnapshotWriter,
        *,
        request_attributes: dict[str, str],
        blocks: dict[str, Any],
        queues: Sequence[Any],
        heap: str | None,
        preempted: object,
        identity: Callable[[Any], tuple[int, float]],
        clock: Callable[[], float],
        observer: KvObserver | None,
    ) -> None:
        """request_attributes: names of the attributes of a request that give its request_id,
        arrival_s, prompt_tokens, output_token_ids (a list that grows in place), max_tokens,
        priority, computed_tokens, placeholders, stale_tokens, status, prefills (more of its prompt
        is to come) and resumable (what it asks for may change), and of one to keep its record in.
        blocks: list by request id. queues: of waiting requests, deques, or keeping a heap in the
        list that is their attribute ``heap``. preempted: that status. identity: maps a request to
        its key and predicted output tokens. clock: Unix time in seconds. observer: of the KV
        journal, if one is kept."""

    def scheduled(
        self,
        output: object,
        tokens: dict[str, int],
        running: list[Any],
        scheduled_s: float,
        preempted: int,
        free_blocks: int,
    ) -> None:
        """Publishes what a step leaves. tokens: by request id; output: names the step to done().

        RuntimeError, once, if the journal has ended; snapshots from the next on say so."""

    def done(self, output: object, done_s: float, running: list[Any]) -> bool:
        """Records the step; whether the engine is idle now. Nothing for a step without tokens."""

    def publish_idle(self, free_blocks: int) -> None: ...
    def restamp(self, hang_s: float) -> None:
        """Publishes a state again that no step has changed for HEARTBEAT_S, unless that is longer
        than hang_s ago and it has residents: then the engine hangs."""

    def forget(self) -> None:
        """A step could not be published: nothing read before is taken to hold."""

    def close(self) -> None: ...

@final
class SnapshotReader:
    """FileNotFoundError without the file, ValueError for one of another kind."""

    def __init__(self, path: str) -> None: ...
    @property
    def sequence(self) -> int:
        """Number of the newest snapshot; 0 before the first."""

    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def writer_pid(self) -> int: ...
    @property
    def kv_journaled(self) -> bool: ...
    @property
    def kv_position(self) -> int:
        """Events in the KV journal; 0 without one."""

    def read_journal(self, mirror: KvMirror, up_to: int) -> bool:
        """Brings the mirror to a snapshot's kv_position; False where that cannot be had."""

    def read_journal_message(self, after: int, up_to: int | None = None) -> KvJournalMessage | None:
        """Events after `after`, or from 0 where that is too long ago; None if neither is there.

        up_to: all there are by default; a snapshot's kv_position keeps them in step with it."""

    def read(self) -> Snapshot | None:
        """The newest complete snapshot; None before the first."""

    def read_steps(self, after: int = 0) -> NDArray[np.void]:
        """step_dtype records with sequence > after that the ring still holds."""

@final
class Fleet:
    """The router's picture of every instance. Thread-safe.

    IndexError for an unknown or removed instance. plain_stepping: one request at a time in every
    batch, to compare with."""

    def __init__(self, *, plain_stepping: bool = False) -> None: ...
    def add(self, config: SchedulerConfig, batch_time: BatchTime, length_sigma: float = 0.0) -> int:
        """Returns the instance's number."""

    def remove(self, instance: int) -> None: ...
    def attach(self, instance: int, path: str) -> None: ...
    def update(self, instance: int, snapshot: bytes) -> bool:
        """False if it is not newer than the one held; ValueError if it is not a snapshot."""

    def update_journal(self, instance: int, message: bytes) -> bool:
        """False if a message before it is missing; ValueError if it is not a journal message."""

    def calibrate(self, instance: int, batch_time: BatchTime) -> None: ...
    def set_length_sigma(self, instance: int, length_sigma: float) -> None:
        """As add() takes it; forecasts do from the next snapshot on."""

    def book(
        self,
        instance: int,
        request_id: int,
        arrival_s: float,
        prompt_tokens: int,
        predicted_output_tokens: float,
        max_tokens: int,
        priority: int = 0,
        prompt: NDArray[np.int32] | None = None,
    ) -> None:
        """prompt: its token ids."""

    def unbook(self, instance: int, request_id: int) -> bool: ...
    def snapshot(self, instance: int) -> Snapshot | None: ...
    def forecast(
        self,
        now_s: float,
        queries: NDArray[np.void],
        prompts: Sequence[NDArray[np.int32]] = ...,
    ) -> NDArray[np.void]:
        """query_dtype[n] to forecast_dtype[n]; prompts: token ids that ``prompt`` of a query points
        to. IndexError for an unknown instance."""

    def loads(
        self,
        now_s: float,
        queries: NDArray[np.void],
        prompts: Sequence[NDArray[np.int32]] = ...,
    ) -> NDArray[np.void]:
        """query_dtype[n] to load_dtype[n], as forecast, but from sums in place of a simulation: the
        likely TTFT, and the least that a forecast may find."""

@final
class EmulatedEngine:
    """The scheduler in real time, batch times from a model."""

    def __init__(
        self, config: SchedulerConfig, batch_time: BatchTime, snapshot_path: str
    ) -> None: ...
    def submit(
        self,
        request_id: int,
        prompt_token_ids: NDArray[np.int32],
        output_tokens: int,
        max_tokens: int,
        predicted_output_tokens: float,
        priority: int,
        arrival_s: float,
    ) -> None:
        """Ends by EOS after output_tokens where that is below max_tokens.

        ValueError for a request that could never run."""

    def abort(self, request_id: int) -> None: ...
    def fileno(self) -> int:
        """Readable while events wait."""

    def poll(self) -> NDArray[np.void]:
        """event_dtype, one for each token since the last call."""

    def error(self) -> str | None: ...
    def stop(self) -> None: ...

@final
class VirtualEngine:
    """The scheduler in virtual time, from 0 s on. Not thread-safe."""

    def __init__(self, config: SchedulerConfig, batch_time: BatchTime) -> None: ...
    def submit(
        self,
        request_id: int,
        arrival_s: float,
        prompt_token_ids: NDArray[np.int32],
        output_tokens: int,
        max_tokens: int,
        predicted_output_tokens: float,
        priority: int = 0,
        answer_token_ids: NDArray[np.int32] | None = None,
    ) -> None:
        """For the first pass that begins at arrival_s or later.

        Ends by EOS after output_tokens where that is below max_tokens. With answer_token_ids later
        prompts that continue the answer hit its blocks. ValueError for a request that could never
        run."""

    def abort(self, request_id: int, at_s: float) -> None: ...
    @property
    def next_event_s(self) -> float:
        """When a pass begins or results come next; inf: never."""

    def step(self) -> NDArray[np.void]:
        """The next event alone; event_dtype, one for each token that came with it."""

    def run_until(self, until_s: float) -> NDArray[np.void]:
        """All that happens before until_s; event_dtype, one for each token."""

    def snapshot(self) -> Snapshot:
        """As published last."""

    def journal_message(self, after: int) -> bytes:
        """A KvJournalMessage's: after `after` up to the snapshot's kv_position, or from 0.

        RuntimeError without prefix caching."""

    def __copy__(self) -> VirtualEngine:
        """Goes its own way from here: what would happen if."""

    @property
    def admitted_prompt_tokens(self) -> int:
        """Of all requests that have run, each counted once."""

    @property
    def prefix_hit_tokens(self) -> int:
        """Of these, those found in the prefix cache."""

class ForestNodeKind(enum.IntEnum):
    """LEAF; NUMERICAL: left where the feature is at most ``value``; CATEGORICAL: left where it is
    in the set of ``words`` words from ``first_word``."""

    LEAF = 0
    NUMERICAL = 1
    CATEGORICAL = 2

class ForestMissing(enum.IntEnum):
    """Which values go left where ``default_left``, else right. NaN is 0 to NONE and ZERO."""

    NONE = 0
    ZERO = 1
    NAN = 2

@final
class Forest:
    """Sums of what decision trees say of a row of features, as LightGBM says it. Immutable.

    Values within 1e-35 of 0 are 0. A category is a value without its fraction; what is negative,
    NaN or not in the set goes right."""

    def __init__(
        self,
        nodes: NDArray[np.void],
        roots: NDArray[np.int32],
        features: int,
        output_trees: NDArray[np.int32],
        category_words: NDArray[np.uint32] = ...,
    ) -> None:
        """nodes: forest_node_dtype[n], children behind parents. roots: int32[trees], numbers of
        nodes. output_trees: int32[outputs], how many trees, in order, make each output.
        category_words: uint32[m], bit j of a set's word i the category 32 i + j.

        ValueError naming the tree and the node that is not sound, the tree of more than 64 leaves,
        or the output without its trees."""

    @property
    def features(self) -> int:
        """Values in a row."""

    @property
    def outputs(self) -> int:
        """Predictions for a row."""

    def evaluate(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[rows, features] to float64[rows, outputs], without the interpreter's lock.

        ValueError for rows of another shape."""

@final
class Projection:
    """A prompt as a row of numbers: its signed token hash on a few axes, and its description."""

    def __init__(self, mean: NDArray[np.float64], components: NDArray[np.float64]) -> None:
        """mean: float64[buckets]; components: float64[components, buckets]. ValueError for other
        shapes."""

    def row(
        self, buckets: NDArray[np.int32], description: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """int32[buckets] and float64[n], the token count first, to float64[components + n].

        The components are of the buckets over the token count, less the mean. ValueError for other
        buckets, or no description."""

@final
class QualityCalibration:
    """How much is believed of what is predicted of quality."""

    def __init__(
        self,
        mean_score: Sequence[float],
        mean_prediction: Sequence[float],
        common: float,
        own: float,
    ) -> None:
        """Means by model; shares, in [0, 1]. ValueError for anything else."""

    def apply(self, predictions: Sequence[float]) -> list[float]:
        """Of one prompt, by model, to the same in [0, 1]. ValueError for other models."""

@final
class Ensemble:
    """From a prompt's features to each model's quality and output length. Immutable."""

    def __init__(
        self,
        projection: Projection,
        forest: Forest,
        model_columns: NDArray[np.float64],
        calibration: QualityCalibration | None,
        length_factors: Sequence[float],
    ) -> None:
        """model_columns: float64[models, n], a row's last columns. The forest's outputs: quality
        if there is a calibration, then, if there are factors, one for each: the mean and ascending
        quantiles of length.

        ValueError for what does not fit together, or might predict anything but finite numbers."""

    def predict(
        self, buckets: NDArray[np.int32], description: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """int32[buckets] and float64[n], the token count first, to float64[models, outputs].

        Quality in [0, 1]; lengths in tokens, at least 1, quantiles in order. ValueError for other
        shapes."""

def replay(
    config: SchedulerConfig,
    requests: list[dict[str, Any]],
    batch_time: BatchTime | None = None,
    idle_sleep_s: float = 0.0,
    max_steps: int = 200000,
) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Steps and, by request, token times; RuntimeError if max_steps do not finish it."""

def block_keys(
    token_ids: NDArray[np.int32], block_size: int, after: int = 0xCBF29CE484222325
) -> NDArray[np.uint64]:
    """Keys of the full blocks, each for its content and all before it. after: the key of the block
    before them."""

def likely_output_tokens(predicted: float, sigma: float, outputs: int, chance: float) -> int:
    """Total length that an answer with `outputs` tokens already exceeds with this chance."""
