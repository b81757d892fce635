"""How a checkpoint turns a text into one vector, read from the files of sentence-transformers.

modules.json lists what follows the transformer: a pooling, dense layers, a normalization. The API
takes the defaults of a request from here, and the worker what it has to compute.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from protocol.config.errors import ConfigError
from protocol.sampling import MAX_EMBEDDING_SIZE, PoolingType

MODULES_FILE = "modules.json"
SENTENCE_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
_POOLING_DIRECTORY = "1_Pooling"
_CONFIG = "config.json"
_MODES = {
    "lasttoken": PoolingType.LAST,
    "mean": PoolingType.MEAN,
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
}
"""Pooling types by their names in `pooling_mode`; older files set one of `_OLD_KEYS` to true."""
_OLD_KEYS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
_KNOWN = frozenset({"Transformer", "Pooling", "Dense", "Normalize", "Dropout"})
_ACTIVATIONS = {
    "Tanh": "tanh",
    "Identity": "",
    "GELU": "gelu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
}
"""Activations of dense layers, by the names of torch's modules."""


class DenseLayer(NamedTuple):
    """A dense layer after the pooling; its weights are in `directory`."""

    directory: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    """"tanh", "gelu", "relu" or "sigmoid"; empty: none."""


class SentenceModules(NamedTuple):
    """What the files of sentence-transformers state; the defaults are those without files."""

    pooling: PoolingType | None = None
    normalize: bool = True
    dense: tuple[DenseLayer, ...] = ()
    max_seq_length: int | None = None
    lowers_case: bool = False
    """Texts are put in lower case before they are tokenized."""
    pools_prompts: bool = True
    """Whether a prompt in front of a text takes part in the pooling."""
    prompts: Mapping[str, str] = MappingProxyType({})
    """Texts to put in front of a text, by name."""
    default_prompt_name: str | None = None


def read_sentence_modules(directory: Path) -> SentenceModules:
    """Read what a checkpoint has of these files.

    ConfigError: one of them cannot be used; the text names file, key and value.
    """
    found = SentenceModules()
    path = directory / MODULES_FILE
    is_listed = path.is_file()
    if is_listed:
        found = _with_modules(directory, path, found)
    elif (directory / _POOLING_DIRECTORY / _CONFIG).is_file():
        found = _with_pooling(directory / _POOLING_DIRECTORY / _CONFIG, found)
    if is_listed and (path := directory / LENGTH_FILE).is_file():
        found = _with_length(path, found)
    if (path := directory / SENTENCE_FILE).is_file():
        found = _with_prompts(path, found)
    return found


def pooling_files(paths: list[str]) -> list[str]:
    """Return those of a repository's files that `read_sentence_modules` and the worker read."""
    found = [path for path in (MODULES_FILE, SENTENCE_FILE, LENGTH_FILE) if path in paths]
    for path in paths:
        folder, _, name = path.partition("/")
        number, _, kind = folder.partition("_")
        if not number.isdecimal():
            continue
        is_config = name == _CONFIG and kind in ("Pooling", "Dense")
        if is_config or (name == "model.safetensors" and kind == "Dense"):
            found.append(path)
    return found


def _with_modules(directory: Path, path: Path, found: SentenceModules) -> SentenceModules:
    modules = _content(path)
    _require(isinstance(modules, list) and bool(modules), path, "it", modules, "a list of modules")
    dense: list[DenseLayer] = []
    kinds: list[str] = []
    for number, module in enumerate(modules):
        _require(isinstance(module, dict), path, f"[{number}]", module, "an object")
        kind = str(module.get("type", "")).rpartition(".")[2]
        folder = module.get("path", "")
        expected = f"one of {', '.join(sorted(_KNOWN))}"
        _require(kind in _KNOWN, path, f"[{number}].type", module.get("type"), expected)
        is_plain = isinstance(folder, str) and "/" not in folder and folder != ".."
        _require(is_plain, path, f"[{number}].path", folder, "the name of a directory")
        if kind == "Transformer":
            is_first = number == 0 and folder in ("", ".")
            _require(is_first, path, f"[{number}].path", folder, "empty, of the first module only")
        elif kind == "Pooling":
            _require("Pooling" not in kinds, path, f"[{number}].type", kind, "there only once")
            found = _with_pooling(directory / folder / _CONFIG, found)
        elif kind == "Dense":
            _require("Pooling" in kinds, path, f"[{number}].type", kind, "after the pooling")
            _require("Normalize" not in kinds, path, f"[{number}].type", kind, "before Normalize")
            dense.append(_dense_layer(directory, folder))
        kinds.append(kind)
    _require(kinds[0] == "Transformer", path, "[0].type", kinds[0], "Transformer")
    return found._replace(dense=tuple(dense), normalize="Normalize" in kinds)


def _with_pooling(path: Path, found: SentenceModules) -> SentenceModules:
    config = _object(path)
    names = config.get("pooling_mode")
    if names is None:
        names = [mode for key, mode in _OLD_KEYS.items() if config.get(key)]
    names = [names] if isinstance(names, str) else names
    is_one = isinstance(names, list) and len(names) == 1 and names[0] in _MODES
    _require(is_one, path, "pooling_mode", names, f"one of {', '.join(_MODES)}")
    pools_prompts = config.get("include_prompt", True) is not False
    return found._replace(pooling=_MODES[names[0]], pools_prompts=pools_prompts)


def _dense_layer(directory: Path, folder: str) -> DenseLayer:
    path = directory / folder / _CONFIG
    config = _object(path)
    sizes: list[int] = []
    for key in ("in_features", "out_features"):
        size = config.get(key)
        is_size = isinstance(size, int) and 1 <= size <= MAX_EMBEDDING_SIZE
        _require(is_size, path, key, size, f"an integer from 1 to {MAX_EMBEDDING_SIZE}")
        sizes.append(cast(int, size))
    function = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    name = str(function).rpartition(".")[2]
    expected = f"one of torch's {', '.join(_ACTIVATIONS)}"
    _require(name in _ACTIVATIONS, path, "activation_function", function, expected)
    has_bias = config.get("bias", True) is not False
    return DenseLayer(folder, sizes[0], sizes[1], has_bias, _ACTIVATIONS[name])


def _with_length(path: Path, found: SentenceModules) -> SentenceModules:
    config = _object(path)
    length = config.get("max_seq_length")
    is_length = length is None or (isinstance(length, int) and length >= 2)
    _require(is_length, path, "max_seq_length", length, "an integer of at least 2")
    lowers_case = config.get("do_lower_case") is True
    return found._replace(max_seq_length=length, lowers_case=lowers_case)


def _with_prompts(path: Path, found: SentenceModules) -> SentenceModules:
    config = _object(path)
    prompts = config.get("prompts") or {}
    is_map = isinstance(prompts, dict) and all(isinstance(p, str) for p in prompts.values())
    _require(is_map, path, "prompts", prompts, "an object of texts")
    default = config.get("default_prompt_name")
    is_known = default is None or default in prompts
    _require(is_known, path, "default_prompt_name", default, "one of the names in prompts")
    return found._replace(prompts=prompts, default_prompt_name=default)


def _object(path: Path) -> dict[str, Any]:
    content = _content(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _require(holds: bool, path: Path, key: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{path}: {key} is {json.dumps(value)[:100]}, and must be {expected}")
