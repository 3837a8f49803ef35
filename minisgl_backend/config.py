"""The engine options, each declared once.

`EngineConfig` holds the user's settings. Its field names are the `parameters` of model_repository/engine/config.pbtxt
and the command-line flags of the offline tools. `runner.start.resolve` turns it into a `RuntimeConfig`, in which no
"auto" is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend import number_formats
from minisgl_backend.errors import ConfigError
from minisgl_backend.foreign_options import explain_unknown_argument
from minisgl_backend.option_table import at_least, between, check_all, one_of, option, options_of
from minisgl_backend.speculative_config import ALLOWED, MEANING, SpeculativeConfig, read_speculative_config

DTYPES = ("auto", *number_formats.DTYPES)
KV_DTYPES = ("auto", *number_formats.KV_CACHE_DTYPES)
BACKENDS = ("fa", "fi", "trtllm", "triton", "flashmla", "torch")
CACHE_TYPES = ("radix", "naive")
POLICIES = ("fcfs", "lpm")
RUNNERS = ("model", "null")
_ENCODER_CACHE_MIB = 512
MAX_ADAPTERS, MAX_ADAPTER_NAME = 256, 128
ADAPTER_NAMES = f"1 to {MAX_ADAPTER_NAME} printable characters"
MAX_RANK = 512  # of an adapter
DEFAULT_RANK, LEAST_SLOTS = 16, 8  # where adapters come while serving
MODEL_IMPLS = ("auto", "native", "transformers")


def _power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


def _zmq_address(value: str) -> bool:
    host, colon, port = value.removeprefix("tcp://").rpartition(":")
    is_tcp = value.startswith("tcp://") and bool(host and colon and port.isdigit() and int(port) < 65536)
    return is_tcp or (value.startswith("ipc://") and len(value) > len("ipc://"))


def _host_and_port(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and 1 <= int(port) <= 65535


def _backend_names(value: str) -> bool:
    parts = value.split(",")
    return value == "auto" or (len(parts) <= 2 and all(part in BACKENDS for part in parts))


def hosts_of(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def is_media_domain(name: str) -> bool:
    """Whether it names a host, all below one (`*.NAME`), or all (`*`)."""
    labels = name.removeprefix("*.").split(".") if name != "*" else ["any"]
    return name == name.lower() and all(one.isascii() and one.replace("-", "").isalnum() for one in labels)


def images_of_limits(text: str) -> int:
    """A number, or vLLM's limits of media: `{"image": 8}`, `image=8`. Sound and video have none but 0. Raises
    ValueError."""
    if text.isdigit():
        return int(text)
    pairs = (part.partition("=")[::2] for part in text.split(","))
    limits = json.loads(text) if text.startswith("{") else {kind.strip(): int(count) for kind, count in pairs}
    images = limits.pop("image")
    count = images.get("count") if isinstance(images, dict) else images  # beside the sizes of a profile
    others = [one.get("count") if isinstance(one, dict) else one for one in limits.values()]
    if any(others) or not limits.keys() <= {"video", "audio"} or not isinstance(count, int):
        raise ValueError(f"{text} has more than a number of images")
    return count


def read_weights(text: str) -> dict[str, float] | None:
    """Parses `tenant_weights` into weights by tenant; None: the text is invalid."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            return None
        if not name or name in weights or not 0 < weight <= 1000:
            return None
        weights[name] = weight
    return weights


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have that name."""
    return name.isprintable() and 1 <= len(name) <= MAX_ADAPTER_NAME


def read_adapters(text: str) -> dict[str, str] | None:
    """Parses `adapters` into folders by name; None: the text is invalid."""
    folders: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, folder = (piece.strip() for piece in part.partition("="))
        if not (is_adapter_name(name) and folder) or name in folders:
            return None
        folders[name] = folder
    return folders if len(folders) <= MAX_ADAPTERS else None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The user's settings, checked one by one at construction (ConfigError), not yet against a model or machine."""

    model: str = option(
        "demo",
        "model folder in Hugging Face format (config.json, safetensors, tokenizer), a .gguf file, a hub id where the "
        "host has a network, or `demo` or `demo-vl` for a model that comes with the project",
        "a folder, a .gguf file, a hub id, `demo` or `demo-vl`",
        lambda value: bool(value.strip()),
    )
    model_impl: str = one_of(
        "auto",
        "code that runs the model: a family of this project (native), or transformers' own classes with this engine's "
        "attention, KV cache and sampling; auto: native where there is such a family, else transformers",
        MODEL_IMPLS,
    )
    dtype: str = one_of(
        "auto",
        "number format of weights and computation; auto: models in 16 bits stay so on GPUs, and on CPUs with AVX2 and "
        "g++ 11 or later (latents, and what transformers runs: bfloat16 with AVX-512 BF16 alone); all others become "
        "float16 on a GPU, float32 on a CPU",
        DTYPES,
    )
    kv_cache_dtype: str = one_of(
        "auto",
        "number format of the KV cache; fp8_e4m3 holds twice the tokens of 16-bit numbers, for a little quality; "
        "auto: that of dtype",
        KV_DTYPES,
    )
    quantization: str | None = one_of(
        None,
        "number format that weights of linear layers and experts are converted to while they load; fp8: e4m3 with a "
        "scale for each output, and activations in FP8 with a scale for each token: half the memory of 16 bits for a "
        "little quality, on GPUs from compute capability 8.9 on; unset: as dtype says",
        number_formats.CONVERTED_FORMATS,
    )
    attention_backend: str = option(
        "auto",
        "attention kernels, or `PREFILL,DECODE` for one each",
        f"auto, one of {' '.join(BACKENDS)}, or two of them as PREFILL,DECODE",
        _backend_names,
        "--attn",
    )
    page_size: int | None = option(
        None,
        "tokens a KV page; unset: the best measured one for the backends",
        "a power of two",
        _power_of_two,
    )
    num_pages: int | None = option(
        None, "exact number of KV pages; unset: as many as memory_ratio allows", "1 or more", at_least(1)
    )
    num_state_slots: int | None = option(
        None,
        "slots for the states of a model that has some (Qwen3-Next, Qwen3.5), of which each running sequence takes one "
        "and the prefix cache the rest; unset: two for each sequence, fewer where memory is short",
        "2 or more",
        at_least(2),
    )
    memory_ratio: float = option(
        0.9,
        "share of the free device memory that weights and KV cache may take",
        "above 0 and at most 1",
        lambda value: 0 < value <= 1,
    )
    encoder_cache_mib: int | None = option(
        None,
        "memory of the vectors that a model's encoder makes of images, and of those that it is making; 0: the encoder "
        "is not loaded, and the model reads text alone; unset: 512",
        "0 or more MiB",
        at_least(0),
    )
    max_image_tokens: int | None = option(
        None,
        "most tokens of an image: larger ones are scaled down, as the model's family does for its own maximum; unset: "
        "that maximum",
        "1 or more, and what the family's smallest image needs",
        at_least(1),
    )
    max_images: int = option(
        20,
        "images of one request",
        '1 to 100, or as {"image": 8}',
        between(1, 100),
        "--limit-mm-per-prompt",
        reads=images_of_limits,
    )
    media_domains: str = option(
        "",
        "hosts whose images are fetched for requests of Triton's own models and of `LLM` that give their URL; as "
        "--allowed-media-domains of `minisgl serve`, which sets both",
        "names in small letters, *.NAME or *, with commas between them",
        lambda text: all(map(is_media_domain, hosts_of(text))),
    )
    image_workers: int | None = option(
        None, "processes that decode images; unset: half of the processors, at most 4", "1 to 64", between(1, 64)
    )
    image_cache_mib: int = option(
        1024, "shared memory of decoded images, kept for the next request with the same one", "0 or more", at_least(0)
    )
    max_prefill_length: int | None = option(
        None,
        "token budget of one step; longer prompts are computed in chunks; unset: 8192, but 16384 of a mixture of "
        "experts that a GPU computes in a quarter of a second",
        "1 or more",
        at_least(1),
    )
    mixed_prefill_length: int | None = option(
        None,
        "chunked prefill: most prompt tokens of a step that also decodes, so that a long prompt does not freeze "
        "streams; 0: prompts first, streams wait; unset: what this machine computes in 22 ms, or in twice the time of "
        "a step of one token where that is more, measured at start, and more while over a second's worth of prompts "
        "waits",
        "0 or more",
        at_least(0),
    )
    max_running_requests: int = option(256, "sequences in one step", "1 to 4096", between(1, 4096))
    max_waiting_requests: int = option(
        4096,
        "requests in the queue, of each engine core with dp above 1; one more is answered UNAVAILABLE",
        "1 or more",
        at_least(1),
    )
    max_seq_len_override: int | None = option(
        None,
        "longest sequence, prompt and answer; unset: the model's own limit",
        "2 or more",
        at_least(2),
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest decode batch captured as a CUDA graph (on a CPU recorded, up to 8); 0 switches graphs off; unset: "
        "chosen from free memory",
        "0 or more",
        at_least(0),
    )
    cuda_graph_max_tokens: int | None = option(
        None,
        "largest step with prompt tokens whose layers run as CUDA graphs from one attention to the next; 0: launched "
        "kernel by kernel; unset: 2048 to 8192, more for a small model, but 0 where cuda_graph_max_bs is 0, and never "
        "more than a step can have",
        "0 or more",
        at_least(0),
    )
    cache_type: str = one_of("radix", "prefix cache", CACHE_TYPES, "--cache")
    schedule_policy: str = one_of(
        "fcfs",
        "order of the queue: first come first served, or longest cached prefix first",
        POLICIES,
    )
    background_slowdown: float = option(
        2.0,
        "how many times as long as without them a step may take with requests below the default priority, as those of "
        "batches, while others run; 1: they wait meanwhile",
        "1 to 1000",
        between(1, 1000),
    )
    fair_shares: bool = option(
        False,
        "tenants share the engine fairly, whose names requests bring along (`tenant`, or `--tenants` of the endpoint): "
        "who was served least goes first, and who has more than its share of a full batch gives way to who has less "
        "than half of it",
        "true or false",
    )
    tenant_weights: str = option(
        "",
        "with fair_shares: the shares of some tenants, as `NAME=WEIGHT,NAME=WEIGHT`; all others have 1",
        "NAME=WEIGHT, more of them after commas; weights above 0 and at most 1000",
        lambda value: read_weights(value) is not None,
    )
    max_waiting_requests_per_tenant: int | None = option(
        None,
        "with fair_shares: requests of one tenant in the queue; one more is answered UNAVAILABLE; unset: half of "
        "max_waiting_requests",
        "1 or more",
        at_least(1),
    )
    adapters: str = option(
        "",
        "LoRA adapters of the model, as `NAME=FOLDER,NAME=FOLDER` with folders of PEFT's; a request names one as its "
        "model",
        f"NAME=FOLDER, more of them after commas; up to {MAX_ADAPTERS}, names of up to {MAX_ADAPTER_NAME} characters",
        lambda value: read_adapters(value) is not None,
    )
    merge_adapter: str | None = option(
        None,
        "folder of one LoRA adapter that becomes a part of the weights while they are read, which have 16 or 32 bits: "
        "steps cost what the base's do, and DoRA is applied",
        "a folder",
        lambda value: bool(value.strip()),
    )
    max_adapters: int | None = option(
        None,
        "slots for adapters on each device; where more are asked for at a time, they take turns; unset: one for each "
        f"of `adapters`, with room for others {LEAST_SLOTS} at least",
        "1 or more",
        at_least(1),
    )
    adapter_dir: str | None = option(
        None,
        "folder of adapters' folders: each is read when a request names it, or when it is loaded by command, which "
        "reads no others",
        "a folder",
        lambda value: bool(value.strip()),
    )
    max_lora_rank: int | None = option(
        None,
        "room beside all layers that may have adapters, for those that are read while serving; unset: 16 with "
        "adapter_dir or max_adapter_tasks, else what `adapters` need",
        f"1 to {MAX_RANK}",
        between(1, MAX_RANK),
    )
    max_loaded_adapters: int | None = option(
        None,
        "adapters in the host's memory, each as large as a slot: with more, what was asked for longest ago is "
        "forgotten, and read again when a request names it; unset: four for each slot, and all of `adapters`",
        "1 or more",
        at_least(1),
    )
    max_adapter_tasks: int = option(
        0,
        "adapters that requests may bring along as tensors, as with TensorRT-LLM (lora_task_id): so many are kept; 0: "
        "none may",
        "0 to 1000",
        between(0, 1000),
    )
    tp: int = option(
        1,
        "tensor-parallel size; must divide the model's heads, or be a multiple of its KV heads",
        "1 or more",
        at_least(1),
    )
    dp: int = option(
        1,
        "data-parallel size: engine cores of one server, each with a whole model on tp GPUs of its own; a request goes "
        "where its prefix is cached, unless that core has more to do",
        "1 to 64",
        between(1, 64),
    )
    nodes: int = option(
        1,
        "machines that share one model, each with tp / nodes of its ranks; node 0 serves",
        "1 to 64",
        between(1, 64),
    )
    rendezvous: str | None = option(
        None, "address of node 0, at which the other nodes meet it", "HOST:PORT", _host_and_port
    )
    kv_events_endpoint: str | None = option(
        None,
        "address of ZeroMQ at which each engine core publishes what its prefix cache stores and removes, as vLLM does "
        "(KV events): `tcp://*:5557` listens, `tcp://HOST:5557` connects to a subscriber that listens; core i of "
        "several has the port i higher; unset: none",
        "tcp://HOST:PORT or ipc://PATH",
        _zmq_address,
    )
    kv_events_replay_endpoint: str | None = option(
        None,
        "address at which those who missed KV events ask for them again, without a key: `tcp://127.0.0.1:5657` is for "
        "this machine alone, `tcp://*:5657` for all who reach it; unset: none",
        "tcp://HOST:PORT or ipc://PATH",
        _zmq_address,
    )
    kv_events_topic: str = option("", "topic of the KV events, which subscribers may filter by", "any text")
    disable_pynccl: bool = option(
        False,
        "leave all sums over ranks to torch's NCCL; else through memory that the GPUs share, where they can",
        "true or false",
    )
    speculative_config: str | None = option(
        None,
        f"speculative decoding, which changes no text: {MEANING}; unset: none",
        ALLOWED,
    )
    enable_embeddings: bool = option(
        True,
        "answer requests for embeddings and scores; false: each is refused",
        "true or false",
    )
    dummy_weights: bool = option(False, "random weights, for benchmarks", "true or false", internal=True)
    trust_remote_code: bool = option(
        False,
        "let the tokenizer, and a model that runs through transformers, use Python code found in the model folder",
        "true or false",
    )
    idle_cpus: str = one_of(
        "auto",
        "idle processors while sequences run: poll for work, which shortens the way of each token, or sleep as the "
        "kernel likes; auto: poll in a virtual machine, if the process may ask for it",
        ("auto", "poll", "sleep"),
    )
    runner: str = option(
        "model",
        "null replaces the model by a runner that returns tokens without computing, to measure everything else",
        ", ".join(RUNNERS),
        RUNNERS.__contains__,
        internal=True,
    )
    null_runner_rate: float = option(
        0.0,
        "tokens a second of each stream with runner=null; 0: as fast as steps go",
        "0 or more",
        at_least(0),
        internal=True,
    )

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", json.dumps(self.speculative_config))
        check_all(self, OPTIONS)
        self._check_nodes()
        self._check_kv_event_ports()
        self._check_speculation()
        self._check_adapters()

    @property
    def encoder_cache_bytes(self) -> int:
        """Of a model that sees."""
        return (_ENCODER_CACHE_MIB if self.encoder_cache_mib is None else self.encoder_cache_mib) << 20

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Of `adapters`, by name."""
        return read_adapters(self.adapters) or {}

    @property
    def adapter_rank(self) -> int:
        """Of the room for adapters that come while serving; 0: there is none beside that of `adapters`."""
        comes = self.adapter_dir is not None or self.max_adapter_tasks > 0
        return self.max_lora_rank or (DEFAULT_RANK if comes else 0)

    @property
    def num_adapter_slots(self) -> int:
        """0: there are no adapters."""
        named = len(self.adapter_folders)
        if self.adapter_rank:
            return self.max_adapters or max(named, LEAST_SLOTS)
        return min(self.max_adapters or named, named)

    @property
    def most_loaded_adapters(self) -> int:
        """In the host's memory."""
        return self.max_loaded_adapters or max(len(self.adapter_folders), 4 * self.num_adapter_slots)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`; None: no speculative decoding."""
        return None if self.speculative_config is None else read_speculative_config(self.speculative_config)

    @property
    def ranks_per_node(self) -> int:
        """Tensor-parallel ranks on one machine. The first rank of node i is i * ranks_per_node."""
        return self.tp // self.nodes

    def first_device(self, dp_rank: int) -> int:
        """Index of the GPU of an engine core's first rank on its machine; those of its other ranks follow."""
        return dp_rank * self.tp

    def _check_nodes(self) -> None:
        if self.nodes == 1:
            return
        if self.tp % self.nodes:
            raise ConfigError(f"nodes is {self.nodes}; allowed with tp {self.tp}: a number that divides tp")
        if self.dp > 1:
            raise ConfigError(f"dp is {self.dp}; allowed with nodes {self.nodes}: 1")
        if self.rendezvous is None:
            raise ConfigError(f"rendezvous is unset; allowed with nodes {self.nodes}: HOST:PORT, an address of node 0")
        if self.max_adapter_tasks:
            raise ConfigError(
                f"max_adapter_tasks is {self.max_adapter_tasks}; allowed with nodes {self.nodes}: 0, since what a "
                "request brings along is kept on node 0 alone"
            )

    def _check_speculation(self) -> None:
        try:
            _ = self.speculation
        except ValueError as error:
            raise ConfigError(f"speculative_config is {self.speculative_config!r}; {error}") from None

    def _check_adapters(self) -> None:
        named = len(self.adapter_folders)
        if self.max_loaded_adapters is not None and self.max_loaded_adapters < named:
            raise ConfigError(
                f"max_loaded_adapters is {self.max_loaded_adapters}; allowed with {named} adapters: {named} or more"
            )

    def _check_kv_event_ports(self) -> None:
        """Each engine core has its own port for KV events, and one for their replay; these must not overlap."""
        addresses = (self.kv_events_endpoint, self.kv_events_replay_endpoint)
        ports = [int(one.rpartition(":")[2]) for one in addresses if one is not None and one.startswith("tcp://")]
        if len(ports) == 2 and abs(ports[0] - ports[1]) < self.dp:
            raise ConfigError(
                f"kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r} with kv_events_endpoint "
                f"{self.kv_events_endpoint!r}; allowed with dp={self.dp}: a port {self.dp} or more away from it"
            )
        if None not in addresses and addresses[0] == addresses[1]:
            raise ConfigError(
                f"kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r}, as kv_events_endpoint is; allowed: "
                "an address of its own"
            )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> EngineConfig:
        """From the string parameters of a Triton config.pbtxt.

        An unknown name, a wrong value or an unfilled `${placeholder}` raises ConfigError.
        """
        values: dict[str, Any] = {}
        for name, text in parameters.items():
            if name not in OPTIONS:
                raise ConfigError(f"config.pbtxt: {explain_unknown_argument(name, list(OPTIONS))}")
            if text.startswith("${"):
                raise ConfigError(
                    f"{name} is {text!r}: the placeholder was never filled in; remove the line or set a value"
                )
            values[name] = OPTIONS[name].parse(text)
        return cls(**values)


OPTIONS = options_of(EngineConfig)
