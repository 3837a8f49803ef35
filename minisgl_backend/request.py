"""The engine's input (Request), and the reasons for which a sequence ends (FinishReason).

All values are immutable and can be serialized with msgspec.
"""

from __future__ import annotations

import copy
import enum
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn, get_args

import msgspec

from minisgl_backend.errors import InvalidRequestError

MAX_PRIORITY = 1000
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_SPELLINGS = 2 * MAX_BAD_WORDS  # a word has two: at the beginning of a text, and after a space
MAX_BAD_WORD_TOKENS = 128  # of one bad word
MAX_BAD_WORDS_TOKENS = 8192  # of all bad words of a request: each step compares them with its latest tokens
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_POOLED_TOKENS = 256
MAX_SEQUENCES_PER_REQUEST = 64
MAX_GRAMMAR_BYTES = 65536
MAX_TENANT_NAME = 64
MAX_TAG_TOKENS = 64  # of one reasoning tag
MAX_CACHE_SALT_BYTES = 1024
SEED_RANGE = 2**64
_SEQUENCES, _LOGPROBS = f"1 to {MAX_SEQUENCES_PER_REQUEST}", f"0 to {MAX_LOGPROBS}"
_SALTS = f"a text of 1 to {MAX_CACHE_SALT_BYTES}"


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Step records contain the integer; 0 means that it goes on."""

    RUNNING = 0
    STOP = 1  # an end-of-sequence token, a stop token or a stop string
    LENGTH = 2  # max_tokens or the context limit
    CANCELLED = 3  # the client left or the deadline passed
    ERROR = 4  # the step that computed it failed

    @property
    def label(self) -> str:
        """The name that clients read: "stop", "length", "cancelled" or "error"."""
        return self.name.lower()


GrammarKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]
GRAMMAR_KINDS: tuple[str, ...] = get_args(GrammarKind)


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output.

    `json` needs no text; the others hold a schema, a regex, an EBNF grammar or xgrammar's structural tag as JSON.
    """

    kind: GrammarKind
    text: str = ""


class ThinkingTags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tags around a model's reasoning as token ids, and the state in which this prompt leaves them."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    behind: tuple[int, ...] = ()  # text between the closing tag and the answer itself
    is_open: bool = False  # the answer begins within the reasoning


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue one prompt. `validate` must have passed before the engine sees it.

    Types are checked and spellings normalized when an instance is built: None is the default, one text or id stands for
    a list of it, empty words are dropped, `top_k` -1 and `top_p` 0 switch off. Raises InvalidRequestError naming the
    field. The engine uses the token-id fields; those about text (`stop`, `bad_words`, the two flags at the end) are
    handled by the layer that owns the tokenizer, and the scheduler ignores them.
    """

    max_tokens: int | None = None  # new tokens; None: up to the context limit
    min_tokens: int = 0  # end-of-sequence and stop tokens are not sampled before this many
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1]
    seed: int | None = None  # None, and -1: drawn when the request is accepted
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; 0: only the sampled token's; k: and the k most likely ones
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    n: int = 1  # sequences sampled from the same prompt
    grammar: Grammar | None = None
    thinking_token_budget: int | None = None  # reasoning tokens until the closing tag is forced; None, and -1: no limit
    thinking_tags: ThinkingTags | None = None  # with a budget
    skip_special_tokens: bool = True  # special tokens are not part of the text
    include_stop_str_in_output: bool = False  # the text keeps the stop string, or stop token, that ended it
    speculative: bool = True  # False: no speculation for this request; texts do not change either way
    cache_salt: str | None = None  # cached prefixes are shared only among requests with the same salt
    lora_name: str | None = None  # of an adapter that is served; None: the model itself

    def __post_init__(self) -> None:
        for field, normalise in _NORMALISE.items():
            value, default = getattr(self, field), _DEFAULTS[field]
            if value is default:  # most are
                continue
            normal = default if value is None else normalise(field, value)
            if normal is not value:
                msgspec.structs.force_setattr(self, field, normal)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with a seed of 0 to SEED_RANGE - 1; its other fields are valid and not checked again."""
        copied = copy.copy(self)
        msgspec.structs.force_setattr(copied, "seed", seed)
        return copied

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def bounds_thoughts(self) -> bool:
        return self.thinking_token_budget is not None and self.thinking_tags is not None

    @property
    def is_guided(self) -> bool:
        """A grammar, or the end of a limited reasoning, restricts the next tokens in addition to the sampler."""
        return self.grammar is not None or self.bounds_thoughts

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequestError naming the first field whose value is not allowed."""
        repetition, on_prompt, budget = self.repetition_penalty, self.prompt_logprobs, self.thinking_token_budget
        salt = 1 if self.cache_salt is None else len(self.cache_salt.encode())
        longest = math.inf if self.max_tokens is None else self.max_tokens
        for name, value, fits, allowed in (
            ("max_tokens", self.max_tokens, longest >= 1, "1 or more"),
            ("min_tokens", self.min_tokens, 0 <= self.min_tokens <= longest, "0 to max_tokens"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "1 or more, or off: 0 or -1"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and below 1, or off: 0 or 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("seed", self.seed, 0 <= (self.seed or 0) < SEED_RANGE, "-2**63 to 2**64 - 1; -1: any"),
            # Below this, a logit times its inverse soon is NaN. Clients send float32, where 0.01 is a little less.
            ("repetition_penalty", repetition, 0.0099999 < repetition <= 100.0, "0.01 to 100"),
            ("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("n", self.n, 1 <= self.n <= MAX_SEQUENCES_PER_REQUEST, _SEQUENCES),
            ("logprobs", self.logprobs, 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, _LOGPROBS),
            ("prompt_logprobs", on_prompt, 0 <= (on_prompt or 0) <= MAX_LOGPROBS, _LOGPROBS),
            ("thinking_token_budget", budget, (budget or 0) >= 0, "0 or more, or no limit: -1"),
            ("cache_salt", f"{salt} bytes", 1 <= salt <= MAX_CACHE_SALT_BYTES, _SALTS),
        ):
            if not fits:
                _refuse(name, value, allowed)
        self._validate_lists(vocab_size)

    def _validate_lists(self, vocab_size: int | None) -> None:
        for name, value, limit in (
            ("stop", self.stop, MAX_STOP_STRINGS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("bad_words", self.bad_words, MAX_BAD_WORDS),
            ("bad_words", self.bad_words_token_ids, MAX_BAD_WORD_SPELLINGS),
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIAS),
        ):
            if len(value) > limit:
                _refuse(name, f"{len(value)} entries", f"at most {limit}")
        longest = max((len(word) for word in self.bad_words_token_ids), default=0)
        if longest > MAX_BAD_WORD_TOKENS:
            _refuse("bad_words", f"a word of {longest} tokens", f"words of at most {MAX_BAD_WORD_TOKENS} tokens")
        if (together := sum(len(word) for word in self.bad_words_token_ids)) > MAX_BAD_WORDS_TOKENS:
            _refuse("bad_words", f"{together} tokens together", f"at most {MAX_BAD_WORDS_TOKENS}")
        for bias in self.logit_bias.values():
            if not -100.0 <= bias <= 100.0:
                _refuse("logit_bias", bias, "-100 to 100")
        if (tags := self.thinking_tags) is not None:
            for tag in (tags.opening, tags.closing):
                if not 1 <= len(tag) <= MAX_TAG_TOKENS:
                    _refuse("thinking_tags", f"a tag of {len(tag)} tokens", f"1 to {MAX_TAG_TOKENS}")
        if self.grammar is not None and len(self.grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            _refuse("guided_decoding_guide", "a longer text", f"at most {MAX_GRAMMAR_BYTES} bytes")
        if vocab_size is None:
            return
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "bad_words": tuple(token for word in self.bad_words_token_ids for token in word),
        }
        if (tags := self.thinking_tags) is not None:
            named["thinking_tags"] = (*tags.opening, *tags.closing, *tags.behind)
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    _refuse(name, f"token id {token}", f"token ids 0 to {vocab_size - 1}")


PoolingKind = Literal["last", "mean", "cls", "scores", "token_logprobs"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The vector to compute from a prompt's hidden states after the final norm, instead of generating tokens.

    `kind`: the hidden state of the last token, the mean of all, that of the first token ("cls"); the classification
    head's output for the last token ("scores"); or the log-probabilities of `token_ids` as the next token.
    """

    kind: PoolingKind = "last"
    normalize: bool = False  # to length 1, after the cut to `dimensions`
    dimensions: int | None = None  # keeps the first ones (Matryoshka); None: all
    token_ids: tuple[int, ...] = ()

    @property
    def reads_cache(self) -> bool:
        """Whether cached keys and values of a prefix suffice: its hidden states are not kept."""
        return self.kind not in ("mean", "cls")

    def validate(self, hidden_size: int, vocab_size: int) -> None:
        """Raises InvalidRequestError naming the first field whose value is not allowed."""
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            _refuse("dimensions", self.dimensions, f"1 to {hidden_size}, the model's hidden size")
        if (self.kind == "token_logprobs") != bool(self.token_ids) or len(self.token_ids) > MAX_POOLED_TOKENS:
            _refuse("token_ids", f"{len(self.token_ids)} entries", f"1 to {MAX_POOLED_TOKENS} with token_logprobs")
        if self.token_ids:
            check_token_ids("token_ids", self.token_ids, vocab_size)


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Placeholder tokens of a prompt for an image: different content means different keys and values.

    Metadata stays with the sequence for its whole life. Pixels are read only to encode them.
    """

    start: int  # position of the span's first token in the prompt
    length: int  # tokens of the span, including breaks and separators between its vectors
    digest: bytes  # 32 bytes, of the content and of all that changes its pixels
    # Positions of its vectors by time, row and column, before spatial merging; (0, 0, 0): it has no such order.
    grid: tuple[int, int, int] = (0, 0, 0)
    # Which of the span's tokens have vectors: start and length of each run of them, relative to the span; (): all.
    runs: tuple[int, ...] = ()
    pixels: str = ""  # the shared segment of its pixels
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # of these, uint8: tiles, height, width, 3

    @property
    def end(self) -> int:
        """Position behind the span."""
        return self.start + self.length

    @property
    def num_vectors(self) -> int:
        """How many of its tokens have vectors."""
        return sum(self.runs[1::2]) if self.runs else self.length

    def vector_runs(self) -> list[tuple[int, int]]:
        """The runs of tokens that have vectors, ascending: positions in the prompt, of the first and behind the
        last."""
        runs = self.runs or (0, self.length)
        pairs = zip(runs[::2], runs[1::2], strict=True)
        return [(self.start + start, self.start + start + length) for start, length in pairs]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and what to do with it. With n > 1 it becomes n sequences with uids `uid` to `uid + n - 1`."""

    uid: int  # unique over the life of the engine; chosen by the front
    token_ids: bytes  # int32, little-endian; the prompt
    params: SamplingParams
    pooling: PoolingParams | None = None  # not None: the answer is a vector, and `params` is ignored
    priority: int = 0  # 0: the default level; otherwise 1 is the most urgent, as in Triton
    deadline: float | None = None  # time.monotonic() seconds after which the request is dropped
    request_id: str = ""  # the client's own id, for logs
    tenant: str = ""  # for fair shares; at most MAX_TENANT_NAME characters
    contents: tuple[Content, ...] = ()  # of the prompt; distinguished by the prefix cache
    # For models with states: tokens of the prompt that a later turn renders alike (0: all), and of parts at its
    # beginning that other prompts have, too.
    stable_len: int = 0
    borders: tuple[int, ...] = ()


def check_prompt(
    name: str, token_ids: Any, *, max_seq_len: int, vocab_size: int | None = None, limited_by: str = ""
) -> None:
    """Raises InvalidRequestError, with `name` for the prompt, unless it can be continued.

    `vocab_size`: None if the front has checked that. `limited_by`: what limits `max_seq_len` besides the model.
    """
    check_token_ids(name, token_ids, vocab_size)
    if len(token_ids) >= max_seq_len:
        why = f" ({limited_by})" if limited_by else ""
        # LiteLLM and LangChain recognize the error by the last words.
        raise InvalidRequestError(
            f"{name} has {len(token_ids)} tokens; this model takes prompts of at most {max_seq_len - 1}{why}: "
            f"prompt is too long, this model's maximum context length is {max_seq_len} tokens"
        )


def check_token_ids(name: str, token_ids: Any, vocab_size: int | None) -> None:
    """Raises InvalidRequestError unless there are tokens, all within the vocabulary; None: none may be negative.

    `token_ids`: a list, or a one-dimensional array.
    """
    if not len(token_ids):
        raise InvalidRequestError(f"{name} is empty; allowed: a prompt of at least one token")
    is_list = isinstance(token_ids, (list, tuple))
    wrong = min(token_ids) if is_list else token_ids.min()
    if wrong >= 0 and vocab_size is not None:
        wrong = max(token_ids) if is_list else token_ids.max()
    if wrong < 0 or (vocab_size is not None and wrong >= vocab_size):
        allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise InvalidRequestError(f"{name} holds token id {wrong}; allowed: token ids {allowed}")


def _integer(name: str, value: Any) -> int:
    """Accepts Python's and NumPy's integers, and floats without a fraction."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        _refuse(name, repr(value), "an integer")


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        _refuse(name, repr(value), "a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        _refuse(name, repr(value), "a number")


def _instance(kind: type, allowed: str) -> Callable[[str, Any], Any]:
    def checked(name: str, value: Any) -> Any:
        return value if isinstance(value, kind) else _refuse(name, repr(value), allowed)

    return checked


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        _refuse(name, repr(value), "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(name, repr(value), "Unicode text, without lone surrogates")
    return str(value)


def _seed(name: str, value: Any) -> int | None:
    """A negative seed is the unsigned number with the same 64 bits; -1 means any, as in vLLM."""
    found = _integer(name, value)
    if found == -1:
        return None
    return found + (1 << 64) if -(1 << 63) <= found < 0 else found


def _budget(name: str, value: Any) -> int | None:
    """-1 means no limit, as vLLM spells it."""
    found = _integer(name, value)
    return None if found == -1 else found


def _top_k(name: str, value: Any) -> int:
    """-1 means off, as vLLM spells it."""
    found = _integer(name, value)
    return 0 if found == -1 else found


def _top_p(name: str, value: Any) -> float:
    """Clients of LlamaIndex and LangChain send 0 for "not set"."""
    found = _number(name, value)
    return 1.0 if found <= 0.0 else found


def _items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if type(value) is tuple:
        return value
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        _refuse(name, repr(value), allowed)
    return tuple(value)


def _words(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else _items(name, value, "a text or a list of texts")
    for word in found:
        if not isinstance(word, str):
            _refuse(name, repr(word), "a text or a list of texts")
    return found if all(found) else tuple(filter(None, found))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        _refuse(name, repr(value), "a list of token ids")
    values = _items(name, value, "a list of token ids") if isinstance(value, Iterable) else (value,)
    return values if all(type(one) is int for one in values) else tuple(_integer(name, one) for one in values)


def _words_of_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_token_ids(name, word) for word in _items(name, value, "a list of lists of token ids"))


def _bias(name: str, value: Any) -> dict[int, float]:
    """JSON objects have text keys, so a token id may be a text."""
    if not isinstance(value, Mapping):
        _refuse(name, repr(value), "a mapping of token id to bias")
    found = {}
    for key, given in value.items():
        digits = isinstance(key, str) and key.strip().isascii() and key.strip().isdigit()
        found[int(key) if digits else _integer(name, key)] = _number(name, given)
    return found


_flag = _instance(bool, "True or False")

_NORMALISE: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "n"), _integer),
    **dict.fromkeys(("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), _number),
    "seed": _seed,
    "top_k": _top_k,
    "top_p": _top_p,
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "speculative"), _flag),
    **dict.fromkeys(("cache_salt", "lora_name"), _text),
    "stop": _words,
    "bad_words": _words,
    "stop_token_ids": _token_ids,
    "bad_words_token_ids": _words_of_ids,
    "logit_bias": _bias,
    "grammar": _instance(Grammar, "a Grammar"),
    "thinking_token_budget": _budget,
    "thinking_tags": _instance(ThinkingTags, "ThinkingTags"),
}
_SCALARS = (_integer, _number, _flag, _text, _seed, _top_k, _top_p, _budget)
# Fields of SamplingParams that are one number, flag or text.
SCALAR_FIELDS = tuple(name for name, reads in _NORMALISE.items() if reads in _SCALARS)
_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(SamplingParams)
}

# Of a request that samples no tokens.
NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is {value}; allowed: {allowed}")
