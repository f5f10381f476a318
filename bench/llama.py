"""llama.cpp through its C API: only the structs and functions that a speed run needs, for the release in RELEASE.

Structs go by value, so a library in which they look different would be fed rubbish. Known defaults are read back first, and a
library that does not answer with them is refused.
"""

import ctypes
import random
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path

RELEASE = "v0.5.0"
MMAP = 1
F16 = 1
FLASH_ATTENTION_AUTO = -1
ERROR_LEVEL = 4


class PeerError(Exception):
    """The text is a sentence for the user."""


class ModelParams(Structure):
    _fields_ = [
        ("devices", c_void_p),
        ("buffer_overrides", c_void_p),
        ("gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress", c_void_p),
        ("progress_data", c_void_p),
        ("metadata_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("extra_buffers", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(Structure):
    _fields_ = [
        ("context", c_uint32),
        ("batch", c_uint32),
        ("micro_batch", c_uint32),
        ("sequences", c_uint32),
        ("recurrent_snapshots", c_uint32),
        ("outputs", c_uint32),
        ("outputs_per_sequence", c_uint32),
        ("threads", c_int32),
        ("prompt_threads", c_int32),
        ("kind", c_int),
        ("rope_scaling", c_int),
        ("pooling", c_int),
        ("attention", c_int),
        ("flash_attention", c_int),
        ("rope_base", c_float),
        ("rope_scale", c_float),
        ("yarn_mix", c_float),
        ("yarn_magnitude", c_float),
        ("yarn_fast", c_float),
        ("yarn_slow", c_float),
        ("yarn_context", c_uint32),
        ("defragment", c_float),
        ("eval_callback", c_void_p),
        ("eval_data", c_void_p),
        ("key_type", c_int),
        ("value_type", c_int),
        ("abort_callback", c_void_p),
        ("abort_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_attention", c_bool),
        ("no_timings", c_bool),
        ("offload_ops", c_bool),
        ("full_window_cache", c_bool),
        ("unified_cache", c_bool),
        ("samplers", c_void_p),
        ("sampler_count", c_size_t),
        ("other_context", c_void_p),
    ]


class Batch(Structure):
    _fields_ = [
        ("count", c_int32),
        ("tokens", POINTER(c_int32)),
        ("embeddings", POINTER(c_float)),
        ("positions", POINTER(c_int32)),
        ("sequence_counts", POINTER(c_int32)),
        ("sequences", POINTER(POINTER(c_int32))),
        ("outputs", POINTER(c_int8)),
    ]


class ThreadPoolParams(Structure):
    _fields_ = [
        ("cores", c_bool * 512),
        ("threads", c_int),
        ("priority", c_int),
        ("poll", c_uint32),
        ("strict", c_bool),
        ("paused", c_bool),
    ]


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

# Name, result, arguments.
FUNCTIONS = [
    ("llama_log_set", None, [LogCallback, c_void_p]),
    ("llama_backend_init", None, []),
    ("llama_model_default_params", ModelParams, []),
    ("llama_context_default_params", ContextParams, []),
    ("llama_model_load_from_file", c_void_p, [c_char_p, ModelParams]),
    ("llama_init_from_model", c_void_p, [c_void_p, ContextParams]),
    ("llama_attach_threadpool", None, [c_void_p, c_void_p, c_void_p]),
    ("llama_free", None, [c_void_p]),
    ("llama_model_get_vocab", c_void_p, [c_void_p]),
    ("llama_vocab_n_tokens", c_int32, [c_void_p]),
    ("llama_model_n_ctx_train", c_int32, [c_void_p]),
    ("llama_get_memory", c_void_p, [c_void_p]),
    ("llama_memory_clear", None, [c_void_p, c_bool]),
    ("llama_memory_seq_rm", c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    ("llama_decode", c_int32, [c_void_p, Batch]),
    ("llama_synchronize", None, [c_void_p]),
    ("llama_get_logits_ith", POINTER(c_float), [c_void_p, c_int32]),
]

# What the release answers; another layout would put other numbers into these places.
KNOWN_DEFAULTS = {
    "context": 512,
    "batch": 2048,
    "micro_batch": 512,
    "sequences": 1,
    "flash_attention": FLASH_ATTENTION_AUTO,
    "key_type": F16,
    "value_type": F16,
    "full_window_cache": True,
    "unified_cache": False,
}


def library_path(folder):
    path = Path(folder).resolve() / f"libllama.{RELEASE}.so"
    if not path.exists():
        raise PeerError(f"{path} does not exist: `python3 bench/peer.py fetch` gets llama.cpp {RELEASE}")
    return path


def variants(folder):
    """Names of the CPU builds in a folder."""
    prefix = "libggml-cpu-"
    return sorted(path.stem[len(prefix):] for path in Path(folder).glob(f"{prefix}*.so"))


class Library:
    def __init__(self, folder, variant):
        """Loads the library with one of its CPU builds; None takes the one that rates itself best here."""
        self.folder = Path(folder).resolve()
        try:
            self.llama = ctypes.CDLL(str(library_path(folder)))
            # Its symbols are not visible through libllama, which depends on it.
            self.ggml = ctypes.CDLL(str(self.folder / f"libggml.{RELEASE}.so"))
            for name, result, arguments in FUNCTIONS:
                function = getattr(self.llama, name)
                function.restype, function.argtypes = result, arguments
            self.ggml.ggml_backend_load.restype = c_void_p
            self.ggml.ggml_backend_load.argtypes = [c_char_p]
            base = ctypes.CDLL(str(self.folder / "libggml-base.so"))
            self.pool_params = base.ggml_threadpool_params_default
            self.pool_params.restype, self.pool_params.argtypes = ThreadPoolParams, [c_int]
        except (OSError, AttributeError) as error:
            raise PeerError(f"llama.cpp's library does not load: {error}") from None
        self.errors = []
        # The library keeps the pointer, so the object must live as long.
        self.log = LogCallback(self._note_errors)
        self.llama.llama_log_set(self.log, None)
        self._check_layout()
        self.variant = variant or self._best_variant()
        self._load_variant()
        self.llama.llama_backend_init()

    def _note_errors(self, level, text, _data):
        if level == ERROR_LEVEL and text:
            self.errors.append(text.decode("utf-8", "replace").strip())

    def _check_layout(self):
        defaults = self.llama.llama_context_default_params()
        for name, expected in KNOWN_DEFAULTS.items():
            found = getattr(defaults, name)
            if found != expected:
                raise PeerError(
                    f"this library is not llama.cpp {RELEASE}: its default for `{name}` reads as {found}, not {expected}"
                )

    def _score(self, variant):
        try:
            score = ctypes.CDLL(str(self._variant_path(variant))).ggml_backend_score
        except (OSError, AttributeError):
            return 0
        score.restype, score.argtypes = c_int, []
        return score()

    def _best_variant(self):
        scores = {variant: self._score(variant) for variant in variants(self.folder)}
        best = max(scores, key=scores.get, default=None)
        if best is None or scores[best] == 0:
            raise PeerError(f"no CPU build in {self.folder} runs on this machine")
        return best

    def _variant_path(self, variant):
        return self.folder / f"libggml-cpu-{variant}.so"

    def _load_variant(self):
        if self.variant not in variants(self.folder):
            known = ", ".join(variants(self.folder))
            raise PeerError(f"llama.cpp has no CPU build named `{self.variant}`: there are {known}")
        if not self.ggml.ggml_backend_load(str(self._variant_path(self.variant)).encode()):
            raise PeerError(f"llama.cpp's CPU build `{self.variant}` does not run on this machine")

    def thread_pool(self, threads):
        """Threads that stay, as llama.cpp's own programs have them; otherwise each batch starts new ones."""
        make = ctypes.CDLL(str(self._variant_path(self.variant))).ggml_threadpool_new
        make.restype, make.argtypes = c_void_p, [POINTER(ThreadPoolParams)]
        params = self.pool_params(threads)
        if params.threads != threads:
            raise PeerError(f"this library is not llama.cpp {RELEASE}: its thread pool has {params.threads} threads, not {threads}")
        return make(ctypes.byref(params))


class Model:
    def __init__(self, library, path, threads):
        self.llama, self.threads = library.llama, threads
        params = self.llama.llama_model_default_params()
        params.gpu_layers = 0
        params.load_mode = MMAP
        self.handle = self.llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            reason = library.errors[0] if library.errors else "it gives no reason"
            raise PeerError(f"llama.cpp does not load {path}: {reason}")
        self.vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.handle))
        self.longest = self.llama.llama_model_n_ctx_train(self.handle)
        self.pool = library.thread_pool(threads)


class Context:
    """Some sequences of one model, fed with random tokens."""

    def __init__(self, model, tokens, sequences):
        self.model, self.llama, self.sequences = model, model.llama, sequences
        params = self.llama.llama_context_default_params()
        params.context = tokens * sequences
        params.sequences = sequences
        params.threads = params.prompt_threads = model.threads
        # As llama.cpp's own programs have it: sliding layers keep their window only.
        params.full_window_cache = False
        params.no_timings = True
        self.batch_tokens = params.batch
        self.handle = self.llama.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise PeerError(f"llama.cpp makes no context of {tokens} tokens and {sequences} sequences")
        self.llama.llama_attach_threadpool(self.handle, model.pool, model.pool)
        self.memory = self.llama.llama_get_memory(self.handle)
        self.lengths = [0] * sequences
        self.random = random.Random(1)

    def free(self):
        self.llama.llama_free(self.handle)

    def rewind(self, length):
        """Forgets all tokens from a position on, in every sequence."""
        if length == 0:
            self.llama.llama_memory_clear(self.memory, False)
        for sequence in range(self.sequences if length else 0):
            if not self.llama.llama_memory_seq_rm(self.memory, sequence, length, -1):
                raise PeerError(f"llama.cpp cannot forget what comes after {length} tokens")
        self.lengths = [length] * self.sequences

    def feed(self, count, sequence=0, last_output=True):
        """A prompt of random tokens; logits for the last of them at the most."""
        done = 0
        while done < count:
            part = min(self.batch_tokens, count - done)
            done += part
            self._decode([sequence] * part, [0] * (part - 1) + [int(last_output and done == count)])

    def generate(self):
        """One random token in each sequence, with logits for each."""
        self._decode(range(self.sequences), [1] * self.sequences)

    def finish(self):
        self.llama.llama_synchronize(self.handle)

    def last_logits(self):
        return self.llama.llama_get_logits_ith(self.handle, -1)[: self.model.vocab]

    def _decode(self, sequences, outputs):
        count = len(outputs)
        tokens = (c_int32 * count)(*(self.random.randrange(self.model.vocab) for _ in range(count)))
        positions = (c_int32 * count)()
        owners = (c_int32 * count)(*sequences)
        for row, sequence in enumerate(owners):
            positions[row] = self.lengths[sequence]
            self.lengths[sequence] += 1
        pointers = (POINTER(c_int32) * count)()
        for row in range(count):
            pointers[row] = ctypes.cast(ctypes.byref(owners, row * ctypes.sizeof(c_int32)), POINTER(c_int32))
        ones = (c_int32 * count)(*[1] * count)
        status = self.llama.llama_decode(
            self.handle, Batch(count, tokens, None, positions, ones, pointers, (c_int8 * count)(*outputs))
        )
        if status != 0:
            raise PeerError(f"llama.cpp's decode fails with status {status}")
